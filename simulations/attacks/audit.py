# SPDX-License-Identifier: Apache-2.0
"""Canary audit of an experiment: run it with canary clients, record the releases of each round,
test the claim of each phase with noise.

Sampler, strategy, messages, clip and noise are those of the experiment: they are what is tested
(`simulations.attacks.systems` has what is added, `simulations.attacks.bounds` the statistics). The
claim is what the run's privacy ledger states.
"""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.serverapp.strategy import Strategy
from pydantic import Field

from fedrec.components.registry import MODEL
from fedrec.components.sections import component_of
from fedrec.config import Config
from fedrec.data.population import POPULATIONS
from fedrec.errors import ExperimentError, RunError
from fedrec.experiment.phases import phase_at, phases_of
from fedrec.experiment.schema import Experiment
from fedrec.privacy.accounting.accountant import Accountant, Charge, Ledger
from fedrec.privacy.accounting.events import CorrelatedRounds
from fedrec.privacy.canaries import CanaryPlan, Directions, Observations, PrivacyClaim
from fedrec.privacy.mechanisms import Banded, Gaussian, inverse
from fedrec.privacy.plan import Plan
from fedrec.runs.folder import Result, RunFolder
from fedrec.runtime.files import open_atomically
from fedrec.runtime.ragged import add_prefix, strip_prefix
from server.callbacks import Observer
from server.checkpoint import make_strategy, reading
from server.cohort import SampledCohorts
from server.privacy.guard import PhasePlans
from simulations.attacks.base import Attack, Attacked, AttackOutcome, AttackRun
from simulations.attacks.bounds import Audit, Audited, audit, check_charges
from simulations.attacks.systems import changes_for, kind_of
from strategies.base import Aggregate, parts_of

# Claim of an audited run, and its releases along the canaries' directions: the noisy mean updates
# that `DpFedAvg` gives to the strategy.

_FILE = "canaries.npz"

# Arrays of each phase in the file: `rounds`, `int64 [T]`, those with releases; `released`, `float64
# [T, k]`, along each canary's direction; `quiet`, `float64 [T, n]`, along directions in which no
# client moves the mean (n may be 0); and `groups`, `[k]`, the parameter of each canary.


def _fit(arrays: Mapping[str, np.ndarray], canaries: int) -> bool:
    """True if shapes and types of a phase's arrays fit the number of canaries."""
    rounds = len(arrays["rounds"])
    return (
        arrays["released"].dtype == arrays["quiet"].dtype == np.float64
        and arrays["rounds"].dtype == np.int64
        and arrays["released"].shape == (rounds, canaries)
        and arrays["quiet"].shape[:1] == (rounds,)
        and arrays["quiet"].ndim == 2
        and arrays["groups"].shape == (canaries,)
    )


