# SPDX-License-Identifier: Apache-2.0
"""Canary audit of an experiment: run it with canary clients, record the releases of each round,
test the claim of each phase with noise.

Sampler, strategy, messages, clip and noise are those of the experiment: they are what is tested
(`simulations.attacks.systems` has what is added, `fedrec.attacks` the statistics). The claim is
what the run's privacy ledger states, or that of the settings.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy
from pydantic import Field, model_validator

from fedrec.attacks.audit import Audit, Audited, audit, check_charges
from fedrec.attacks.canaries import CanaryPlan, Directions, Observations, PrivacyClaim
from fedrec.components.registry import MODEL, SAMPLER, STRATEGY, resolve
from fedrec.components.sections import component_of
from fedrec.config import Config
from fedrec.data.population import POPULATIONS
from fedrec.errors import ExperimentError, RunError
from fedrec.experiment.phases import MAIN, phase_at, phases_of
from fedrec.experiment.schema import Experiment
from fedrec.privacy.accounting.accountant import Accountant, Charge, Ledger
from fedrec.privacy.accounting.events import CorrelatedRounds
from fedrec.privacy.mechanisms import Banded, Gaussian, inverse
from fedrec.privacy.plan import Plan
from fedrec.protocol.serialization import from_record, zero_copy_arrays
from fedrec.runs.folder import Result, RunFolder
from fedrec.runtime.files import open_atomically
from fedrec.runtime.ragged import add_prefix, strip_prefix
from server.callbacks import Observer
from server.checkpoint import make_strategy
from server.cohort import SampledCohorts
from server.privacy.guard import PhasePlans
from simulations.attacks.base import Attack, Attacked, AttackOutcome, AttackRun
from simulations.attacks.systems import changes_for, kind_of
from strategies.base import Aggregate, Cohorts, CohortStrategy, parts_of, server_rate

# Claim of an audited run, and its releases along the canaries' directions.
#
# The release of a private run is the noisy mean update that `DpFedAvg` gives to the strategy. For
# other runs it is computed from the global parameters before and after a round, so that any
# strategy can be audited that adds `server-lr` times a noisy mean to them.

_FILE = "canaries.npz"
_DAMAGED = (OSError, EOFError, KeyError, ValueError, TypeError, zipfile.BadZipFile, zlib.error)


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
        """Record the noisy mean update of each private phase; without `[privacy]`, each round's
        change of the parameters."""
        private = [part for part in parts_of(strategy) if getattr(part, "privacy", None)]
        for part in private:
            part.apply = self._recording(part.apply)  # type: ignore[attr-defined, union-attr]
        if not private:
            self._compare(strategy)

    def _recording(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
            total = aggregate.total()
            mean = {name: value / aggregate.clients for name, value in total.items()}
            self._record(aggregate.round, mean)
            return apply(theta, aggregate)

        return recorded

    def _compare(self, strategy: Strategy) -> None:
        """Record what each round changes in the parameters."""
        configure = strategy.configure_train
        aggregate = strategy.aggregate_train
        before: dict[str, np.ndarray] = {}

        def configured(number: int, arrays: ArrayRecord, *others: Any) -> Any:
            before.clear()
            before.update(from_record(arrays))
            return configure(number, arrays, *others)

        def compared(number: int, replies: Any) -> Any:
            arrays, metrics = aggregate(number, replies)
            after = before if arrays is None else zero_copy_arrays(arrays)
            rate = _rate(self._experiment, number)
            changes = {
                name: (after[name].astype(old.dtype).astype(np.float64) - old) / rate
                for name, old in before.items()
            }
            self._record(number, changes)
            return arrays, metrics

        strategy.configure_train = configured  # type: ignore[method-assign]
        strategy.aggregate_train = compared  # type: ignore[method-assign]

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


def _rate(experiment: Experiment, round_number: int) -> float:
    """Factor of a round's noisy mean in the strategy."""
    if not issubclass(resolve(STRATEGY, experiment.strategy.name), CohortStrategy):
        return 1.0
    return server_rate(experiment.settings(STRATEGY), round_number)


def _observed(
    run: RunFolder, plans: Mapping[str, CanaryPlan]
) -> dict[str, tuple[list[int], Observations]]:
    """Rounds and observations of each phase of an audited run with releases.

    Raises:
        ExperimentError: no phase has releases.
        RunError: the releases were not recorded, or their file is damaged.
    """
    observations = {}
    for phase, releases in _read_releases(run.path, plans).items():
        plan = plans[phase]
        canaries = plan.first + np.arange(plan.count)
        rounds = releases["rounds"].tolist()
        if not rounds:  # the budget may have ended the run early
            continue
        cohorts = _cohorts(run.experiment, phase)
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
        fix = "raise privacy.budget or the noise"
        raise ExperimentError("the budget is too small for a round to audit", fix=fix)
    return observations


def _cohorts(experiment: Experiment, phase: str) -> Cohorts:
    """Cohorts of a phase of an audited run."""
    clients = POPULATIONS.population(experiment).partition.training_clients
    drawn = SampledCohorts.without_nodes(experiment, clients)
    strategy = make_strategy(experiment, drawn)
    return strategy.phases()[phase].cohorts if isinstance(strategy, CohortStrategy) else drawn


