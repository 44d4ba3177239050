# SPDX-License-Identifier: Apache-2.0
"""The privacy claim of an experiment, for an audit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedrec.attacks.audit.claim import PrivacyClaim
from fedrec.components.registry import SAMPLER, STRATEGY, resolve
from fedrec.errors import ExperimentError
from fedrec.experiment.phases import phase_at, phases_of
from fedrec.experiment.schema import Experiment
from fedrec.privacy.accounting.accountant import Accountant
from fedrec.privacy.config import PrivacyConfig
from fedrec.privacy.ledger import Charge, Ledger
from fedrec.privacy.plan import Plan
from fedrec.runs.folder import RunFolder
from server.privacy.phase_plans import PhasePlans
from simulations.attacks.canaries.releases import server_rate
from strategies.base import CohortStrategy


def refuse_unauditable(experiment: Experiment, *, stated: bool) -> None:
    """Refuse experiments that an audit cannot test.

    Args:
        experiment: the experiment, resolved.
        stated: whether the claim is not that of its `[privacy]` table.

    Raises:
        ExperimentError: says what is in the way.
    """
    if experiment.engine.name == "flower":
        raise ExperimentError(
            "the flower engine does not support audits",
            expected="engine serial or ray",
            got="flower",
            fix="--engine serial",
        )
    if experiment.lateness.known_cohorts:
        raise ExperimentError(
            "audits do not know which canaries were in time",
            expected="rounds that wait for all clients, which are always available",
            got="[closing], [asynchronous] or devices that are away",
            fix="audit the experiment without them, at the noise that it would have then",
        )
    if not stated:
        return
    strategy = resolve(STRATEGY, experiment.strategy.name)
    phased = issubclass(strategy, CohortStrategy)
    if phased and strategy.by_phase is not CohortStrategy.by_phase:
        raise ExperimentError(
            f"strategy {experiment.strategy.name!r} has phases, whose releases differ",
            expected="the claim of the experiment's table [privacy], which has one for each phase",
            got="a single claim on the command line",
            fix="add [privacy] and leave out --clip and --noise-std",
        )
    if experiment.privacy is None and server_rate(experiment)(experiment.rounds) <= 0:
        anneal = experiment.strategy.options.get("anneal-rounds")
        raise ExperimentError(
            "the last rounds cannot be audited: their server rate is 0, so the parameters do not"
            " change",
            expected="strategy.anneal-rounds of at least the number of rounds",
            got=f"rounds = {experiment.rounds}, anneal-rounds = {anneal}",
            fix=f"--set strategy.anneal-rounds={experiment.rounds}",
        )


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


def charged_claim(plan: Plan, charges: Sequence[Charge], rounds: int) -> PrivacyClaim:
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
    correlated = plan.mechanism.correlated
    multipliers = (getattr(charge.event, "noise_multiplier", 0.0) for charge in charges)
    largest = plan.noise_multiplier if correlated else max(multipliers, default=0.0)
    return PrivacyClaim(
        clip=plan.sensitivity / 2,
        denominator=plan.denominator,
        noise_std=largest * plan.sensitivity / plan.denominator,
        sampling_rate=plan.sampling.rate if correlated else plan.denominator / plan.clients,
        rounds=rounds,
        delta=plan.delta,
        epsilon=accountant.epsilon(plan.delta).epsilon,
        mixing=tuple(plan.mechanism.mixing(rounds).tolist()) if correlated else None,
    )


def charges_of(run: RunFolder, phase: str) -> list[Charge]:
    """The lines of a run's privacy ledger for the rounds of a phase."""
    phases = phases_of(run.experiment)
    charges = Ledger(run.path / "privacy.jsonl").charges
    return [one for one in charges if phase_at(phases, one.round_number).name == phase]


def expected_cohort(experiment: Experiment, clients: int) -> float:
    """Mean cohort size of an experiment with `clients` clients.

    Raises:
        ExperimentError: the sampler does not define it, or `clients` is too small for it.
    """
    sampler = resolve(SAMPLER, experiment.sampler.name)
    drawn = sampler(experiment.settings(SAMPLER), np.arange(clients), experiment.seed)
    if drawn.expected_cohort is None:
        raise ExperimentError(
            f"sampler {experiment.sampler.name!r} has no known sampling rate",
            expected="a sampler that states the mean size of its cohorts",
            got=f"no `expected_cohort` in {sampler.__name__}",
            fix="use the sampler full, fixed-size or poisson, or define that property",
        )
    return drawn.expected_cohort


def _refuse(privacy: PrivacyConfig) -> None:
    """Refuse claims that the audit's statistics do not cover."""
    mechanism = privacy.noise()
    rules = {
        "adjacency": (
            privacy.adjacency == "replace-one",
            "replace-one: a canary's other sign is another client",
        ),
        "mechanism": (
            mechanism.pair(1.0).mu is not None,
            "Gaussian noise",
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
