# SPDX-License-Identifier: Apache-2.0
"""Lower bounds on epsilon, and point estimates, from what an audit observes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import bdtr, bdtrc, betaincinv, expit, log_ndtr, ndtr, ndtri
from scipy.stats import binomtest

from fedrec.baselines.base import Ratings
from fedrec.baselines.private.pnbm import DpsgdPnbm, DpsgdPnbmConfig, sensitivity
from fedrec.privacy.accounting.rdp import gdp_epsilon
from fedrec.rng import stream

# Epsilon at a given delta between two normal distributions (Andrew et al. 2023, section 4): the set
# where the log density ratio exceeds epsilon is bounded by the roots of a quadratic. For equal
# variances it is that of `fedrec.privacy.accounting.rdp`.

_HIGHEST = 1e6


def epsilon_of_normals(
    means: tuple[np.ndarray, np.ndarray], sds: tuple[np.ndarray, np.ndarray], delta: float
) -> np.ndarray:
    """Epsilon at delta between normal distributions, the larger of both directions.

    Args:
        means: of the first and of the second distribution, `float [n]` each.
        sds: their standard deviations, `float [n]` each, >= 0.
        delta: in (0, 1).

    Returns:
        `float64 [n]`; infinity where a standard deviation is 0 and the means differ.
    """
    (m0, m1) = np.atleast_1d(*means)
    (s0, s1) = np.atleast_1d(*sds)
    epsilons = np.full(len(m0), np.inf)
    same = (m0 == m1) & (s0 == s1)
    epsilons[same] = 0.0
    usable = (s0 > 0) & (s1 > 0) & ~same
    # In units of the second distribution: N(a, s^2) against N(0, 1).
    shift = (m0[usable] - m1[usable]) / s1[usable]
    scale = s0[usable] / s1[usable]
    epsilons[usable] = np.maximum(
        _one_way(shift, scale, delta), _one_way(-shift / scale, 1 / scale, delta)
    )
    return epsilons


def _one_way(shift: np.ndarray, scale: np.ndarray, delta: float) -> np.ndarray:
    """Epsilon with which N(shift, scale^2) is hidden in N(0, 1), by bisection for all at once."""
    low = np.zeros(len(shift))
    high = np.ones(len(shift))
    while (above := _spent(high, shift, scale) > delta).any() and high.max(initial=0.0) < _HIGHEST:
        low = np.where(above, high, low)
        high = np.where(above, 2 * high, high)
    for _ in range(45):
        middle = (low + high) / 2
        above = _spent(middle, shift, scale) > delta
        low = np.where(above, middle, low)
        high = np.where(above, high, middle)
    zero = _spent(np.zeros(len(shift)), shift, scale) <= delta
    return np.where(zero, 0.0, np.where(high < _HIGHEST, high, np.inf))


def _spent(epsilon: np.ndarray, shift: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """P(A) - e^eps Q(A) for P = N(shift, scale^2), Q = N(0, 1) and A where log dP/dQ > eps."""
    a = (1 - 1 / scale**2) / 2  # log dP/dQ = a x^2 + b x + c
    b = shift / scale**2
    c = -np.square(shift / scale) / 2 - np.log(scale) - epsilon
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        flat = np.abs(a) < 1e-12
        root = np.sqrt(np.maximum(b * b - 4 * a * c, 0.0))
        # avoids the difference of two nearly equal numbers
        q = -(b + np.where(b < 0, -1.0, 1.0) * root) / 2
        first = np.where(flat, -c / b, q / a)
        second = np.where(flat | (q == 0), np.inf, c / q)
        left = np.minimum(first, second)
        right = np.maximum(first, second)
        none = ~flat & (b * b - 4 * a * c <= 0)
        inside = _masses(left, right, epsilon, shift, scale)
        outside = _masses(np.full_like(left, -np.inf), left, epsilon, shift, scale)
        outside = outside + _masses(right, np.full_like(right, np.inf), epsilon, shift, scale)
        whole = 1 - np.exp(np.minimum(epsilon, 700.0))
        ray_up = _masses(-c / b, np.full_like(left, np.inf), epsilon, shift, scale)
        ray_down = _masses(np.full_like(left, -np.inf), -c / b, epsilon, shift, scale)
    curved = np.where(a > 0, np.where(none, whole, outside), np.where(none, 0.0, inside))
    return np.where(flat, np.where(b > 0, ray_up, ray_down), curved)


def _masses(
    left: np.ndarray, right: np.ndarray, epsilon: np.ndarray, shift: np.ndarray, scale: np.ndarray
) -> np.ndarray:
    """P - e^eps Q of the interval (left, right)."""
    p = _gaussian_interval((left - shift) / scale, (right - shift) / scale)
    with np.errstate(divide="ignore"):
        return np.exp(p) - np.exp(np.minimum(epsilon + _gaussian_interval(left, right), 700.0))


def _gaussian_interval(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Log of the standard normal mass of (left, right), without loss in either tail."""
    flip = left > 0
    low = np.where(flip, -right, left)
    high = np.where(flip, -left, right)
    upper = log_ndtr(high)
    lower = log_ndtr(low)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(
            np.isneginf(upper), -np.inf, upper + np.log1p(-np.exp(np.minimum(lower - upper, 0.0)))
        )


