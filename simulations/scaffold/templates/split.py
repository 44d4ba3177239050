# SPDX-License-Identifier: Apache-2.0
"""A share of each user's rows is held out; all users train."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedrec.config import Config
from fedrec.data.interactions import Interactions
from fedrec.data.splits.rules import Partition, Split
from fedrec.privacy.accounting.sampling import Adjacency
from fedrec.rng import stream


class ExampleConfig(Config):
    """Settings; unknown keys are rejected, and every field has a description."""

    share: float = Field(default=0.2, gt=0, lt=1)
    """Share of each user's rows that are held out, rounded down."""


class Example(Split):
    """Holds out rows at random, user by user."""

    Config = ExampleConfig
    config: ExampleConfig

    def depends_on(self, adjacency: Adjacency) -> str:
        """Nothing of other users while they keep their numbers: each has a stream of its own."""
        return "" if adjacency == "replace-one" else "the users' numbers"

    def split(self, interactions: Interactions) -> Partition:
        """The parts as row numbers; a function of the interactions and the seed."""
        held_out = []
        for user in range(interactions.num_users):
            random = stream(self.seed, "split", user)
            rows = interactions.rows_of(user)
            held_out.append(
                random.choice(rows, size=int(self.config.share * len(rows)), replace=False)
            )
        test = np.concatenate(held_out)
        train = np.setdiff1d(np.arange(len(interactions)), test)
        none = np.empty(0, dtype=np.int64)
        return Partition(np.unique(interactions.users), train, validation_rows=none, test_rows=test)
