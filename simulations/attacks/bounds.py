# SPDX-License-Identifier: Apache-2.0
"""Bounds on epsilon and point estimates from an audit's observations, checks of the noise and of
one client's effect, and the verdict."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from scipy.linalg import helmert
from scipy.optimize import brentq
from scipy.special import bdtr, bdtrc, betaincinv, expit, ndtr, ndtri
from scipy.stats import binomtest, chi2, t

from fedrec.baselines.base import Ratings
from fedrec.baselines.private.ratings import DpsgdPnbm, DpsgdPnbmConfig, sensitivity
from fedrec.privacy.accounting.rdp import gdp_epsilon
from fedrec.privacy.canaries import Observations, PrivacyClaim, all_scores
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


def _one_run_epsilon(
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


def _one_run_bound(
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
        epsilon = _one_run_epsilon(total, guesses, correct, delta, significance / len(counts))
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
CONFIDENCE = 0.95
"""Confidence of intervals."""
_TAIL = (1 - CONFIDENCE) / 2


def clopper_pearson(successes: int, trials: int) -> Interval:
    """Exact two-sided interval of a proportion; `(0, 1)` without a trial."""
    return _exact_lower(successes, trials, _TAIL), _exact_upper(successes, trials, _TAIL)


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


def wilson(successes: int, trials: int) -> Interval:
    """Wilson's score interval of a proportion; `(0, 1)` without a trial."""
    if not trials:
        return 0.0, 1.0
    interval = binomtest(successes, trials).proportion_ci(CONFIDENCE, "wilson")
    return float(interval.low), float(interval.high)


def mean_of(proportions: Sequence[tuple[int, int]]) -> Interval:
    """Interval of the mean of independent proportions, each given as (successes, trials); without
    trials it is 1/2."""
    low = high = centre = 0.0
    for successes, trials in proportions:
        share = successes / trials if trials else 0.5
        below, above = wilson(successes, trials)
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


_RESAMPLES = 300  # of the bootstrap, drawn within each sign