# A lower bound on epsilon from one run (Steinke, Nasr and Jagielski 2023, theorem 5.2).
#
# An auditor guesses the signs of r of m canaries with independent fair signs and abstains on the
# others; v guesses are right. Under (eps, delta)-DP the probability of this is at most
#
#     P[B >= v] + 2 m delta max_i (1/i) P[v > B >= v - i],     B ~ Binomial(r, e^eps / (1 + e^eps)).
#
# The largest epsilon for which this is below the significance is refuted with that confidence. The
# bound holds for any mechanism, but it cannot exceed about log(m), and is far from tight if many
# canaries share a run.

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

    def excess(epsilon: float) -> float:
        return _chance(epsilon, canaries, guesses, correct, delta) - significance

    high = 1.0
    while excess(high) < 0:
        high = 2 * high
    root: Any = brentq(excess, 0.0, high, xtol=1e-8)
    return max(0.0, root - 1e-7)  # on the side that is refuted


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
    best = OneRunBound(0.0, 0, 0)
    counts = sorted({max(1, round(share * total)) for share in shares})
    for guesses in counts:
        correct = int(right[guesses - 1])
        epsilon = one_run_epsilon(total, guesses, correct, delta, significance / len(counts))
        if epsilon > best.epsilon or not best.guesses:
            best = OneRunBound(epsilon, guesses, correct)
    return best


def _chance(epsilon: float, canaries: int, guesses: int, correct: int, delta: float) -> float:
    """Largest chance of so many right guesses under (epsilon, delta)-DP."""
    share = float(expit(epsilon))
    lengths = np.arange(1, correct + 1)
    # P[B <= -1], ..., P[B <= v - 1]
    below = np.concatenate([[0.0], bdtr(np.arange(correct), guesses, share)])
    slack = float(((below[-1] - below[correct - lengths]) / lengths).max(initial=0.0))
    return float(bdtrc(correct - 1, guesses, share)) + 2 * canaries * delta * slack


# Confidence intervals of proportions.
#
# Clopper and Pearson 1934 (exact: never covers less than it says), for proportions that a claim
# rests on; Wilson 1927 (close to its level on average), for proportions that describe; Newcombe
# 1998 (MOVER), for the mean of two proportions.

Interval = tuple[float, float]


def clopper_pearson(successes: int, trials: int, confidence: float = 0.95) -> Interval:
    """Exact two-sided interval of a proportion; `(0, 1)` without a trial."""
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
    """Wilson's score interval of a proportion; `(0, 1)` without a trial."""
    if not trials:
        return 0.0, 1.0
    interval = binomtest(successes, trials).proportion_ci(confidence, "wilson")
    return float(interval.low), float(interval.high)


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


