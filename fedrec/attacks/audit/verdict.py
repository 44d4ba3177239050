# SPDX-License-Identifier: Apache-2.0
"""All results of an audit of one or more runs, and the verdict.

FAIL: a lower bound lies above the claimed epsilon, or a check of level 0 refutes the claim. WARN:
only a point estimate lies above it. PASS: neither, which does not prove the claim. The probability
that a true claim FAILs is at most the stated significance: each test gets an equal part of it
(Bonferroni).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fedrec.attacks.audit.checks import Check, all_checks
from fedrec.attacks.audit.claim import PrivacyClaim
from fedrec.attacks.audit.estimate import EpsilonEstimate, estimate_epsilon
from fedrec.attacks.audit.gdp import gdp_bound
from fedrec.attacks.audit.observations import Observations
from fedrec.attacks.audit.one_run import OneRunBound, one_run_bound
from fedrec.attacks.audit.scores import Scores, all_scores

Verdict = Literal["PASS", "WARN", "FAIL"]

_TESTS = 10  # of a phase of a run: two bounds for each of three observers, four checks


@dataclass(frozen=True, eq=False)
class Audited:
    """What is audited at a time: one phase of one run.

    Attributes:
        seen: its observations.
        claim: the claim.
        certain: checks in which no chance is involved.
        run: number of the run, from 1.
        phase: name of the phase; empty where there is one.
    """

    seen: Observations
    claim: PrivacyClaim
    certain: tuple[Check, ...] = ()
    run: int = 1
    phase: str = ""

    @property
    def tests(self) -> int:
        """Number of tests that chance may fail."""
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
        """The larger of the two lower bounds."""
        return max(self.one_run.epsilon, self.gdp)

    @property
    def verdict(self) -> Verdict:
        """The verdict for this observer alone."""
        return (
            "FAIL"
            if self.lower > self.upper
            else "WARN"
            if self.estimate.epsilon > self.upper
            else "PASS"
        )

    @property
    def _advice(self) -> str:
        """What to do about an estimate above the claim."""
        if self.estimate.low > self.upper:
            return (
                "so is the whole interval: repeat with other seeds (--seeds 5), and if it stays"
                " there, look for the defect in clip, noise and ledger"
            )
        return (
            "the interval contains the claim, so this refutes nothing: repeat with four times as"
            " many canaries (--canaries) or more runs (--seeds 5) for a narrower one"
        )

    def reasons(self) -> list[str]:
        """Why it is not PASS, and what to do about a WARN."""
        bounds = {"one-run": self.one_run.epsilon, "GDP": self.gdp}
        found = [
            f"{self.observer}: the {name} lower bound {bound:.3f} is above the claimed epsilon"
            f" {self.upper:.3f}"
            for name, bound in bounds.items()
            if bound > self.upper
        ]
        if not found and self.verdict == "WARN":
            estimate = self.estimate
            found = [
                f"{self.observer}: the point estimate {estimate.epsilon:.3f} (95 % interval"
                f" {estimate.low:.3f} to {estimate.high:.3f}) is above the claimed epsilon"
                f" {self.upper:.3f}; {self._advice}"
            ]
        return found


@dataclass(frozen=True)
class RunFindings:
    """Results of one audited run, or of one phase of it.

    Attributes:
        canaries: their number.
        scores: one entry per kind of observer.
        checks: tests of level 0.
        claim: the claim.
        run: number of the run, from 1.
        phase: name of the phase; empty where there is one.
    """

    canaries: int
    scores: tuple[ScoreFindings, ...]
    checks: tuple[Check, ...]
    claim: PrivacyClaim
    run: int
    phase: str

    @property
    def label(self) -> str:
        """Run and phase, in words."""
        return f"run {self.run}" + (f", phase {self.phase}" if self.phase else "")

    @property
    def epsilon_verdict(self) -> Verdict:
        """From bounds and estimates of epsilon alone."""
        return worst([score.verdict for score in self.scores])

    @property
    def verdict(self) -> Verdict:
        """With the checks of level 0."""
        return worst(
            [self.epsilon_verdict, *("PASS" if check.passed else "FAIL" for check in self.checks)]
        )

    def reasons(self) -> list[str]:
        """Why it is not PASS, one sentence each."""
        failed = [
            f"{check.name}: {check.measured:.4g} where {check.claimed:.4g} is claimed (p ="
            f" {check.probability:.2g}): {check.meaning}"
            for check in self.checks
            if not check.passed
        ]
        return [*(reason for score in self.scores for reason in score.reasons()), *failed]

    def table(self) -> dict[str, Any]:
        """Everything as plain values."""
        table = asdict(self)
        derived = {
            "noise_multiplier": self.claim.noise_multiplier,
            "epsilon_shown_by_final": self.claim.shown,
        }
        return {
            "verdict": self.verdict,
            "epsilon_verdict": self.epsilon_verdict,
            "mechanism": {**table.pop("claim"), **derived},
            **table,
        }


@dataclass(frozen=True)
class Audit:
    """The audit of the claims of several runs.

    Attributes:
        runs: one entry per run and phase.
        significance: chance that the whole audit wrongly FAILs, at most.
    """

    runs: tuple[RunFindings, ...]
    significance: float

    @property
    def verdict(self) -> Verdict:
        """The worst of the runs'."""
        return worst([run.verdict for run in self.runs])

    def reasons(self) -> list[str]:
        """Why it is not PASS, with the number of the run, from 1, and the phase."""
        return [f"{run.label}: {reason}" for run in self.runs for reason in run.reasons()]

    def table(self) -> dict[str, Any]:
        """Everything as plain values."""
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
        significance: chance of a wrong FAIL, in (0, 1).
        seed: of the bootstrap.
    """
    share = significance / sum(one.tests for one in audited)
    found = [
        audit_run(one, significance=share, seed=seed + place) for place, one in enumerate(audited)
    ]
    return Audit(tuple(found), significance)


def audit_run(audited: Audited, *, significance: float, seed: int = 0) -> RunFindings:
    """Findings of one run or phase; every bound and every check gets the whole `significance`."""
    claim = audited.claim
    seen = audited.seen if claim.mixing is None else audited.seen.whitened(claim.mixing)
    scores = [
        _findings(score, seen, claim.delta, significance, seed) for score in all_scores(seen, claim)
    ]
    checks = (*all_checks(seen, claim, significance), *audited.certain)
    return RunFindings(seen.canaries, tuple(scores), checks, claim, audited.run, audited.phase)


def _findings(
    score: Scores, seen: Observations, delta: float, significance: float, seed: int
) -> ScoreFindings:
    return ScoreFindings(
        observer=score.name,
        upper=score.upper,
        one_run=one_run_bound(score.values, seen.signs, delta, significance),
        gdp=gdp_bound(score.values, seen.signs, score.scale, delta, significance),
        estimate=estimate_epsilon(score.values, seen.signs, delta, seed=seed),
    )


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """FAIL before WARN before PASS."""
    if "FAIL" in verdicts:
        return "FAIL"
    return "WARN" if "WARN" in verdicts else "PASS"
