# SPDX-License-Identifier: Apache-2.0
"""Confidence intervals of proportions.

Clopper and Pearson 1934 (exact: never covers less than it says), for proportions that a claim rests
on; Wilson 1927 (close to its level on average), for proportions that describe; Newcombe 1998
(MOVER), for the mean of two proportions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy.special import betaincinv
from scipy.stats import binomtest

Interval = tuple[float, float]


def clopper_pearson(successes: int, trials: int, confidence: float = 0.95) -> Interval:
    """Exact two-sided interval of a proportion; `(0, 1)` without a trial.

    Raises:
        ValueError: not `0 <= successes <= trials`, or the confidence is not in (0, 1).
    """
    _check(successes, trials, confidence)
    tail = (1 - confidence) / 2
    return exact_lower(successes, trials, tail), exact_upper(successes, trials, tail)


def exact_lower(successes: int, trials: int, tail: float) -> float:
    """One-sided exact lower limit: a smaller proportion gives this many successes with a chance
    below `tail`."""
    return float(betaincinv(successes, trials - successes + 1, tail)) if successes else 0.0


def exact_upper(successes: int, trials: int, tail: float) -> float:
    """One-sided exact upper limit, see `exact_lower`."""
    return (
        float(betaincinv(successes + 1, trials - successes, 1 - tail))
        if successes < trials
        else 1.0
    )


def wilson(successes: int, trials: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion; `(0, 1)` without a trial.

    Raises:
        ValueError: see `clopper_pearson`.
    """
    _check(successes, trials, confidence)
    if not trials:
        return 0.0, 1.0
    found = binomtest(successes, trials).proportion_ci(confidence, "wilson")
    return float(found.low), float(found.high)


def mean_of(proportions: Sequence[tuple[int, int]], confidence: float = 0.95) -> Interval:
    """Interval of the mean of independent proportions, each given as (successes, trials); without
    trials it is 1/2."""
    low = high = centre = 0.0
    for successes, trials in proportions:
        share = successes / trials if trials else 0.5
        below, above = wilson(successes, trials, confidence)
        centre = centre + share
        low = low + (share - below) ** 2
        high = high + (above - share) ** 2
    count = len(proportions)
    return (centre - math.sqrt(low)) / count, (centre + math.sqrt(high)) / count


def _check(successes: int, trials: int, confidence: float) -> None:
    if not 0 <= successes <= trials:
        raise ValueError(f"Expected 0 <= successes <= trials, got {successes!r} of {trials!r}.")
    if not 0 < confidence < 1:
        raise ValueError(f"Expected a confidence in (0, 1), got {confidence!r}.")
