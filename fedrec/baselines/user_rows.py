# SPDX-License-Identifier: Apache-2.0
"""Shared code of systems with a row of parameters per user: the treatment of users who were not
training users.

`transductive`: evaluated users are in training, with their known items. `fold-in`: they are not;
when they are scored, their row is computed from their known items with all other parameters fixed.
A transductive system also folds in users that it does not know.
"""

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
        fitted: the histories of the training users.
        own: `float32 [users, width]`, a row for each user of `fitted`.
    """

    config: UserRowsConfig
    fitted: Histories
    own: np.ndarray

    @property
    def transductive(self) -> bool:
        """Whether it must also be fitted to the known items of the users to be scored."""
        return self.config.unseen_users == "transductive"

    def rows(self, histories: Histories) -> np.ndarray:
        """`float32 [users, width]`: rows of some users, fitted or folded in."""
        places = self.fitted.places(histories)
        unseen = np.flatnonzero(places < 0)
        found = np.zeros((histories.num_users, self.own.shape[1]), dtype=np.float32)
        found[places >= 0] = self.own[places[places >= 0]]
        if len(unseen):
            found[unseen] = self.folded_in(histories.take(unseen))
        return found

    @abstractmethod
    def folded_in(self, histories: Histories) -> np.ndarray:
        """`float32 [users, width]`: rows of users that were not in training, each computed from its
        own items only."""


def own_seed(items: np.ndarray) -> int:
    """A seed that depends on a user's items `int64 [n]` only, so that the other users of a block
    make no difference."""
    return zlib.crc32(np.sort(items).astype(np.int64).tobytes())
