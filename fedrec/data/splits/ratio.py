# SPDX-License-Identifier: Apache-2.0
"""Each user's rows are divided by fixed shares: 80:10:10 (UPC-SDG, section 4.1.1; DP-VAE, section
4.1.1).

UPC-SDG splits each user's rows at random; DP-VAE gives the shares only, not whether users or rows
are divided, and we divide each user's rows. How counts are rounded is not stated: we round the
held-out ones half up, and a user keeps at least one training row (validation, then test, gives
way).
"""

from __future__ import annotations

import math
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from fedrec.config import Config
from fedrec.data.interactions import Interactions
from fedrec.data.split import Partition, Split
from fedrec.data.splits._order import Order, Stream, places, sort_key, users_of
from fedrec.privacy.adjacency import Adjacency


class RatioConfig(Config):
    """Settings of the split by shares."""

    train: float = Field(0.8, gt=0, le=1)
    """Share of each user's rows for training, in (0, 1]."""
    validation: float = Field(0.1, ge=0, lt=1)
    """Share of each user's rows for validation, in [0, 1)."""
    test: float = Field(0.1, ge=0, lt=1)
    """Share of each user's rows for testing, in [0, 1)."""
    order: Order = "random"
    """Order of the rows: "random", or "temporal" (training rows first, then validation, then
    test)."""
    stream: Stream = "client"
    """Source of a random order: "client" (each client's own, so that no client's rows change the
    parts of others, which privacy needs), or "dataset" (one shuffle of all rows)."""

    @model_validator(mode="after")
    def _sums_to_one(self) -> Self:
        if not math.isclose(self.train + self.validation + self.test, 1, abs_tol=1e-9):
            raise ValueError("train + validation + test equal to 1")
        return self


class Ratio(Split):
    """Fixed shares of each user's rows for training, validation and testing."""

    name = "ratio"
    Config = RatioConfig
    paper = "UPC-SDG (Liu et al. 2022), as stated there"
    config: RatioConfig

    def depends_on(self, adjacency: Adjacency) -> str:
        """One shuffle of all rows, with `stream = "dataset"` and a random order."""
        shuffled = self.config.order == "random" and self.config.stream == "dataset"
        return "one shuffle of all rows (split.stream = 'dataset')" if shuffled else ""

    def split(self, interactions: Interactions) -> Partition:
        """Divide the interactions; every user with a row is a training client.

        Raises:
            DataError: the order is temporal and the interactions have no times.
        """
        key = sort_key(interactions, self.config.order, self.seed, self.config.stream)
        place, count = places(interactions.users, key)
        test_count = np.minimum(_rounded(self.config.test * count), count - 1)
        validation_count = np.minimum(
            _rounded(self.config.validation * count), count - 1 - test_count
        )
        from_end = count - 1 - place
        test = from_end < test_count
        validation = ~test & (from_end < test_count + validation_count)
        train = ~(test | validation)
        return Partition(
            training_clients=users_of(interactions, train),
            train_rows=np.flatnonzero(train),
            validation_rows=np.flatnonzero(validation),
            test_rows=np.flatnonzero(test),
        )


def _rounded(numbers: np.ndarray) -> np.ndarray:
    return (numbers + 0.5).astype(np.int64)
