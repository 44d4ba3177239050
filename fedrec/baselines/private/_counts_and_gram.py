# SPDX-License-Identifier: Apache-2.0
"""Two releases, once each: noisy counts of items, and the Gram matrix of the items with the largest
ones."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedrec.baselines.private._private import Part, PrivateConfig


class CountsAndGramConfig(PrivateConfig):
    """Settings of the two releases."""

    items: int = Field(default=500, ge=1)
    """Number m of items (with the largest noisy counts) in the Gram matrix; at most the
    catalogue."""
    clip_norm: float = Field(default=8.0, ge=1e-9)
    """c, bound on the Frobenius norm of a user's matrix, about the number of selected items that it
    likes."""
    exponent: float = Field(default=0.2, ge=0)
    """Items are weighted by their noisy counts to the power of minus this; 0: equal weights."""
    count_share: float = Field(default=0.06, gt=0, lt=1)
    """Share of the budget (of mu^2) that the counts take."""
    count_clip: float = Field(default=6.0, gt=0)
    """Bound on the L2 norm of a user's counts: sqrt(n) for n liked items."""

    def releases(self) -> tuple[Part, ...]:
        """The counts, and the Gram matrix; neither has signs."""
        return (
            Part("counts", self.count_clip, self.count_share, contributions="non-negative"),
            Part("gram", self.clip_norm, 1 - self.count_share, contributions="non-negative"),
        )


def count_weights(counts: np.ndarray, noise: float, exponent: float) -> np.ndarray:
    """Weights of items, `float64 [items]`, with mean 1: counts to the power of minus the exponent.

    Args:
        counts: noisy ones.
        noise: their standard deviation; smaller counts are replaced by it.
        exponent: >= 0.
    """
    weights = np.maximum(counts, max(noise, 1.0)).astype(np.float64) ** -exponent
    return weights / weights.mean()
