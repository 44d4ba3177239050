# SPDX-License-Identifier: Apache-2.0
"""Canary audit of an experiment: run it with canary clients, record the releases of each round,
test the claim of each phase with noise.

Sampler, strategy, messages, clip and noise are those of the experiment: they are what is tested
(`simulations.attacks.canary_users` has what is added, `fedrec.attacks` the statistics). The claim
is what the run's privacy ledger states, or that of the settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Self

from pydantic import Field, model_validator

from fedrec.attacks.canaries import CanaryPlan, PrivacyClaim
from fedrec.attacks.verdict import Audit, Audited, audit, check_charges
from fedrec.config import Config
from fedrec.experiment.phases import MAIN, phases_of
from fedrec.privacy.ledger import Charge
from fedrec.privacy.plan import Plan
from fedrec.runs.folder import RunFolder
from simulations.attacks.base import Attack, Attacked, AttackOutcome, AttackRun
from simulations.attacks.canary_claims import (
    Watch,
    charged_claim,
    charges_of,
    check_auditable,
    expected_cohort,
    noisy_plans,
    observed,
)
from simulations.attacks.canary_users import changes_for, kind_of

SIGNIFICANCE = 0.05
"""Probability of a wrong FAIL."""
_COLUMNS = (
    "run, phase, observer, one-run bound, GDP bound, estimate, 95 % interval, claimed epsilon"
)


class AuditConfig(Config):
    """Settings of an audit. The claim is that of the run's privacy ledger for each phase with
    noise, unless clip and noise are given."""

    clip: float | None = None
    """Claimed clip norm S (L2) of a client's update; default: from [privacy]."""
    noise_std: float | None = None
    """Claimed standard deviation of the noise in each coordinate of the mean update; default: from
    [privacy]."""
    epsilon: float | None = None
    """Claimed epsilon under replace-one, for all rounds and the population with canaries; default:
    that of as many Gaussian releases without amplification by sampling."""
    delta: float = 1e-5
    """Delta of the claimed epsilon."""
    canaries: int = Field(default=1000, ge=20)
    """Number of canary clients per run."""
    seeds: int = Field(default=1, ge=1)
    """Number of runs."""
    overshoot: float = Field(default=10.0, gt=0)
    """Norm of the canaries' updates in units of S, to test clipping."""

    @model_validator(mode="after")
    def _is_a_whole_claim(self) -> Self:
        if (self.clip is None) != (self.noise_std is None):
            raise ValueError("give both --clip and --noise-std, or neither")
        return self


class CanaryAudit(Attack):
    """Test of an experiment's privacy claim with canary clients."""

    name = "audit"
    Config = AuditConfig
    paper = "Steinke et al. 2023; Andrew et al. 2023"
    file = "audit.json"
    config: AuditConfig

    def __init__(self, config: AuditConfig, seed: int) -> None:
        super().__init__(config, seed)
        self._plans: dict[str, Plan] = {}

    def trainings(self, attacked: Attacked) -> Mapping[str, AttackRun]:
        """Runs for the audit: the experiment with canaries under each of the `seeds`.

        Raises:
            ExperimentError: the experiment cannot be audited.
        """
        experiment = attacked.experiment
        stated = self.config.clip is not None
        check_auditable(experiment, stated=stated)
        self._plans = {} if stated else noisy_plans(experiment, self._clients(attacked))
        runs = {}
        for number in range(self.config.seeds):
            plans = self._canaries(attacked, number)
            runs[f"run-{number + 1:02d}"] = AttackRun(
                seed=attacked.seed_of("audit-run", number),
                changes=changes_for(experiment, plans),
                callbacks=[Watch(plans)],
            )
        return runs

    def outcome(self, attacked: Attacked) -> AttackOutcome:
        """Audit the claim of each phase of each run.

        Raises:
            ExperimentError: a run has no round to audit.
            RunError: the releases of a run were not recorded, or are damaged.
        """
        audited = [
            phase
            for number, system in enumerate(attacked.systems.values())
            for phase in self._audited(attacked, system.run, number)
        ]
        result = audit(audited, significance=SIGNIFICANCE, seed=self.seed)
        lines = [check.line(run.label) for run in result.runs for check in run.checks]
        return AttackOutcome(
            result, result.table(), _rows(result), lines, result.verdict, result.reasons()
        )

    def _clients(self, attacked: Attacked) -> int:
        """Number of training clients, canaries included."""
        return len(attacked.users) + self.config.canaries

    def _canaries(self, attacked: Attacked, number: int) -> dict[str, CanaryPlan]:
        """Canaries of each audited phase of run `number`, from 0."""
        experiment = attacked.experiment
        phases = {phase.name: phase for phase in phases_of(experiment)}
        settings: dict[str, dict[str, Any]] = {
            name: {
                "magnitude": self.config.overshoot * plan.clip_norm,
                "parameters": plan.config.parameters,
                "kind": kind_of(phases[name]),
            }
            for name, plan in self._plans.items()
        }
        if self.config.clip is not None:
            settings[MAIN] = {"magnitude": self.config.overshoot * self.config.clip}
            if experiment.privacy is not None:
                settings[MAIN]["parameters"] = experiment.privacy.parameters
        common = {
            "first": attacked.population.interactions.num_users,
            "count": self.config.canaries,
            "seed": attacked.seed_of("audit-run", number),
        }
        return {name: CanaryPlan(**common, **table) for name, table in settings.items()}

    def _audited(self, attacked: Attacked, run: RunFolder, number: int) -> Iterator[Audited]:
        """Yield the phases of a run with releases, each with its claim."""
        plans = self._canaries(attacked, number)
        for phase, (rounds, seen) in observed(run, plans).items():
            charges = charges_of(run, phase)
            paid = [charge.round_number for charge in charges]
            private = attacked.experiment.privacy is not None
            yield Audited(
                seen,
                self._claim(attacked, phase, charges, len(rounds)),
                (check_charges(rounds, paid),) if private else (),
                run=number + 1,
                phase=phase if len(plans) > 1 else "",
            )

    def _claim(
        self, attacked: Attacked, phase: str, charges: list[Charge], rounds: int
    ) -> PrivacyClaim:
        """Claim on the releases of a phase."""
        stated = self.config
        if stated.clip is None or stated.noise_std is None:
            return charged_claim(self._plans[phase], charges, rounds)
        clients = self._clients(attacked)
        cohort = expected_cohort(attacked.experiment, clients)
        claim = PrivacyClaim(
            stated.clip,
            cohort,
            stated.noise_std,
            min(1.0, cohort / clients),
            rounds,
            stated.delta,
            math.inf if stated.epsilon is None else stated.epsilon,
        )
        if stated.epsilon is None:  # of as many Gaussian releases without amplification
            return replace(claim, epsilon=claim.known_epsilon(rounds))
        return claim


def _rows(audit: Audit) -> list[list[str]]:
    """Rows by run and observer: bounds, estimate, and the claimed epsilon."""
    rows: list[list[str]] = [[*_COLUMNS.split(", ")]]
    for run in audit.runs:
        for score in run.scores:
            estimate = score.estimate
            bounds = [score.one_run.epsilon, score.gdp, estimate.epsilon]
            interval = f"{estimate.low:.3f} to {estimate.high:.3f}"
            numbers = [*(f"{bound:.3f}" for bound in bounds), interval, f"{score.upper:.3f}"]
            rows.append([str(run.run), run.phase, score.observer, *numbers])
    return rows
