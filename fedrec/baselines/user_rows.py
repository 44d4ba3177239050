# SPDX-License-Identifier: Apache-2.0
"""Shared code of systems with a row of parameters per user: the treatment of users who were not
training users.

`transductive`: users who are evaluated are trained with, on their known items. `fold-in`: they are
not; everything but their own row is left as it is, and that is made from their known items when
they are scored. A transductive system folds in whoever it still does not know.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from typing import Literal

import numpy as np
from pydantic import Field

from fedrec.baselines.base import Baseline, Histories
from fedrec.config import Config


class UserRowsConfig(Config):
    """Settings of all systems with a row per user."""

    unseen_users: Literal["transductive", "fold-in"] = "transductive"
    """Evaluated users who are not training users: also trained on (`transductive`), or folded in
    afterwards (`fold-in`)."""
    seed: int = Field(default=0, ge=0)
    """Seed of all random draws."""


class UserRowsBaseline(Baseline):
    """A baseline with a row of parameters per user; `fit` keeps the histories and the rows.

    Attributes:
        fitted: what it was fitted to.
        own: `float32 [users, width]`, a row for each user of `fitted`.
    """

    config: UserRowsConfig
    fitted: Histories
    own: np.ndarray

    @property
    def transductive(self) -> bool:
        """Whether it has to be fitted with the known items of the users that it is to score,
        too."""
        return self.config.unseen_users == "transductive"

    def rows(self, histories: Histories) -> np.ndarray:
        """`float32 [users, width]`: rows of some users, as they were fitted, or folded in."""
        places = self.fitted.places(histories)
        unseen = np.flatnonzero(places < 0)
        found = np.zeros((histories.num_users, self.own.shape[1]), dtype=np.float32)
        found[places >= 0] = self.own[places[places >= 0]]
        if len(unseen):
            found[unseen] = self.folded_in(histories.take(unseen))
        return found

    @abstractmethod
    def folded_in(self, histories: Histories) -> np.ndarray:
        """`float32 [users, width]`: rows of users who were not trained with, each from its own
        items alone."""


def own_seed(items: np.ndarray) -> int:
    """A seed that depends on a user's items `int64 [n]` only, so that the other users of a block
    make no difference."""
    return zlib.crc32(np.sort(items).astype(np.int64).tobytes())