class _Watch(Observer):
    """Callback that records the releases of each audited round, and saves them at the end.

    Args:
        plans: the canaries of each audited phase.
    """

    def __init__(self, plans: Mapping[str, CanaryPlan]) -> None:
        self._plans = plans
        self._recorded: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = {n: {} for n in plans}
        self._directions: dict[str, Directions] = {}

    def on_start(self, run: RunFolder, first_round: int, rounds: int) -> None:
        """Prepare recording from round `first_round` (more than 1 when resumed) of `rounds`.

        Raises:
            RunError: the run is resumed, and its earlier releases were not recorded.
        """
        if first_round > 1:
            raise RunError(
                f"the audited run {run.path} was interrupted before round {first_round}",
                fix=f"remove {run.path} and start again",
            )
        self._experiment = run.experiment
        self._phases = phases_of(run.experiment)
        schema = POPULATIONS.population(run.experiment).schema()
        self._room = getattr(component_of(MODEL, run.experiment.model, schema), "room", {})

    def observe(self, strategy: Strategy) -> None:
        """Record the noisy mean update of each phase."""
        for part in parts_of(strategy):
            if getattr(part, "privacy", None):
                part.apply = self._recording(part.apply)  # type: ignore[attr-defined, union-attr]

    def _recording(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
            total = aggregate.total()
            mean = {name: value / aggregate.clients for name, value in total.items()}
            self._record(aggregate.round, mean)
            return apply(theta, aggregate)

        return recorded

    def on_end(self, result: Result) -> None:
        """Save the recorded releases."""
        releases = {f"{phase}/": self._releases(phase) for phase in self._plans}
        with open_atomically(result.folder / _FILE) as file:
            np.savez(file, **add_prefix(releases))  # type: ignore[arg-type]

    def _record(self, round_number: int, mean: Mapping[str, np.ndarray]) -> None:
        phase = phase_at(self._phases, round_number).name
        if phase not in self._plans:
            return
        if phase not in self._directions:
            shapes = {name: value.shape for name, value in mean.items()}
            self._directions[phase] = Directions(self._plans[phase], self._room, shapes)
        directions = self._directions[phase]
        released = directions.project(mean), directions.quiet(mean)
        self._recorded[phase][round_number] = released

    def _releases(self, phase: str) -> dict[str, np.ndarray]:
        by_round = self._recorded[phase]
        rounds = sorted(by_round)
        count = self._plans[phase].count
        released = np.array([by_round[number][0] for number in rounds])
        quiet = np.array([by_round[number][1] for number in rounds])
        directions = self._directions.get(phase)
        groups = directions.groups if directions else [""] * count
        return {
            "rounds": np.array(rounds, dtype=np.int64),
            "released": released.reshape(len(rounds), count),
            "quiet": quiet.reshape(len(rounds), -1 if rounds else 0),
            "groups": np.array(groups, dtype=np.str_),
        }


def _observed(
    run: RunFolder, plans: Mapping[str, CanaryPlan]
) -> dict[str, tuple[list[int], Observations]]:
    """Rounds and observations of each phase of an audited run with releases.

    Raises:
        ExperimentError: no phase has releases.
        RunError: the releases were not recorded, or their file is damaged.
    """
    experiment = run.experiment
    clients = POPULATIONS.population(experiment).partition.training_clients
    drawn = SampledCohorts.without_nodes(experiment, clients)
    parts = make_strategy(experiment, drawn).phases()  # type: ignore[attr-defined]
    observations = {}
    for phase, releases in _read_releases(run.path, plans).items():
        plan = plans[phase]
        canaries = plan.first + np.arange(plan.count)
        rounds = releases["rounds"].tolist()
        if not rounds:  # the budget may have ended the run early
            continue
        cohorts = parts[phase].cohorts
        seen = Observations(
            releases["released"],
            np.array([np.isin(canaries, cohorts.sample(number)) for number in rounds]),
            plan.signs(),
            releases["quiet"] if releases["quiet"].size else None,
            shared=plan.kind == "products",
            groups=releases["groups"],
        )
        observations[phase] = rounds, seen
    if not observations:
        fix = "raise privacy.epsilon or the noise"
        raise ExperimentError("the budget is too small for a round to audit", fix=fix)
    return observations


def _read_releases(
    folder: Path, plans: Mapping[str, CanaryPlan]
) -> dict[str, dict[str, np.ndarray]]:
    """Load the releases of an audited run, by phase.

    Raises:
        RunError: their file is missing, or was not written by an audit.
    """
    file = folder / _FILE
    expected = f"releases of the phases {', '.join(plans)}, written when an audited run ended"
    with (
        reading(file, expected, f"remove the folder {file.parent} and audit again"),
        np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as arrays,
    ):
        tables = dict(arrays)
        released = {phase: strip_prefix(f"{phase}/", tables) for phase in plans}
        if not all(_fit(arrays, plans[phase].count) for phase, arrays in released.items()):
            raise ValueError("arrays of another shape or type")
        return released


def _noisy_plans(experiment: Experiment, clients: int) -> dict[str, Plan]:
    """Privacy plans of an experiment's phases.

    Args:
        experiment: the experiment, resolved.
        clients: number of clients that may be drawn, canaries included.

    Raises:
        ExperimentError: `[privacy]` is missing, or canaries cannot test it.
    """
    privacy = experiment.privacy
    if privacy is None:
        raise ExperimentError(
            f"experiment {experiment.name!r} makes no privacy claim", fix="add [privacy]"
        )
    rules = {
        "the engine flower": (experiment.engine.name == "flower", "--engine serial"),
        "late or unavailable clients": (
            experiment.known_cohorts,
            "audit the experiment without [closing], [asynchronous] and device availability",
        ),
        f"privacy.adjacency = {privacy.adjacency!r}": (
            privacy.adjacency != "replace-one",
            "--set privacy.adjacency=replace-one: the other sign of a canary is another client",
        ),
        f"privacy.mechanism = {privacy.mechanism!r}": (
            not isinstance(privacy.noise(), Gaussian | Banded),
            "--set privacy.mechanism=gaussian, or banded",
        ),
        "privacy.placement = 'local'": (
            privacy.placement == "local",
            "--set privacy.placement=central, or distributed: an audit observes sums",
        ),
        "privacy.mode = 'secure'": (
            privacy.mode == "secure",
            "--set privacy.mode=reproducible, as the cohorts must be known",
        ),
    }
    for problem, (applies, fix) in rules.items():
        if applies:
            raise ExperimentError(f"an audit does not support {problem}", fix=fix)
    return PhasePlans.before_a_run(experiment, np.arange(clients)).plans


def _charged_claim(plan: Plan, charges: Sequence[Charge], rounds: int) -> PrivacyClaim:
    """Claim of a phase from its ledger: the epsilon of all charges, and noise of the largest
    multiplier.

    Args:
        plan: clip, sampler and denominator of the phase.
        charges: the lines of the ledger for its rounds.
        rounds: number of released rounds.
    """
    accountant = Accountant(plan.config.backend)
    for charge in charges:
        accountant.step(charge.event)
    mechanism = plan.mechanism
    correlated = any(isinstance(charge.event, CorrelatedRounds) for charge in charges)
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
        mixing=(
            tuple(inverse(mechanism.column, rounds).tolist())
            if correlated and isinstance(mechanism, Banded)
            else None
        ),
    )


