# SPDX-License-Identifier: Apache-2.0
"""A lower bound on epsilon from one run (Steinke, Nasr and Jagielski 2023, theorem 5.2).

An auditor guesses the signs of r of m canaries with independent fair signs and abstains on the
others; v guesses are right. Under (eps, delta)-DP the probability of this is at most

    P[B >= v] + 2 m delta max_i (1/i) P[v > B >= v - i],     B ~ Binomial(r, e^eps / (1 + e^eps)).

The largest epsilon for which this is below the significance is refuted with that confidence. The
bound holds for any mechanism, but it cannot exceed about log(m), and is far from tight if many
canaries share a run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import bdtr, bdtrc, expit

SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)  # of the canaries that are guessed


@dataclass(frozen=True)
class OneRunBound:
    """The best bound over numbers of guesses.

    Attributes:
        epsilon: lower bound, >= 0.
        guesses: number of guesses that give the bound.
        correct: number of right guesses.
    """

    epsilon: float
    guesses: int
    correct: int


def one_run_epsilon(
    canaries: int, guesses: int, correct: int, delta: float, significance: float = 0.05
) -> float:
    """Lower bound on epsilon, >= 0.

    Args:
        canaries: m.
        guesses: r, at most m.
        correct: v, at most r.
        delta: in [0, 1].
        significance: chance of a bound above the truth, in (0, 1).

    Raises:
        ValueError: not `0 <= correct <= guesses <= canaries`.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(
            f"Expected correct <= guesses <= canaries, got {correct!r}, {guesses!r}, {canaries!r}."
        )
    if correct == 0 or _chance(0.0, canaries, guesses, correct, delta) >= significance:
        return 0.0
    low = 0.0
    high = 1.0
    while _chance(high, canaries, guesses, correct, delta) < significance:
        low = high
        high = 2 * high
    while high - low > 1e-7:
        middle = (low + high) / 2
        refuted = _chance(middle, canaries, guesses, correct, delta) < significance
        low, high = (middle, high) if refuted else (low, middle)
    return low


def one_run_bound(
    scores: np.ndarray,
    signs: np.ndarray,
    delta: float,
    significance: float = 0.05,
    shares: tuple[float, ...] = SHARES,
) -> OneRunBound:
    """Guess the signs of the canaries with the most extreme scores, for each share; return the best
    bound.

    Args:
        scores: `float [k]`, positive where +1 is guessed.
        signs: `int [k]`, the truth.
        delta: in [0, 1].
        significance: of the result; each share gets its part of it.
        shares: fixed in advance, each in (0, 1].
    """
    order = np.argsort(-np.abs(scores), kind="stable")
    right = np.cumsum((np.sign(scores) == signs)[order])
    total = len(scores)
    found = OneRunBound(0.0, 0, 0)
    counts = sorted({max(1, round(share * total)) for share in shares})
    for guesses in counts:
        correct = int(right[guesses - 1])
        epsilon = one_run_epsilon(total, guesses, correct, delta, significance / len(counts))
        if epsilon > found.epsilon or not found.guesses:
            found = OneRunBound(epsilon, guesses, correct)
    return found


def _chance(epsilon: float, canaries: int, guesses: int, correct: int, delta: float) -> float:
    """Largest chance of so many right guesses under (epsilon, delta)-DP."""
    share = float(expit(epsilon))
    lengths = np.arange(1, correct + 1)
    # P[B <= -1], ..., P[B <= v - 1]
    below = np.concatenate([[0.0], bdtr(np.arange(correct), guesses, share)])
    slack = float(((below[-1] - below[correct - lengths]) / lengths).max(initial=0.0))
    return float(bdtrc(correct - 1, guesses, share)) + 2 * canaries * delta * slack