# A point estimate of epsilon (Andrew et al. 2023, section 4): no guarantee, but no slack either.
#
# The scores of the canaries of each sign are fitted by a normal distribution; the estimate is the
# epsilon at delta between the two.
#
# The estimate errs upwards, because two fits of one variance never agree exactly. For exact normal
# scores of 500 canaries per sign it is 12 to 19 % too high on average, and the interval covers the
# truth in four of five runs, the others being above it (`tests/fedrec/attacks/audit`). So a high
# estimate is a reason to investigate, not a finding.
#
# Where this differs from the paper: its canaries are random directions and its second distribution
# is that of directions that were not used; here both are canaries, of opposite signs.


@dataclass(frozen=True)
class EpsilonEstimate:
    """An estimate of epsilon with a bootstrap interval of about 95 %.

    Attributes:
        epsilon: the estimate; may be infinite.
        low, high: ends of the interval, bias-corrected; the estimate itself is not corrected, and
            errs upwards.
    """

    epsilon: float
    low: float
    high: float


def estimate_epsilon(
    scores: np.ndarray, signs: np.ndarray, delta: float, *, seed: int = 0, resamples: int = 300
) -> EpsilonEstimate:
    """Fit, compare, and resample the canaries.

    Args:
        scores: `float [k]`.
        signs: `int [k]`; at least two canaries of each sign.
        delta: in (0, 1).
        seed: of the stream `"canary-bootstrap"`.
        resamples: number of bootstrap resamples, drawn within each sign.

    Raises:
        ValueError: fewer than two canaries of a sign.
    """
    groups = [scores[signs > 0], scores[signs < 0]]
    if min(map(len, groups)) < 2:
        raise ValueError("Expected at least two canaries of each sign.")
    random = stream(seed, "canary-bootstrap")
    drawn = [
        np.vstack([g[None], g[random.integers(0, len(g), (resamples, len(g)))]]) for g in groups
    ]
    means = tuple(group.mean(axis=1) for group in drawn)
    sds = tuple(group.std(axis=1, ddof=1) for group in drawn)
    epsilons = epsilon_of_normals(means, sds, delta)  # type: ignore[arg-type]
    return EpsilonEstimate(float(epsilons[0]), *_interval(epsilons[0], epsilons[1:]))


def _interval(value: float, resampled: np.ndarray) -> tuple[float, float]:
    """Bias-corrected percentiles (Efron 1987): resampling repeats the upward bias of the fit, so
    that it can be corrected."""
    below = (np.count_nonzero(resampled < value) + np.count_nonzero(resampled == value) / 2) / len(
        resampled
    )
    shift = 2 * ndtri(np.clip(below, 1 / len(resampled), 1 - 1 / len(resampled)))
    shares = ndtr(shift + ndtri([0.025, 0.975]))
    low, high = np.quantile(resampled, shares, method="inverted_cdf")
    return float(low), float(high)


# A lower bound on epsilon that assumes a Gaussian-shaped trade-off (Nasr et al. 2023, section 3).
#
# At a cut c the rates of false alarms P(f > c | -1) and misses P(f <= c | +1) get exact upper
# limits; a mu-GDP release has `Phi^-1(1 - FPR) - Phi^-1(FNR) <= mu` at every cut. Tighter than the
# bound of one run, but not free of assumptions: it takes the canaries' scores as independent draws,
# and their trade-off as that of two normal distributions.

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


