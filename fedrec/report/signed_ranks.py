# SPDX-License-Identifier: Apache-2.0
"""Wilcoxon's signed-rank test of paired differences (Wilcoxon 1945).

SciPy has it, but the import of its tests takes as long as half of what a short run imports. So a
sample to which its normal approximation applies is tested here, with the same ties and without a
correction for continuity, as there; the distribution of a small sample is SciPy's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_EXACT_WITHOUT_TIES = 50  # the largest sample whose distribution SciPy computes, without ties,
_EXACT_WITH_TIES = 13  # and with some


@dataclass(frozen=True)
class SignedRanks:
    """Ranks of the sizes of differences.

    Attributes:
        p: two-sided p-value, in [0, 1]; 1 where nobody differs.
        effect: matched-pairs rank-biserial correlation, in [-1, 1]: share of ranks of positive
            differences minus share of the others; 0 where nobody differs.
    """

    p: float
    effect: float


def signed_ranks(differences: np.ndarray) -> SignedRanks:
    """Test whether differences are symmetric about 0.

    Args:
        differences: finite values, `[users]`; zeros are left out.
    """
    moved = differences[differences != 0]
    if not len(moved):
        return SignedRanks(1.0, 0.0)
    _, places, ties = np.unique(np.abs(moved), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[places]
    balance = float((ranks * np.sign(moved)).sum())
    small = _EXACT_WITH_TIES if len(ties) < len(moved) else _EXACT_WITHOUT_TIES
    p = _exact(moved) if len(moved) <= small else _approximate(balance, len(moved), ties)
    return SignedRanks(p, balance / float(ranks.sum()))


def _approximate(balance: float, count: int, ties: np.ndarray) -> float:
    """P-value of the sum of signed ranks, whose variance is that of `count` signs of ranks; ties
    lower it."""
    variance = count * (count + 1) * (2 * count + 1) / 6 - float((ties**3 - ties).sum()) / 12
    return math.erfc(abs(balance) / math.sqrt(2 * variance))


def _exact(moved: np.ndarray) -> float:
    from scipy import stats

    return float(np.asarray(stats.wilcoxon(moved))[1])