_SIGNIFICANCE = 0.05
"""Probability of a wrong FAIL."""
_COLUMNS = (
    "run, phase, observer, one-run bound, GDP bound, estimate, 95 % interval, claimed epsilon"
)


_OVERSHOOT = 10.0
"""Norm of the canaries' updates in units of S, to test clipping."""


class AuditConfig(Config):
    """Settings of an audit."""

    canaries: int = Field(default=1000, ge=20)
    """Number of canary clients per run."""
    seeds: int = Field(default=1, ge=1)
    """Number of runs."""


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
        self._plans = _noisy_plans(experiment, len(attacked.users) + self.config.canaries)
        runs = {}
        for number in range(self.config.seeds):
            plans = self._canaries(attacked, number)
            runs[f"run-{number + 1:02d}"] = AttackRun(
                seed=attacked.seed_of("audit-run", number),
                changes=changes_for(experiment, plans),
                callbacks=[_Watch(plans)],
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
        result = audit(audited, significance=_SIGNIFICANCE, seed=self.seed)
        lines = [check.line(run.label) for run in result.runs for check in run.checks]
        return AttackOutcome(
            result, result.table(), _rows(result), lines, result.verdict, result.reasons()
        )

    def _canaries(self, attacked: Attacked, number: int) -> dict[str, CanaryPlan]:
        """Canaries of each phase of run `number`, from 0."""
        phases = {phase.name: phase for phase in phases_of(attacked.experiment)}
        return {
            name: CanaryPlan(
                first=attacked.population.interactions.num_users,
                count=self.config.canaries,
                magnitude=_OVERSHOOT * plan.clip_norm,
                seed=attacked.seed_of("audit-run", number),
                parameters=plan.config.parameters,
                kind=kind_of(phases[name]),
            )
            for name, plan in self._plans.items()
        }

    def _audited(self, attacked: Attacked, run: RunFolder, number: int) -> Iterator[Audited]:
        """Yield the phases of a run with releases, each with its claim."""
        plans = self._canaries(attacked, number)
        phases = phases_of(run.experiment)
        ledger = Ledger(run.path / "privacy.jsonl")
        for phase, (rounds, seen) in _observed(run, plans).items():
            charges = [c for c in ledger.charges if phase_at(phases, c.round_number).name == phase]
            yield Audited(
                seen,
                _charged_claim(self._plans[phase], charges, len(rounds)),
                (check_charges(rounds, [charge.round_number for charge in charges]),),
                run=number + 1,
                phase=phase if len(plans) > 1 else "",
            )


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
