# SPDX-License-Identifier: Apache-2.0
"""Checks and verdict of an audit."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from scipy.linalg import helmert
from scipy.special import ndtr
from scipy.stats import chi2, t

from fedrec.attacks.bounds import (
    EpsilonEstimate,
    OneRunBound,
    estimate_epsilon,
    gdp_bound,
    one_run_bound,
)
from fedrec.attacks.canaries import Observations, PrivacyClaim, all_scores

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

    @classmethod
    def of(
        cls,
        name: str,
        values: tuple[float, float],
        probability: float,
        significance: float,
        meaning: str,
    ) -> Check:
        """Create the test of a measured and a claimed value from its p-value."""
        return cls(name, *values, probability, probability >= significance, meaning)

    def line(self, label: str) -> str:
        """Format the test of a run as a line."""
        state = "ok   " if self.passed else "WRONG"
        return (
            f"{state} {label} {self.name}: {self.measured:.4g}, claimed {self.claimed:.4g} (p ="
            f" {self.probability:.2g})"
        )


def all_checks(seen: Observations, claim: PrivacyClaim, significance: float) -> list[Check]:
    """Run the checks that apply to a run; those of the noise need claimed noise."""
    if seen.shared:
        checks = [check_shared_reach(seen, claim, significance)]
    else:
        checks = [
            check_reach(seen, claim, significance, parameter)
            for parameter in ("", *seen.parameters)
        ]
        checks.append(check_farthest(seen, claim, significance))
    quiet = _noise_of(seen)
    if claim.noise_std and (quiet.taking_part == 0).sum() > 1:
        checks.append(check_noise(quiet, claim, significance))
    if claim.noise_std and seen.rounds > 1:
        checks.append(check_independence(quiet, significance))
    return [check for check in checks if check is not None]


def _noise_of(seen: Observations) -> Observations:
    """Noise of a run, as if along absent canaries."""
    if seen.quiet is not None:
        return _absent(seen.quiet)
    return differences(seen) if seen.taking_part.all() else seen


def _absent(noise: np.ndarray) -> Observations:
    """Noise `float64 [rounds, n]` as if along n absent canaries."""
    signs = np.resize([1, -1], noise.shape[1])
    return Observations(noise, np.zeros(noise.shape, dtype=bool), signs)


def differences(seen: Observations) -> Observations:
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
    meaning = "the ledger does not hold all released rounds"
    return Check.of("charged-rounds", counts, float(counts[0] == counts[1]), 1.0, meaning)


def check_noise(seen: Observations, claim: PrivacyClaim, significance: float) -> Check:
    """Test for too little noise along absent canaries (one-sided chi-squared).

    More than claimed passes: it costs utility, not privacy.
    """
    quiet = seen.released[seen.taking_part == 0]
    square = float(np.square(quiet).sum()) / claim.noise_std**2
    probability = float(chi2.cdf(square, len(quiet)))
    measured = math.sqrt(square / len(quiet)) * claim.noise_std
    meaning = "less noise than claimed"
    return Check.of("noise-std", (measured, claim.noise_std), probability, significance, meaning)


def check_independence(seen: Observations, significance: float) -> Check | None:
    """Test the correlation of two rounds' noise, over canaries absent from both (t test, Bonferroni
    over the pairs); None if there are too few."""
    quiet = np.where(seen.taking_part != 0, 0.0, seen.released)
    absent = (seen.taking_part == 0).astype(np.float64)
    products = quiet @ quiet.T
    counts = absent @ absent.T
    norms = np.square(quiet) @ absent.T  # [t, u]: squares of round t where both are absent
    first, second = np.triu_indices(seen.rounds, k=1)
    used = counts[first, second] >= 3
    if not used.any():
        return None
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
    meaning = "rounds share their noise (one seed for several rounds?)"
    values = float(r[worst]), 0.0
    return Check.of("noise-correlation", values, probability, significance, meaning)


def check_reach(
    seen: Observations, claim: PrivacyClaim, significance: float, parameter: str = ""
) -> Check | None:
    """Test the mean effect of canaries, over all rounds and canaries, or those in one parameter,
    against S/M."""
    used = seen.groups == parameter if parameter else np.ones(seen.canaries, dtype=bool)
    sums, counts = _moved(seen)
    total = counts[used].sum(keepdims=True)
    there = total > 0
    moved = sums[used].sum(keepdims=True)[there] / total[there]
    name = f"reach-of-{parameter}" if parameter else "reach"
    return _reach(name, moved, total[there], claim, significance)


def check_farthest(seen: Observations, claim: PrivacyClaim, significance: float) -> Check | None:
    """Test the canary with the largest mean effect against S/M (Bonferroni over the canaries)."""
    sums, counts = _moved(seen)
    there = counts > 0
    return _reach("reach-of-one", sums[there] / counts[there], counts[there], claim, significance)


def check_shared_reach(
    seen: Observations, claim: PrivacyClaim, significance: float
) -> Check | None:
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
        return None
    z = max(0.0, float(beyond.sum()) / (math.sqrt(float(np.square(beyond).sum())) or 1.0))
    probability = math.exp(-z * z / 2)
    values = float(signed.sum() / counts.sum()), claim.signal
    return Check.of("reach", values, probability, significance, _TOO_FAR)


def _moved(seen: Observations) -> tuple[np.ndarray, np.ndarray]:
    """Sum of each canary's effects on the mean along its sign over its rounds, `float64 [k]`, and
    the number of rounds; with correlated noise, both weighted for the best linear estimate."""
    weights = seen.taking_part.astype(np.float64)
    return (weights * seen.released * seen.signs).sum(axis=0), np.square(weights).sum(axis=0)


def _reach(
    name: str, moved: np.ndarray, counts: np.ndarray, claim: PrivacyClaim, significance: float
) -> Check | None:
    """Test averages over `counts` releases each against S/M, None without a release; without
    claimed noise the tolerance is one part in 1000."""
    if not len(moved):
        return None
    if claim.noise_std:
        excess = (moved - claim.signal) * np.sqrt(counts) / claim.noise_std
        worst = int(np.argmax(excess))
        probability = min(1.0, float(ndtr(-excess[worst])) * len(moved))
    else:
        worst = int(np.argmax(moved))
        probability = float(moved[worst] <= _ROUNDED * claim.signal)
    values = float(moved[worst]), claim.signal
    return Check.of(name, values, probability, significance, _TOO_FAR)


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

    @property
    def tests(self) -> int:
        """Number of statistical tests."""
        return _TESTS + len(self.seen.parameters)


@dataclass(frozen=True)
class ScoreFindings:
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
class RunFindings:
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
    scores: tuple[ScoreFindings, ...]
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

    runs: tuple[RunFindings, ...]
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
    share = significance / sum(phase.tests for phase in audited)
    runs = [
        audit_run(phase, significance=share, seed=seed + number)
        for number, phase in enumerate(audited)
    ]
    return Audit(tuple(runs), significance)


def audit_run(audited: Audited, *, significance: float, seed: int = 0) -> RunFindings:
    """Audit one run or phase; each bound and each check uses the whole `significance`."""
    claim = audited.claim
    seen = audited.seen if claim.mixing is None else audited.seen.whitened(claim.mixing)
    scores = [
        ScoreFindings(
            observer=score.name,
            upper=score.upper,
            one_run=one_run_bound(score.values, seen.signs, claim.delta, significance),
            gdp=gdp_bound(score.values, seen.signs, score.scale, claim.delta, significance),
            estimate=estimate_epsilon(score.values, seen.signs, claim.delta, seed=seed),
        )
        for score in all_scores(seen, claim)
    ]
    checks = (*all_checks(seen, claim, significance), *audited.certain)
    return RunFindings(seen.canaries, tuple(scores), checks, claim, audited.run, audited.phase)


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the worst verdict: FAIL before WARN before PASS."""
    return max(verdicts, key=("PASS", "WARN", "FAIL").index)
