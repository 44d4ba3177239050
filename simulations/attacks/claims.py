# SPDX-License-Identifier: Apache-2.0
"""The privacy claim of an experiment, for an audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedrec.attacks.audit.mechanism import Mechanism
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import Experiment
from fedrec.privacy.accounting.accountant import Accountant
from fedrec.privacy.config import PrivacyConfig
from fedrec.privacy.ledger import Charge
from fedrec.privacy.plan import Plan
from server.privacy.phase_plans import PhasePlans


@dataclass(frozen=True)
class Claim:
    """The claim that is audited.

    Attributes:
        clip: S, largest L2 norm of one client's update.
        noise_std: standard deviation of the noise in each coordinate of the mean update.
        delta: of the claimed epsilon.
        epsilon: the claim under replace-one, for all rounds and the population with canaries; None:
            that of the same number of Gaussian releases without amplification by sampling.
        denominator: M, what the sum is divided by; None: the sampler's cohort.
    """

    clip: float
    noise_std: float
    delta: float = 1e-5
    epsilon: float | None = None
    denominator: float | None = None

    def mechanism(self, cohort: float, rate: float, rounds: int) -> Mechanism:
        """The claim on one release, with cohort, sampling rate and number of releases of the
        audited runs."""
        denominator = cohort if self.denominator is None else self.denominator
        parts = (self.clip, denominator, self.noise_std, rate, rounds, self.delta)
        epsilon = self.epsilon
        if epsilon is None:
            epsilon = Mechanism(*parts, epsilon=float("inf")).known_epsilon(rounds)
        return Mechanism(*parts, epsilon=epsilon)


def noisy_plans(experiment: Experiment, clients: int) -> dict[str, Plan]:
    """The plan of each phase of an experiment that has noise.

    Args:
        experiment: the experiment, resolved.
        clients: number of clients that may be drawn, canaries included.

    Raises:
        ExperimentError: it has no `[privacy]` table, or one that canaries cannot test.
    """
    if experiment.privacy is None:
        raise ExperimentError(
            f"experiment {experiment.name!r} makes no privacy claim",
            expected="a table [privacy], or a claim on the command line",
            got="neither",
            fix="--clip S --noise-std SIGMA (and --epsilon E --delta D)",
        )
    _refuse(experiment.privacy)
    plans = PhasePlans.before_a_run(experiment, np.arange(clients)).plans
    return {phase: plan for phase, plan in plans.items() if experiment.privacy.covers(phase)}


def charged_claim(plan: Plan, charges: Sequence[Charge], rounds: int) -> Mechanism:
    """The claim of a phase as its ledger states it: the epsilon of all charges, and noise of the
    largest multiplier.

    Args:
        plan: clip, sampler and denominator of the phase.
        charges: the lines of the ledger for its rounds.
        rounds: number of released rounds.
    """
    accountant = Accountant(plan.config.backend)
    for charge in charges:
        accountant.step(charge.event, charge.count)
    multipliers = (getattr(charge.event, "noise_multiplier", 0.0) for charge in charges)
    return Mechanism(
        clip=plan.sensitivity / 2,
        denominator=plan.denominator,
        noise_std=max(multipliers, default=0.0) * plan.sensitivity / plan.denominator,
        sampling_rate=plan.denominator / plan.clients,
        rounds=rounds,
        delta=plan.delta,
        epsilon=accountant.epsilon(plan.delta).epsilon,
    )


def _refuse(privacy: PrivacyConfig) -> None:
    """Refuse claims that the audit's statistics do not cover."""
    mechanism = privacy.noise()
    rules = {
        "adjacency": (
            privacy.adjacency == "replace-one",
            "replace-one: a canary's other sign is another client",
        ),
        "mechanism": (
            mechanism.pair(1.0).mu is not None and not mechanism.correlated,
            "independent Gaussian noise in every round",
        ),
        "placement": (
            privacy.placement != "local",
            "central or distributed: the audit observes sums",
        ),
        "mode": (
            privacy.mode == "reproducible",
            "reproducible: the cohorts must be known afterwards",
        ),
        "adaptive-clip": (privacy.adaptive_clip is None, "none: the clip norm must be fixed"),
    }
    for key, (right, expected) in rules.items():
        if not right:
            raise ExperimentError(
                f"an audit cannot test 'privacy.{key}' as it is",
                expected=expected,
                got=repr(privacy.table().get(key)),
                fix=f"--set privacy.{key}=... for the audit",
            )
