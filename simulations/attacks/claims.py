# SPDX-License-Identifier: Apache-2.0
"""What an experiment claims of its privacy, in the terms of an audit."""

from __future__ import annotations

from dataclasses import dataclass

from fedrec.attacks.audit.mechanism import Mechanism
from fedrec.components.registry import STRATEGY, resolve
from fedrec.errors import ExperimentError
from fedrec.experiment.phases import contributions_of
from fedrec.experiment.schema import Experiment
from fedrec.privacy.accounting.accountant import Accountant
from fedrec.privacy.config import PrivacyConfig
from fedrec.privacy.plan import Plan
from strategies.base import CohortStrategy


@dataclass(frozen=True)
class Claim:
    """The claim that is audited.

    Attributes:
        clip: S, largest L2 norm of one client's update.
        noise_std: standard deviation of the noise in each coordinate of the mean update.
        delta: of the claimed epsilon.
        epsilon: the claim under replace-one, for all rounds and the population with canaries; None:
            that of as many Gaussian releases without amplification by sampling.
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


def claim_of(experiment: Experiment, clients: int, rounds: int | None = None) -> Claim:
    """What the `[privacy]` table of an experiment claims.

    Args:
        experiment: the experiment, resolved.
        clients: number of clients that may be drawn, canaries included.
        rounds: number of rounds that took place, where a budget ended the run; None: all.

    Raises:
        ExperimentError: it has no such table, or one that canaries cannot test.
    """
    if experiment.privacy is None:
        raise ExperimentError(
            f"experiment {experiment.name!r} claims no privacy",
            expected="a table [privacy], or a claim on the command line",
            got="neither",
            fix="--clip S --noise-std SIGMA (and --epsilon E --delta D)",
        )
    _refuse(experiment.privacy)
    plan = plan_of(experiment, clients)
    accountant = Accountant(experiment.privacy.backend)
    accountant.step(plan.event(), experiment.rounds if rounds is None else rounds)
    epsilon = accountant.epsilon(plan.delta).epsilon
    return Claim(plan.clip_norm, plan.mean_noise_std, plan.delta, epsilon, plan.denominator)


def _refuse(privacy: PrivacyConfig) -> None:
    """Refuse what the audit's statistics are not made for."""
    rules = {
        "adjacency": (
            privacy.adjacency == "replace-one",
            "replace-one: a canary's other sign is another client",
        ),
        "mechanism": (privacy.mechanism == "gaussian", "gaussian"),
        "placement": (privacy.placement != "local", "central or distributed: the audit sees sums"),
        "mode": (
            privacy.mode == "reproducible",
            "reproducible: who took part must be known afterwards",
        ),
        "phases": (not privacy.phases, "none: the audit is made for rounds that are alike"),
        "adaptive-clip": (privacy.adaptive_clip is None, "none: the canaries' reach must be known"),
    }
    for key, (right, expected) in rules.items():
        if not right:
            raise ExperimentError(
                f"an audit cannot test 'privacy.{key}' as it is",
                expected=expected,
                got=repr(privacy.table().get(key)),
                fix=f"--set privacy.{key}=... for the audit",
            )


def plan_of(experiment: Experiment, clients: int) -> Plan:
    """The plan of a resolved experiment with so many training clients, see `Plan.of`.

    Raises:
        ExperimentError: it has no `[privacy]` table, or its settings do not fit together.
    """
    if experiment.privacy is None:
        raise ExperimentError(
            f"experiment {experiment.name!r} has no differential privacy",
            expected="a table [privacy]",
            got="none, so epsilon is infinite",
            fix="add [privacy] with clip-norm and noise-multiplier (or epsilon)",
        )
    if experiment.privacy.epsilon is None and experiment.privacy.phases:
        raise ExperimentError(
            "this experiment's phases differ, and only its strategy knows how many rounds each has",
            expected="privacy.epsilon, which is for all of them, or no privacy.phases",
            got="privacy.noise-multiplier and privacy.phases",
            fix="run it: its ledger and its report tell the epsilon of each phase",
        )
    strategy = resolve(STRATEGY, experiment.strategy.name)
    own = issubclass(strategy, CohortStrategy)
    rate = strategy.server_rate(experiment.settings(STRATEGY), 1) if own else 1.0
    sampler = experiment.sampler
    return Plan.of(
        experiment.privacy,
        sampler.name,
        sampler.options,
        clients,
        experiment.rounds,
        server_lr=rate,
        contributions=contributions_of(experiment.step.name),
    )