def _estimate_epsilon(
    scores: np.ndarray, signs: np.ndarray, delta: float, *, seed: int = 0
) -> EpsilonEstimate:
    """Estimate epsilon by fitting normal distributions, with bootstrap over canaries.

    Args:
        scores: `float [k]`.
        signs: `int [k]`; at least two canaries of each sign.
        delta: in (0, 1).
        seed: seed of the stream `"canary-bootstrap"`.
    """
    groups = [scores[signs > 0], scores[signs < 0]]
    random = stream(seed, "canary-bootstrap")
    plus, minus = (
        np.vstack([g[None], g[random.integers(0, len(g), (_RESAMPLES, len(g)))]]) for g in groups
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


def _gdp_bound(
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


def _lower_bound(right: int, wrong: int, trials: int) -> float:
    """Lower bound on epsilon, at least 0, from right and wrong answers in `trials` trials each."""
    least = _exact_lower(right, trials, _TAIL)
    most = _exact_upper(wrong, trials, _TAIL)
    return max(0.0, math.log(least / most)) if least else 0.0


def _laplace_score(
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
            called[side] += _laplace_score(release, first, second, scale) > 0
    return _lower_bound(called[0], called[1], trials)


def _released(config: DpsgdPnbmConfig, data: Ratings) -> np.ndarray:
    """Similarities released by the algorithm."""
    system = DpsgdPnbm(config)
    system.fit_ratings(data)
    return system.similarity


# Level 0 checks: tests of the noise, and of the effect of one client on the mean.
#
# They compare with the claimed numbers instead of an epsilon, so they detect faults that no bound
# on epsilon can detect, such as noise of half the size or the same noise in every round.

_TOO_FAR = "a client moves the mean by more than S/M (no clip, weights, or another denominator)"
_ROUNDED = 1.001  # tolerance of sums of float32 where no noise covers it


@dataclass(frozen=True)
class Check:
    """Test of the claim.

    Attributes:
        name: name of the test.
        measured: measured value.
        claimed: claimed value.
        probability: p-value of the deviation under the claim, corrected for the number of
            comparisons.
        passed: whether the p-value is at least the significance.
        meaning: meaning of a failure.
    """

    name: str
    measured: float
    claimed: float
    probability: float
    passed: bool
    meaning: str

    def line(self, label: str) -> str:
        """Format the test of a run as a line."""
        state = "ok   " if self.passed else "WRONG"
        return (
            f"{state} {label} {self.name}: {self.measured:.4g}, claimed {self.claimed:.4g} (p ="
            f" {self.probability:.2g})"
        )


def _all_checks(seen: Observations, claim: PrivacyClaim, significance: float) -> Iterator[Check]:
    """Run the checks that apply to a run; those of the noise need claimed noise."""
    if seen.shared:
        yield from _check_shared_reach(seen, claim, significance)
    else:
        yield from _check_reach(seen, claim, significance)
    quiet = _noise_of(seen)
    if claim.noise_std and (quiet.taking_part == 0).sum() > 1:
        yield _check_noise(quiet, claim, significance)
    if claim.noise_std and seen.rounds > 1:
        yield from _check_independence(quiet, significance)


def _noise_of(seen: Observations) -> Observations:
    """Noise of a run, as if along absent canaries."""
    if seen.quiet is not None:
        return _absent(seen.quiet)
    return _differences(seen) if seen.taking_part.all() else seen


def _absent(noise: np.ndarray) -> Observations:
    """Noise `float64 [rounds, n]` as if along n absent canaries."""
    signs = np.resize([1, -1], noise.shape[1])
    return Observations(noise, np.zeros(noise.shape, dtype=bool), signs)


def _differences(seen: Observations) -> Observations:
    """Noise of rounds in which every canary took part, as if along absent canaries.

    Along canary j the release is `b_j m + noise`, with the same m for all in the same parameter, as
    all upload the same length. An orthonormal basis of the contrasts between their `b_j x_j` does
    not depend on m, and its noise has the same size and is as independent.
    """
    signed = seen.released * seen.signs
    groups = [np.flatnonzero(seen.groups == name) for name in seen.parameters] or [slice(None)]
    blocks = [signed[:, members] for members in groups]
    return _absent(np.hstack([block @ helmert(block.shape[1]).T for block in blocks]))


def check_charges(released: Collection[int], charged: Collection[int]) -> Check:
    """Check that each released round has a line in the run's ledger; not a statistical test.

    Args:
        released: the released rounds.
        charged: the rounds that the ledger has lines for; a repeated round may have several.
    """
    counts = len(set(charged) & set(released)), len(released)
    passed = counts[0] == counts[1]
    meaning = "the ledger does not hold all released rounds"
    return Check("charged-rounds", *counts, float(passed), passed, meaning)


def _check_noise(seen: Observations, claim: PrivacyClaim, significance: float) -> Check:
    """Test for too little noise along absent canaries (one-sided chi-squared).

    More than claimed passes: it costs utility, not privacy.
    """
    quiet = seen.released[seen.taking_part == 0]
    square = float(np.square(quiet).sum()) / claim.noise_std**2
    probability = float(chi2.cdf(square, len(quiet)))
    measured = math.sqrt(square / len(quiet)) * claim.noise_std
    passed = probability >= significance
    meaning = "less noise than claimed"
    return Check("noise-std", measured, claim.noise_std, probability, passed, meaning)


def _check_independence(seen: Observations, significance: float) -> Iterator[Check]:
    """Test the correlation of two rounds' noise, over canaries absent from both (t test, Bonferroni
    over the pairs), unless there are too few."""
    quiet = np.where(seen.taking_part != 0, 0.0, seen.released)
    absent = (seen.taking_part == 0).astype(np.float64)
    products = quiet @ quiet.T
    counts = absent @ absent.T
    norms = np.square(quiet) @ absent.T  # [t, u]: squares of round t where both are absent
    first, second = np.triu_indices(seen.rounds, k=1)
    used = counts[first, second] >= 3
    if not used.any():
        return
    first = first[used]
    second = second[used]
    scale = np.sqrt(norms[first, second] * norms[second, first])
    r = np.divide(products[first, second], scale, out=np.ones(len(first)), where=scale > 0)
    r = np.clip(r, -1.0, 1.0)
    freedom = counts[first, second] - 1
    statistic = np.abs(r) * np.sqrt(freedom / np.maximum(1 - np.square(r), 1e-300))
    chances = 2 * t.sf(statistic, freedom)
    worst = int(np.argmin(chances))
    probability = min(1.0, float(chances[worst]) * len(chances))
    passed = probability >= significance
    meaning = "rounds share their noise (one seed for several rounds?)"
    yield Check("noise-correlation", float(r[worst]), 0.0, probability, passed, meaning)


def _check_reach(seen: Observations, claim: PrivacyClaim, significance: float) -> Iterator[Check]:
    """Test the mean effect of canaries against S/M: over all of them, over those in each parameter,
    and the largest of one canary (Bonferroni over the canaries)."""
    sums, counts = _moved(seen)
    groups = {"reach": np.ones(seen.canaries, dtype=bool)}
    groups |= {f"reach-of-{name}": seen.groups == name for name in seen.parameters}
    for name, used in groups.items():
        total = counts[used].sum(keepdims=True)
        if total[0] > 0:
            yield _reach(name, sums[used].sum(keepdims=True) / total, total, claim, significance)
    there = counts > 0
    if there.any():
        means = sums[there] / counts[there]
        yield _reach("reach-of-one", means, counts[there], claim, significance)


def _check_shared_reach(
    seen: Observations, claim: PrivacyClaim, significance: float
) -> Iterator[Check]:
    """Test the mean effect of canaries in directions shared with other clients against S/M.

    The others do not know the signs b_j, so that what they add along canary j has the sign b_j with
    probability 1/2: of the sums d_j of `b_j x_tj - S/M` over the canary's rounds, each is as likely
    positive as negative if the claim holds, given its size. Then `sum d_j` exceeds
    `z sqrt(sum d_j^2)` with probability at most `exp(-z^2 / 2)` (Hoeffding 1963). What the others
    learn from the canaries of earlier rounds is not taken into account. The tolerance is one part
    in 1000.
    """
    sums, counts = _moved(seen)
    there = counts > 0
    signed = sums[there]
    beyond = signed - counts[there] * claim.signal * _ROUNDED
    if math.exp(-len(beyond) / 2) >= significance:  # too few to refute anything
        return
    z = max(0.0, float(beyond.sum()) / (math.sqrt(float(np.square(beyond).sum())) or 1.0))
    probability = math.exp(-z * z / 2)
    measured = float(signed.sum() / counts.sum())
    passed = probability >= significance
    yield Check("reach", measured, claim.signal, probability, passed, _TOO_FAR)


def _moved(seen: Observations) -> tuple[np.ndarray, np.ndarray]:
    """Sum of each canary's effects on the mean along its sign over its rounds, `float64 [k]`, and
    the number of rounds; with correlated noise, both weighted for the best linear estimate."""
    weights = seen.taking_part.astype(np.float64)
    return (weights * seen.released * seen.signs).sum(axis=0), np.square(weights).sum(axis=0)


def _reach(
    name: str, moved: np.ndarray, counts: np.ndarray, claim: PrivacyClaim, significance: float
) -> Check:
    """Test averages over `counts` releases each against S/M; without claimed noise the tolerance is
    one part in 1000."""
    if claim.noise_std:
        excess = (moved - claim.signal) * np.sqrt(counts) / claim.noise_std
        worst = int(np.argmax(excess))
        probability = min(1.0, float(ndtr(-excess[worst])) * len(moved))
    else:
        worst = int(np.argmax(moved))
        probability = float(moved[worst] <= _ROUNDED * claim.signal)
    passed = probability >= significance
    return Check(name, float(moved[worst]), claim.signal, probability, passed, _TOO_FAR)


# All results of an audit of one or more runs, and the verdict.
#
# FAIL: a lower bound lies above the claimed epsilon, or a check of level 0 refutes the claim. WARN:
# only a point estimate lies above it. PASS: neither, which does not prove the claim. The
# probability that a true claim FAILs is at most the stated significance: each test gets an equal
# part of it (Bonferroni).

Verdict = Literal["PASS", "WARN", "FAIL"]

_TESTS = 10  # of a phase of a run: two bounds for each of three observers, four checks


@dataclass(frozen=True, eq=False)
class Audited:
    """One phase of one run, to be audited.

    Attributes:
        seen: observations of the phase.
        claim: the claim.
        certain: checks that are not statistical tests.
        run: number of the run, from 1.
        phase: name of the phase; empty if there is only one.
    """

    seen: Observations
    claim: PrivacyClaim
    certain: tuple[Check, ...] = ()
    run: int = 1
    phase: str = ""


@dataclass(frozen=True)
class _ScoreFindings:
    """Bounds and estimate for one kind of observer.

    Attributes:
        observer: `"final"`, `"trace"` or `"known"`.
        upper: the epsilon that the claim allows this observer.
        one_run: lower bound without assumptions.
        gdp: lower bound that assumes a Gaussian-shaped trade-off.
        estimate: point estimate.
    """

    observer: str
    upper: float
    one_run: OneRunBound
    gdp: float
    estimate: EpsilonEstimate

    @property
    def lower(self) -> float:
        """Larger one of the two lower bounds."""
        return max(self.one_run.epsilon, self.gdp)

    @property
    def verdict(self) -> Verdict:
        """Verdict for this observer alone."""
        if self.lower > self.upper:
            return "FAIL"
        return "WARN" if self.estimate.epsilon > self.upper else "PASS"

    def reasons(self) -> list[str]:
        """Reasons for a FAIL or WARN, with advice for a WARN."""
        bounds = {"one-run": self.one_run.epsilon, "GDP": self.gdp}
        texts = [
            f"{self.observer}: the {name} lower bound {bound:.3f} is above the claimed epsilon"
            f" {self.upper:.3f}"
            for name, bound in bounds.items()
            if bound > self.upper
        ]
        if not texts and self.verdict == "WARN":
            estimate = self.estimate
            texts = [
                f"{self.observer}: the point estimate {estimate.epsilon:.3f} (95 % interval"
                f" {estimate.low:.3f} to {estimate.high:.3f}) is above the claimed epsilon"
                f" {self.upper:.3f}: repeat with more canaries or runs (--seeds 5), and if it stays"
                " there, look for the defect in clip, noise and ledger"
            ]
        return texts


@dataclass(frozen=True)
class _RunFindings:
    """Results of one audited run, or of one phase.

    Attributes:
        canaries: number of canaries.
        scores: one entry per kind of observer.
        checks: tests of level 0.
        claim: the claim.
        run: number of the run, from 1.
        phase: name of the phase; empty if there is only one.
    """

    canaries: int
    scores: tuple[_ScoreFindings, ...]
    checks: tuple[Check, ...]
    claim: PrivacyClaim
    run: int
    phase: str

    @property
    def label(self) -> str:
        """Run and phase in words."""
        return f"run {self.run}" + (f", phase {self.phase}" if self.phase else "")

    @property
    def epsilon_verdict(self) -> Verdict:
        """Verdict from bounds and estimates of epsilon only."""
        return _worst([score.verdict for score in self.scores])

    @property
    def verdict(self) -> Verdict:
        """Verdict including the checks of level 0."""
        return _worst(
            [self.epsilon_verdict, *("PASS" if check.passed else "FAIL" for check in self.checks)]
        )

    def reasons(self) -> list[str]:
        """Reasons for a FAIL or WARN, one sentence each."""
        failed = [
            f"{check.name}: {check.measured:.4g} where {check.claimed:.4g} is claimed (p ="
            f" {check.probability:.2g}): {check.meaning}"
            for check in self.checks
            if not check.passed
        ]
        return [*(reason for score in self.scores for reason in score.reasons()), *failed]

    def table(self) -> dict[str, Any]:
        """Return all results as plain values."""
        table = asdict(self)
        derived = {"noise_multiplier": self.claim.noise_multiplier}
        return {
            "verdict": self.verdict,
            "epsilon_verdict": self.epsilon_verdict,
            "mechanism": {**table.pop("claim"), **derived},
            **table,
        }


@dataclass(frozen=True)
class Audit:
    """Audit of the claims of several runs.

    Attributes:
        runs: one entry per run and phase.
        significance: upper bound on the probability that the audit wrongly FAILs.
    """

    runs: tuple[_RunFindings, ...]
    significance: float

    @property
    def verdict(self) -> Verdict:
        """Worst verdict of the runs."""
        return _worst([run.verdict for run in self.runs])

    def reasons(self) -> list[str]:
        """Reasons for a FAIL or WARN, with run number, from 1, and phase."""
        return [f"{run.label}: {reason}" for run in self.runs for reason in run.reasons()]

    def table(self) -> dict[str, Any]:
        """Return all results as plain values."""
        return {
            "verdict": self.verdict,
            "reasons": self.reasons(),
            "significance": self.significance,
            "runs": [run.table() for run in self.runs],
        }


def audit(audited: Sequence[Audited], *, significance: float = 0.05, seed: int = 0) -> Audit:
    """Audit the claims of independent runs, and of their phases.

    Args:
        audited: the runs, phase by phase.
        significance: probability of a wrong FAIL, in (0, 1).
        seed: seed of the bootstrap.
    """
    share = significance / sum(_TESTS + len(phase.seen.parameters) for phase in audited)
    runs = [
        _audit_run(phase, significance=share, seed=seed + number)
        for number, phase in enumerate(audited)
    ]
    return Audit(tuple(runs), significance)


def _audit_run(audited: Audited, *, significance: float, seed: int = 0) -> _RunFindings:
    """Audit one run or phase; each bound and each check uses the whole `significance`."""
    claim = audited.claim
    seen = audited.seen if claim.mixing is None else audited.seen.whitened(claim.mixing)
    scores = [
        _ScoreFindings(
            observer=score.name,
            upper=score.upper,
            one_run=_one_run_bound(score.values, seen.signs, claim.delta, significance),
            gdp=_gdp_bound(score.values, seen.signs, score.scale, claim.delta, significance),
            estimate=_estimate_epsilon(score.values, seen.signs, claim.delta, seed=seed),
        )
        for score in all_scores(seen, claim)
    ]
    checks = (*_all_checks(seen, claim, significance), *audited.certain)
    return _RunFindings(seen.canaries, tuple(scores), checks, claim, audited.run, audited.phase)


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the worst verdict: FAIL before WARN before PASS."""
    return max(verdicts, key=("PASS", "WARN", "FAIL").index)
