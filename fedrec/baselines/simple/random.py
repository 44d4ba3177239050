# SPDX-License-Identifier: Apache-2.0
"""Items in random order, the weakest baseline.

Of M items a user with n known ones gets each held-out positive into the first k places with
probability k / (M - n).
"""

import zlib

import numpy as np
import torch
from pydantic import Field

from fedrec.baselines.base import Baseline, Histories
from fedrec.config import Config
from fedrec.rng import stream


class RandomConfig(Config):
    """Settings of the random order."""

    seed: int = Field(default=0, ge=0)
    """Seed of the order."""


class Random(Baseline):
    """Uniform scores, the same for a user whenever asked."""

    name = "random"
    Config = RandomConfig
    config: RandomConfig

    def fit(self, histories: Histories) -> None:
        """There is nothing to learn."""

    def scores(self, histories: Histories) -> torch.Tensor:
        """`float32 [users, items]` in [0, 1); they depend on the user's number, or on its items."""
        rows = []
        for user in range(histories.num_users):
            own = histories.items[histories.offsets[user] : histories.offsets[user + 1]]
            number = (
                zlib.crc32(own.tobytes()) if histories.users is None else int(histories.users[user])
            )
            rows.append(
                stream(self.config.seed, "baseline-random", number).random(
                    histories.num_items, np.float32
                )
            )
        table = np.stack(rows) if rows else np.zeros((0, histories.num_items), np.float32)
        return torch.from_numpy(table)
