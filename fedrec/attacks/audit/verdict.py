# SPDX-License-Identifier: Apache-2.0
"""All results of an audit of one or more runs, and the verdict.

FAIL: a lower bound lies above the claimed epsilon, or a check of level 0 refutes the claim. WARN:
only a point estimate lies above it. PASS: neither, which does not prove the claim. The probability
that a true claim FAILs is at most the stated significance: each test gets an equal part of it
(Bonferroni).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from fedrec.attacks.audit.checks import Check, all_checks
from fedrec.attacks.audit.estimate import Estimate, estimate_epsilon
from fedrec.attacks.audit.gdp import gdp_bound
from fedrec.attacks.audit.mechanism import Mechanism
from fedrec.attacks.audit.observations import Observations
from fedrec.attacks.audit.one_run import OneRunBound, one_run_bound
from fedrec.attacks.audit.scores import Scores, all_scores

Verdict = Literal["PASS", "WARN", "FAIL"]

_TESTS_PER_RUN = 10  # two bounds for each of three observers, four checks


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
    estimate: Estimate

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

    def reasons(self) -> list[str]:
        """Why it is not PASS."""
        bounds = {"one-run": self.one_run.epsilon, "GDP": self.gdp}
        found = [
            f"{self.observer}: the {name} lower bound {bound:.3f} is above the claimed epsilon"
            f" {self.upper:.3f}"
            for name, bound in bounds.items()
            if bound > self.upper
        ]
        if not found and self.verdict == "WARN":
            value = self.estimate.epsilon
            found = [
                f"{self.observer}: the point estimate {value:.3f} is above the claimed epsilon"
                f" {self.upper:.3f}"
            ]
        return found


@dataclass(frozen=True)
class RunFindings:
    """Results of one audited run.

    Attributes:
        canaries: their number.
        scores: one entry per kind of observer.
        checks: tests of level 0.
    """

    canaries: int
    scores: tuple[ScoreFindings, ...]
    checks: tuple[Check, ...]

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


@dataclass(frozen=True)
class Audit:
    """The audit of a claim on several runs.

    Attributes:
        mechanism: the claim.
        runs: one entry per run.
        significance: chance that the whole audit wrongly FAILs, at most.
    """

    mechanism: Mechanism
    runs: tuple[RunFindings, ...]
    significance: float

    @property
    def verdict(self) -> Verdict:
        """The worst of the runs'."""
        return worst([run.verdict for run in self.runs])

    def reasons(self) -> list[str]:
        """Why it is not PASS, with the number of the run, from 1."""
        return [
            f"run {number}: {reason}"
            for number, run in enumerate(self.runs, 1)
            for reason in run.reasons()
        ]

    def table(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "verdict": self.verdict,
            "reasons": self.reasons(),
            "significance": self.significance,
            "mechanism": {
                **asdict(self.mechanism),
                "noise_multiplier": self.mechanism.noise_multiplier,
                "epsilon_shown_by_final": self.mechanism.shown,
            },
            "runs": [
                {"verdict": run.verdict, "epsilon_verdict": run.epsilon_verdict, **asdict(run)}
                for run in self.runs
            ],
        }


def audit(
    runs: Sequence[Observations],
    mechanism: Mechanism,
    *,
    significance: float = 0.05,
    seed: int = 0,
    certain: Sequence[Sequence[Check]] = (),
) -> Audit:
    """Audit a claim.

    Args:
        runs: observations of independent runs of the same mechanism.
        mechanism: the claim.
        significance: chance of a wrong FAIL, in (0, 1).
        seed: of the bootstrap.
        certain: further checks of each run, which fail by no chance.
    """
    share = significance / (_TESTS_PER_RUN * len(runs))
    found = [
        audit_run(seen, mechanism, significance=share, seed=seed + place)
        for place, seen in enumerate(runs)
    ]
    added = zip(found, certain or [()] * len(found), strict=True)
    whole = tuple(replace(run, checks=(*run.checks, *more)) for run, more in added)
    return Audit(mechanism, whole, significance)


def audit_run(
    seen: Observations, mechanism: Mechanism, *, significance: float, seed: int = 0
) -> RunFindings:
    """Findings of one run; every bound and every check gets the whole `significance`."""
    scores = [
        _findings(score, seen, mechanism.delta, significance, seed)
        for score in all_scores(seen, mechanism)
    ]
    return RunFindings(
        seen.canaries, tuple(scores), tuple(all_checks(seen, mechanism, significance))
    )


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