# Datasets that differ in one rating: a lower bound on epsilon from how well releases distinguish
# them.
#
# For an epsilon-DP release the chance of any answer differs by a factor of at most exp(epsilon)
# between the two. So if an adversary is right with chance p on the one, and wrong with chance q on
# the other, epsilon is at least ln(p / q); with exact limits of Clopper and Pearson in place of p
# and q this holds with the requested confidence.
#
# The adversary compares the likelihoods of a release under independent Laplace noise on the
# noiseless result of each dataset. The data are constructed so that one rating has a large effect:
# a user has n ratings at both ends of the scale, and all others rate everything in the middle, so
# that the item means hardly change. The row of similarities of the changed item changes with the
# error of that rating times n - 1 deviations, and the rows of the user's other items change because
# the item is their neighbour.


@dataclass(frozen=True)
class LowerBound:
    """A lower bound on epsilon from distinguishing two datasets.

    Attributes:
        epsilon: lower bound, at least 0.
        right: how often the first dataset was classified as the first.
        wrong: how often the second dataset was classified as the first.
        trials: number of releases of each dataset.
    """

    epsilon: float
    right: int
    wrong: int
    trials: int


def lower_bound(right: int, wrong: int, trials: int, confidence: float = 0.95) -> LowerBound:
    """The bound from numbers of right and wrong answers in `trials` trials each."""
    tail = (1 - confidence) / 2
    least = exact_lower(right, trials, tail)
    most = exact_upper(wrong, trials, tail)
    return LowerBound(max(0.0, math.log(least / most)) if least else 0.0, right, wrong, trials)


def laplace_score(
    release: np.ndarray, first: np.ndarray, second: np.ndarray, scale: float
) -> float:
    """Log-likelihood ratio of a release under Laplace noise of that scale on `first` and on
    `second`, all `float64 [...]` of the same shape."""
    return float((np.abs(release - second) - np.abs(release - first)).sum() / scale)


def neighbours(ratings: int, others: int = 20) -> tuple[Ratings, Ratings]:
    """Two datasets over `ratings` items that differ in one rating: user 0 rated the first item 5 or
    1.

    Args:
        ratings: number of ratings of user 0.
        others: number of users who rate everything in the middle.
    """
    users = np.repeat(np.arange(others + 1), ratings)
    items = np.tile(np.arange(ratings), others + 1)
    values = np.where(users == 0, np.where(items % 2 == 0, 5.0, 1.0), 3.0)
    other = values.copy()
    other[0] = 1.0
    sizes = (others + 1, ratings)
    return Ratings(*sizes, users, items, values), Ratings(*sizes, users, items, other)


def audit_one_rating(
    config: DpsgdPnbmConfig, ratings: int, trials: int, *, seed: int = 0, confidence: float = 0.95
) -> LowerBound:
    """Run algorithm 1 on both datasets, and bound the epsilon of one rating.

    Args:
        config: settings; one iteration, with `start = "constant"` so that both start alike.
        ratings: number of ratings of the user one of whose ratings differs.
        trials: number of runs on each dataset.
        seed: of the first run.
        confidence: of the bound.

    Raises:
        ValueError: there is no noise, more than one iteration, or a start that differs from run to
            run.
    """
    if config.epsilon is None or config.iterations != 1 or config.start != "constant":
        raise ValueError("Expected an epsilon, one iteration and start = 'constant'.")
    plain = config.model_copy(update={"epsilon": None, "sample": 1.0})
    data = neighbours(ratings)
    first, second = (_released(plain, rows) for rows in data)
    entry = sensitivity(1, config.spread, config.floor) * config.sample / config.epsilon
    scale = config.learning_rate * config.rescale * entry
    called = [0, 0]
    for trial in range(trials):
        for side, rows in enumerate(data):
            release = _released(config.model_copy(update={"seed": seed + 2 * trial + side}), rows)
            called[side] += laplace_score(release, first, second, scale) > 0
    return lower_bound(called[0], called[1], trials, confidence)


def _released(config: DpsgdPnbmConfig, data: Ratings) -> np.ndarray:
    """The similarities that are released."""
    system = DpsgdPnbm(config)
    system.fit_ratings(data)
    return system.similarity
