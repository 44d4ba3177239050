# SPDX-License-Identifier: Apache-2.0
"""A lower bound on epsilon that assumes a Gaussian-shaped trade-off (Nasr et al. 2023, section 3).

At a cut c the rates of false alarms P(f > c | -1) and misses P(f <= c | +1) get exact upper limits;
a mu-GDP release has `Phi^-1(1 - FPR) - Phi^-1(FNR) <= mu` at every cut. Tighter than the bound of
one run, but not free of assumptions: it takes the canaries' scores as independent draws, and their
trade-off as that of two normal distributions.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtri

from fedrec.attacks.intervals import exact_upper
from fedrec.privacy.accounting.gdp import gdp_epsilon

# in standard deviations of the claimed mechanism's score
CUTS = (-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5)


def gdp_bound(
    scores: np.ndarray,
    signs: np.ndarray,
    scale: float,
    delta: float,
    significance: float = 0.05,
    cuts: tuple[float, ...] = CUTS,
) -> float:
    """Lower bound on epsilon at delta, >= 0.

    Args:
        scores: `float [k]`.
        signs: `int [k]`, the truth.
        scale: unit of the cuts; a function of the claim, not of the scores.
        delta: in (0, 1).
        significance: of the result; each cut gets its part of it, halved between its two rates.
        cuts: fixed in advance.
    """
    plus = scores[signs > 0]
    minus = scores[signs < 0]
    tail = significance / (2 * len(cuts))
    best = -math.inf
    for cut in cuts:
        alarms = exact_upper(int((minus > cut * scale).sum()), len(minus), tail)
        misses = exact_upper(int((plus <= cut * scale).sum()), len(plus), tail)
        best = max(best, float(-ndtri(alarms) - ndtri(misses)))
    return gdp_epsilon(best, delta)
