# SPDX-License-Identifier: Apache-2.0
"""Lower bounds on epsilon, and point estimates, from an audit's observations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import bdtr, bdtrc, betaincinv, expit, ndtri
from scipy.stats import binomtest

from fedrec.baselines.base import Ratings
from fedrec.baselines.private.ratings import DpsgdPnbm, DpsgdPnbmConfig, sensitivity
from fedrec.privacy.accounting.rdp import gdp_epsilon
from fedrec.rng import stream

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

_SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)  # of the canaries that are guessed


@dataclass(frozen=True)
class OneRunBound:
    """Best bound over numbers of guesses.

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
    """
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
    scores: np.ndarray, signs: np.ndarray, delta: float, significance: float = 0.05
) -> OneRunBound:
    """Best bound from guessing the signs of the canaries with the most extreme scores, over shares.

    Args:
        scores: `float [k]`, positive where +1 is guessed.
        signs: `int [k]`, the truth.
        delta: in [0, 1].
        significance: total significance, divided equally among the shares.
    """
    order = np.argsort(-np.abs(scores), kind="stable")
    right = np.cumsum((np.sign(scores) == signs)[order])
    total = len(scores)
    best = OneRunBound(0.0, 0, 0)
    counts = sorted({max(1, round(share * total)) for share in _SHARES})
    for guesses in counts:
        correct = int(right[guesses - 1])
        epsilon = one_run_epsilon(total, guesses, correct, delta, significance / len(counts))
        if epsilon > best.epsilon or not best.guesses:
            best = OneRunBound(epsilon, guesses, correct)
    return best


def _chance(epsilon: float, canaries: int, guesses: int, correct: int, delta: float) -> float:
    """Largest probability of `correct` right guesses under (epsilon, delta)-DP."""
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
    return _exact_lower(successes, trials, tail), _exact_upper(successes, trials, tail)


def _exact_lower(successes: int, trials: int, tail: float) -> float:
    """One-sided exact lower limit: under a smaller proportion this many successes have probability
    below `tail`."""
    return float(betaincinv(successes, trials - successes + 1, tail)) if successes else 0.0


def _exact_upper(successes: int, trials: int, tail: float) -> float:
    """One-sided exact upper limit, see `_exact_lower`."""
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
# Where this differs from the paper: its canaries are random directions and its second distribution
# is that of directions that were not used; here both are canaries, of opposite signs. What the two
# signs release is mirrored, so both distributions have one standard deviation, which is estimated
# from all canaries. Two separate ones would never agree exactly, which raises epsilon.


@dataclass(frozen=True)
class EpsilonEstimate:
    """An estimate of epsilon with a bootstrap interval of about 95 %.

    Attributes:
        epsilon: the estimate; may be infinite.
        low, high: ends of the interval.
    """

    epsilon: float
    low: float
    high: float


def estimate_epsilon(
    scores: np.ndarray, signs: np.ndarray, delta: float, *, seed: int = 0, resamples: int = 300
) -> EpsilonEstimate:
    """Estimate epsilon by fitting normal distributions, with bootstrap over canaries.

    Args:
        scores: `float [k]`.
        signs: `int [k]`; at least two canaries of each sign.
        delta: in (0, 1).
        seed: seed of the stream `"canary-bootstrap"`.
        resamples: number of bootstrap resamples, drawn within each sign.
    """
    groups = [scores[signs > 0], scores[signs < 0]]
    random = stream(seed, "canary-bootstrap")
    plus, minus = (
        np.vstack([g[None], g[random.integers(0, len(g), (resamples, len(g)))]]) for g in groups
    )
    squares = sum(len(g.T) * g.var(axis=1) for g in (plus, minus))
    sd = np.sqrt(squares / (len(scores) - 2))
    apart = np.abs(plus.mean(axis=1) - minus.mean(axis=1))
    mu = np.divide(apart, sd, out=np.where(apart > 0, np.inf, 0.0), where=sd > 0)
    epsilons = np.array([gdp_epsilon(float(value), delta) for value in mu])
    low, high = np.quantile(epsilons[1:], [0.025, 0.975], method="inverted_cdf")
    return EpsilonEstimate(float(epsilons[0]), float(low), float(high))


# A lower bound on epsilon that assumes a Gaussian-shaped trade-off (Nasr et al. 2023, section 3).
#
# At a cut c the rates of false alarms P(f > c | -1) and misses P(f <= c | +1) get exact upper
# limits; a mu-GDP release has `Phi^-1(1 - FPR) - Phi^-1(FNR) <= mu` at every cut. Tighter than the
# bound of one run, but not free of assumptions: it takes the canaries' scores as independent draws,
# and their trade-off as that of two normal distributions.

# in standard deviations of the claimed mechanism's score
CUTS = (-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5)


def gdp_bound(
    scores: np.ndarray, signs: np.ndarray, scale: float, delta: float, significance: float = 0.05
) -> float:
    """Lower bound on epsilon at delta, >= 0.

    Args:
        scores: `float [k]`.
        signs: `int [k]`, the truth.
        scale: unit of the cuts; a function of the claim, not of the scores.
        delta: in (0, 1).
        significance: total significance, divided among `CUTS` and halved between their two rates.
    """
    plus = scores[signs > 0]
    minus = scores[signs < 0]
    tail = significance / (2 * len(CUTS))
    best = -math.inf
    for cut in CUTS:
        alarms = _exact_upper(int((minus > cut * scale).sum()), len(minus), tail)
        misses = _exact_upper(int((plus <= cut * scale).sum()), len(plus), tail)
        best = max(best, float(-ndtri(alarms) - ndtri(misses)))
    return gdp_epsilon(best, delta)


# Datasets that differ in one rating: a lower bound on epsilon from how well releases distinguish
# them.
#
# For an epsilon-DP release the chance of any answer differs by a factor of at most exp(epsilon)
# between the two. So if an adversary is right with chance p on the one, and wrong with chance q on
# the other, epsilon is at least ln(p / q); with exact limits of Clopper and Pearson instead of p
# and q this holds with the requested confidence.
#
# The adversary compares the likelihoods of a release under independent Laplace noise on the
# noiseless result of each dataset. The data are constructed so that one rating has a large effect:
# a user has n ratings at both ends of the scale, and all others rate everything in the middle, so
# that the item means hardly change. The row of similarities of the changed item changes with the
# error of that rating times n - 1 deviations, and the rows of the user's other items change because
# the item is their neighbour.


_USERS = 21  # one of whom has the changed rating


def lower_bound(right: int, wrong: int, trials: int, confidence: float = 0.95) -> float:
    """Lower bound on epsilon, at least 0, from right and wrong answers in `trials` trials each."""
    tail = (1 - confidence) / 2
    least = _exact_lower(right, trials, tail)
    most = _exact_upper(wrong, trials, tail)
    return max(0.0, math.log(least / most)) if least else 0.0


def laplace_score(
    release: np.ndarray, first: np.ndarray, second: np.ndarray, scale: float
) -> float:
    """Log-likelihood ratio of a release under Laplace noise of that scale on `first` and on
    `second`, all `float64 [...]` of the same shape."""
    return float((np.abs(release - second) - np.abs(release - first)).sum() / scale)


def _neighbours(ratings: int) -> tuple[Ratings, Ratings]:
    """Create two datasets over `ratings` items that differ in one rating: user 0, who rated all of
    them, rated the first item 5 or 1; all other users rate everything in the middle."""
    users = np.repeat(np.arange(_USERS), ratings)
    items = np.tile(np.arange(ratings), _USERS)
    values = np.where(users == 0, np.where(items % 2 == 0, 5.0, 1.0), 3.0)
    other = values.copy()
    other[0] = 1.0
    sizes = (_USERS, ratings)
    return Ratings(*sizes, users, items, values), Ratings(*sizes, users, items, other)


def audit_one_rating(config: DpsgdPnbmConfig, ratings: int, trials: int) -> float:
    """Run algorithm 1 on both datasets, and bound the epsilon of one rating.

    Args:
        config: settings; one iteration, with `start = "constant"` so that both start alike.
        ratings: number of ratings of the user one of whose ratings differs.
        trials: number of runs on each dataset.

    Raises:
        ValueError: no noise, more than one iteration, or a start that differs from run to run.
    """
    if config.epsilon is None or config.iterations != 1 or config.start != "constant":
        raise ValueError("Expected an epsilon, one iteration and start = 'constant'.")
    plain = config.model_copy(update={"epsilon": None, "sample": 1.0})
    data = _neighbours(ratings)
    first, second = (_released(plain, rows) for rows in data)
    entry = sensitivity(1, config.spread, config.floor) * config.sample / config.epsilon
    scale = config.learning_rate * config.rescale * entry
    called = [0, 0]
    for trial in range(trials):
        for side, rows in enumerate(data):
            release = _released(config.model_copy(update={"seed": 2 * trial + side}), rows)
            called[side] += laplace_score(release, first, second, scale) > 0
    return lower_bound(called[0], called[1], trials)


def _released(config: DpsgdPnbmConfig, data: Ratings) -> np.ndarray:
    """Similarities released by the algorithm."""
    system = DpsgdPnbm(config)
    system.fit_ratings(data)
    return system.similarity
