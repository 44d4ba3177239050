# SPDX-License-Identifier: Apache-2.0
"""The canary audit of an experiment: run it with canary clients, watch what each round releases,
test the claim of each phase with noise.

Sampler, strategy, messages, clip and noise are those of the experiment: they are what is tested
(`simulations.attacks.planting` has what is added). The claim is what the run's privacy ledger
states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedrec.attacks.audit.canaries import CanaryPlan
from fedrec.attacks.audit.checks import check_charges
from fedrec.attacks.audit.observations import Observations
from fedrec.attacks.audit.verdict import Audit, Audited, audit
from fedrec.components.registry import SAMPLER, STRATEGY, resolve
from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.experiment.phases import MAIN, phase_at, phases_of
from fedrec.experiment.schema import Experiment
from fedrec.privacy.ledger import Charge, Ledger
from server.callbacks.base import Callback
from server.cohorts.selection import SampledCohorts
from server.strategy_state import make_strategy
from simulations.attacks.claims import Claim, charged_claim, noisy_plans
from simulations.attacks.federations import seed_of
from simulations.attacks.planting import kind_of, with_canaries
from simulations.attacks.releases import Releases, Watch, recorded, server_rate
from simulations.study.runs import run_once
from strategies.base import Cohorts, CohortStrategy

_FILE = "canaries.npz"


def audit_experiment(
    experiment: Experiment,
    claim: Claim | None,
    output: Path,
    *,
    canaries: int = 1000,
    seeds: int = 1,
    overshoot: float = 10.0,
    significance: float = 0.05,
    callbacks: Sequence[Callback] = (),
) -> Audit:
    """Run the experiment with canaries and audit its claim.

    Args:
        experiment: the experiment, resolved.
        claim: the audited claim; None: that of the ledger of the experiment's `[privacy]` table.
        output: folder of the runs; finished runs in it are reused.
        canaries: k, in each run.
        seeds: number of runs.
        overshoot: norm of the canaries' uploads in units of S, which the clip must reduce to S.
        significance: chance that the audit wrongly FAILs.
        callbacks: called on each event of the runs.

    Raises:
        ExperimentError: the experiment cannot be audited.
        FedrecError: see `simulations.runner.run`.
    """
    _refuse(experiment, claim)
    population = Population.of(experiment)
    clients = len(population.partition.training_clients) + canaries
    plans = noisy_plans(experiment, clients) if claim is None else {}
    phases = {phase.name: phase for phase in phases_of(experiment)}
    settings = {
        phase: {
            "magnitude": overshoot * plan.clip_norm,
            "parameters": plan.config.parameters,
            "kind": kind_of(phases[phase]),
        }
        for phase, plan in plans.items()
    }
    if claim is not None:
        own = {"magnitude": overshoot * claim.clip}
        patterns = (
            {} if experiment.privacy is None else {"parameters": experiment.privacy.parameters}
        )
        settings[MAIN] = {**own, **patterns}
    audited: list[Audited] = []
    for number in range(1, seeds + 1):
        seed = seed_of(experiment, "audit-run", number - 1)
        common = {"first": population.interactions.num_users, "count": canaries, "seed": seed}
        planted = {name: CanaryPlan(**common, **own) for name, own in settings.items()}
        run = with_canaries(experiment, planted, seed)
        folder = output / f"run-{number:02d}"
        for phase, releases in _releases(run, planted, folder, callbacks).items():
            charges = _charges(run, phase, folder)
            if claim is None:
                mechanism = charged_claim(plans[phase], charges, len(releases.rounds))
            else:
                cohort = expected_cohort(experiment, clients)
                rate = min(1.0, cohort / clients)
                mechanism = claim.mechanism(cohort, rate, len(releases.rounds))
            certain = ()
            if experiment.privacy is not None:
                paid = [charge.round_number for charge in charges]
                certain = (check_charges(releases.rounds.tolist(), paid),)
            label = phase if len(settings) > 1 else ""
            seen = _observations(run, planted[phase], phase, releases)
            audited.append(Audited(seen, mechanism, certain, run=number, phase=label))
    return audit(audited, significance=significance, seed=experiment.seed)


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


def _releases(
    experiment: Experiment,
    plans: Mapping[str, CanaryPlan],
    folder: Path,
    callbacks: Sequence[Callback],
) -> dict[str, Releases]:
    """The releases of an audited run, by phase with at least one.

    Raises:
        ExperimentError: there is none.
    """
    run_once(experiment, folder, [Watch(plans, folder / _FILE), *callbacks])
    # the budget may have ended the run early
    found = {
        phase: own for phase, own in recorded(folder / _FILE, plans).items() if len(own.rounds)
    }
    if not found:
        raise ExperimentError(
            "the run has no rounds to audit",
            expected="at least one round with noise",
            got="a budget that covers none",
            fix="raise privacy.budget or the noise",
        )
    return found


def _observations(
    experiment: Experiment, plan: CanaryPlan, phase: str, releases: Releases
) -> Observations:
    """The observations of a phase of an audited run."""
    canaries = plan.first + np.arange(plan.count)
    cohorts = _cohorts(experiment, phase)
    taking_part = np.array(
        [np.isin(canaries, cohorts.sample(number)) for number in releases.rounds.tolist()]
    )
    return Observations(
        releases.released,
        taking_part,
        plan.signs(),
        releases.quiet if releases.quiet.size else None,
        shared=plan.kind == "products",
        groups=releases.groups,
    )


def _cohorts(experiment: Experiment, phase: str) -> Cohorts:
    """The cohorts of a phase of an audited run."""
    clients = Population.of(experiment).partition.training_clients
    drawn = SampledCohorts.without_nodes(experiment, clients)
    strategy = make_strategy(experiment, drawn)
    return strategy.by_phase[phase].cohorts if isinstance(strategy, CohortStrategy) else drawn


def _charges(experiment: Experiment, phase: str, folder: Path) -> list[Charge]:
    """The lines of a run's ledger for the rounds of a phase."""
    phases = phases_of(experiment)
    charges = Ledger(folder / "privacy.jsonl").charges
    return [one for one in charges if phase_at(phases, one.round_number).name == phase]


def _refuse(experiment: Experiment, claim: Claim | None) -> None:
    if experiment.engine.name == "flower":
        raise ExperimentError(
            "the flower engine does not support audits",
            expected="engine serial or ray",
            got="flower",
            fix="--engine serial",
        )
    if claim is None:
        return
    strategy = resolve(STRATEGY, experiment.strategy.name)
    if issubclass(strategy, CohortStrategy) and strategy.by_phase is not CohortStrategy.by_phase:
        raise ExperimentError(
            f"strategy {experiment.strategy.name!r} has phases, whose releases differ",
            expected="the claim of the experiment's table [privacy], which has one for each phase",
            got="a single claim on the command line",
            fix="add [privacy] and leave out --clip and --noise-std",
        )
    if experiment.privacy is None and server_rate(experiment)(experiment.rounds) <= 0:
        raise ExperimentError(
            "the last rounds cannot be audited: their server rate is 0, so the parameters do not"
            " change",
            expected="strategy.anneal-rounds of at least the number of rounds",
            got=(
                f"rounds = {experiment.rounds}, anneal-rounds ="
                f" {experiment.strategy.options.get('anneal-rounds')}"
            ),
            fix=f"--set strategy.anneal-rounds={experiment.rounds}",
        )