def _read_releases(
    folder: Path, plans: Mapping[str, CanaryPlan]
) -> dict[str, dict[str, np.ndarray]]:
    """Load the releases of an audited run, by phase.

    Raises:
        RunError: their file is missing, or was not written by an audit.
    """
    file = folder / _FILE
    shown = "no such file"
    try:
        with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as arrays:
            tables = {name: arrays[name] for name in arrays.files}
        released = {phase: strip_prefix(f"{phase}/", tables) for phase in plans}
        if all(_fit(arrays, plans[phase].count) for phase, arrays in released.items()):
            return released
        shown = ", ".join(
            f"{name} {value.dtype} {list(value.shape)}" for name, value in tables.items()
        )
    except FileNotFoundError:
        pass
    except _DAMAGED as e:
        shown = str(e) or type(e).__name__
    raise RunError(
        f"{file} does not contain the releases of an audited run",
        expected=f"arrays of the phases {', '.join(plans)}, written when the run ended",
        got=shown,
        fix=f"remove the folder {file.parent} and audit again",
    )


def _check_auditable(experiment: Experiment, *, stated: bool) -> None:
    """Check that an audit can test the experiment.

    Args:
        experiment: the experiment, resolved.
        stated: whether the claim is given on the command line, instead of `[privacy]`.

    Raises:
        ExperimentError: the audit does not support the experiment.
    """
    strategy = resolve(STRATEGY, experiment.strategy.name)
    phased = issubclass(strategy, CohortStrategy) and strategy.phases is not CohortStrategy.phases
    still = experiment.privacy is None and _rate(experiment, experiment.rounds) <= 0
    rules = {
        "the engine flower": (experiment.engine.name == "flower", "--engine serial"),
        "late or unavailable clients": (
            experiment.known_cohorts,
            "audit the experiment without [closing], [asynchronous] and device availability",
        ),
        "a single claim for a strategy with several phases": (
            stated and phased,
            "add [privacy] and leave out --clip and --noise-std",
        ),
        "final rounds with a server rate of 0, in which the parameters do not change": (
            stated and still,
            f"--set strategy.anneal-rounds={experiment.rounds}",
        ),
    }
    for problem, (applies, fix) in rules.items():
        if applies:
            raise ExperimentError(f"an audit does not support {problem}", fix=fix)


def _noisy_plans(experiment: Experiment, clients: int) -> dict[str, Plan]:
    """Privacy plans of an experiment's phases with noise.

    Args:
        experiment: the experiment, resolved.
        clients: number of clients that may be drawn, canaries included.

    Raises:
        ExperimentError: `[privacy]` is missing, or canaries cannot test it.
    """
    if experiment.privacy is None:
        raise ExperimentError(
            f"experiment {experiment.name!r} makes no privacy claim",
            fix="add [privacy], or --clip S --noise-std SIGMA (and --epsilon E --delta D)",
        )
    privacy = experiment.privacy
    rules = {
        # the other sign of a canary is another client
        "adjacency": (privacy.adjacency != "replace-one", "replace-one"),
        "mechanism": (not isinstance(privacy.noise(), Gaussian | Banded), "gaussian or banded"),
        "placement": (privacy.placement == "local", "central or distributed, as it observes sums"),
        "mode": (privacy.mode == "secure", "reproducible, as the cohorts must be known"),
    }
    for key, (broken, expected) in rules.items():
        if broken:
            raise ExperimentError(
                f"an audit does not support this value of 'privacy.{key}'",
                expected=expected,
                got=repr(privacy.table().get(key)),
                fix=f"--set privacy.{key}=... for the audit",
            )
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
        accountant.step(charge.event, charge.count)
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
        _check_auditable(experiment, stated=stated)
        self._plans = {} if stated else _noisy_plans(experiment, self._clients(attacked))
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

    def _clients(self, attacked: Attacked) -> int:
        """Number of training clients, canaries included."""
        return len(attacked.users) + self.config.canaries

    def _canaries(self, attacked: Attacked, number: int) -> dict[str, CanaryPlan]:
        """Canaries of each audited phase of run `number`, from 0."""
        experiment = attacked.experiment
        common: dict[str, Any] = {
            "first": attacked.population.interactions.num_users,
            "count": self.config.canaries,
            "seed": attacked.seed_of("audit-run", number),
        }
        if self.config.clip is not None:
            if experiment.privacy is not None:
                common["parameters"] = experiment.privacy.parameters
            return {MAIN: CanaryPlan(magnitude=self.config.overshoot * self.config.clip, **common)}
        phases = {phase.name: phase for phase in phases_of(experiment)}
        return {
            name: CanaryPlan(
                magnitude=self.config.overshoot * plan.clip_norm,
                parameters=plan.config.parameters,
                kind=kind_of(phases[name]),
                **common,
            )
            for name, plan in self._plans.items()
        }

    def _audited(self, attacked: Attacked, run: RunFolder, number: int) -> Iterator[Audited]:
        """Yield the phases of a run with releases, each with its claim."""
        plans = self._canaries(attacked, number)
        phases = phases_of(run.experiment)
        ledger = Ledger(run.path / "privacy.jsonl")
        private = attacked.experiment.privacy is not None
        for phase, (rounds, seen) in _observed(run, plans).items():
            charges = [c for c in ledger.charges if phase_at(phases, c.round_number).name == phase]
            paid = [charge.round_number for charge in charges]
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
        """Claim on the releases of a phase.

        Raises:
            ExperimentError: the sampler does not define the mean cohort size.
        """
        stated = self.config
        if stated.clip is None or stated.noise_std is None:
            return _charged_claim(self._plans[phase], charges, rounds)
        clients = self._clients(attacked)
        experiment = attacked.experiment
        everyone = np.arange(clients)
        cohort = component_of(
            SAMPLER, experiment.sampler, everyone, experiment.seed
        ).expected_cohort
        if cohort is None:
            raise ExperimentError(
                f"sampler {experiment.sampler.name!r} has no known sampling rate",
                fix="use sampler full, fixed-size or poisson, or define `expected_cohort`",
            )
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
