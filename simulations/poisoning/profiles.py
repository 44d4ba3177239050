# SPDX-License-Identifier: Apache-2.0
"""What attacks with made-up profiles share: the number of items, and filler items."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedrec.config import Config
from fedrec.data.adversary.known import Known


class ProfileConfig(Config):
    """Settings of made-up profiles."""

    items: int | None = Field(default=None, ge=1)
    """Number of items of a profile, targets included; default: the median of honest clients."""

    def fillers(self, known: Known) -> int:
        """Number of items beside the targets."""
        return max(0, (self.items or known.usual) - len(known.targets))


def with_fillers(
    known: Known, random: np.random.Generator, chosen: np.ndarray, count: int
) -> np.ndarray:
    """The targets, chosen items and random others, `int64 [n]`, in random order.

    Args:
        known: what the adversary knows.
        random: where the random items come from.
        chosen: `int64 [m]`, items without targets.
        count: number of items without targets in all, as far as the catalogue has them.
    """
    taken = np.concatenate([known.targets, chosen])
    others = np.setdiff1d(np.arange(known.items), taken)
    size = min(max(0, count - len(chosen)), len(others))
    return random.permutation(
        np.concatenate([taken, random.choice(others, size=size, replace=False)])
    )
