# SPDX-License-Identifier: Apache-2.0
"""Claim of an audited run, and its releases along the canaries' directions.

The release of a private run is the noisy mean update that `DpFedAvg` gives to the strategy. For
other runs it is computed from the global parameters before and after a round, so that any strategy
can be audited that adds `server-lr` times a noisy mean to them.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from fedrec.attacks.canaries import CanaryPlan, Directions, Observations, PrivacyClaim
from fedrec.components.registry import MODEL, SAMPLER, STRATEGY, resolve
from fedrec.data.population import POPULATIONS
from fedrec.errors import ExperimentError, RunError
from fedrec.experiment.phases import phase_at, phases_of
from fedrec.experiment.schema import Experiment
from fedrec.experiment.sections import component_of
from fedrec.privacy.accounting.accountant import Accountant
from fedrec.privacy.accounting.events import CorrelatedRounds
from fedrec.privacy.ledger import Charge, Ledger
from fedrec.privacy.mechanisms import Banded, Gaussian, inverse
from fedrec.privacy.plan import Plan, PrivacyConfig
from fedrec.protocol.serialization import from_record, zero_copy_arrays
from fedrec.runs.folder import RunFolder
from fedrec.runs.result import Result
from fedrec.runtime.files import open_atomically
from fedrec.runtime.ragged import add_prefix, strip_prefix
from server.callbacks.base import Observer
from server.checkpoint import make_strategy
from server.cohort import SampledCohorts
from server.privacy.phase_plans import PhasePlans
from strategies.base import Aggregate, Cohorts, CohortStrategy, parts_of, server_rate

_FILE = "canaries.npz"
_DAMAGED = (OSError, EOFError, KeyError, ValueError, TypeError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True, eq=False)
class _CanaryReleases:
    """Releases of a phase.

    Attributes:
        rounds: `int64 [T]`, rounds with releases.
        released: `float64 [T, k]`, along each canary's direction.
        quiet: `float64 [T, n]`, along directions in which no client moves the mean; n may be 0.
        groups: `[k]`, the parameter of each canary.
    """

    rounds: np.ndarray
    released: np.ndarray
    quiet: np.ndarray
    groups: np.ndarray

    def fits(self, canaries: int) -> bool:
        """Return True if shapes and types fit the number of canaries."""
        rounds = len(self.rounds)
        return (
            self.released.dtype == self.quiet.dtype == np.float64
            and self.rounds.dtype == np.int64
            and self.released.shape == (rounds, canaries)
            and self.quiet.shape[:1] == (rounds,)
            and self.quiet.ndim == 2
            and self.groups.shape == (canaries,)
        )


class Watch(Observer):
    """Callback that records the releases of each audited round, and saves them at the end.

    Args:
        plans: the canaries of each audited phase.
    """

    def __init__(self, plans: Mapping[str, CanaryPlan]) -> None:
        self._plans = plans
        self._recorded: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = {n: {} for n in plans}
        self._directions: dict[str, Directions] = {}
        self._before: dict[str, np.ndarray] = {}

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
        experiment = run.experiment
        self._phases = phases_of(experiment)
        self._rate = _rate_of(experiment)
        schema = POPULATIONS.population(experiment).schema()
        self._room = getattr(component_of(MODEL, experiment.model, schema), "room", {})

    def observe(self, strategy: Strategy) -> None:
        """Record the noisy mean update of each private phase; without `[privacy]`, each round's
        change of the parameters."""
        private = [part for part in parts_of(strategy) if getattr(part, "privacy", None)]
        for part in private:
            part.apply = self._recording(part.apply)  # type: ignore[attr-defined, union-attr]
        if not private:
            strategy.configure_train = self._remembering(strategy.configure_train)  # type: ignore[method-assign]
            strategy.aggregate_train = self._comparing(strategy.aggregate_train)  # type: ignore[method-assign]

    def _recording(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
            total = aggregate.total(theta)
            mean = {name: value / aggregate.clients for name, value in total.items()}
            self._record(aggregate.round, mean)
            return apply(theta, aggregate)

        return recorded

    def _remembering(self, configure: Callable[..., Any]) -> Callable[..., Any]:
        def configured(number: int, arrays: ArrayRecord, *others: Any) -> Any:
            self._before = from_record(arrays)
            return configure(number, arrays, *others)

        return configured

    def _comparing(self, aggregate: Callable[..., Any]) -> Callable[..., Any]:
        def compared(number: int, replies: Any) -> Any:
            arrays, metrics = aggregate(number, replies)
            before = self._before
            after = before if arrays is None else zero_copy_arrays(arrays)
            rate = self._rate(number)
            changes = {
                name: (after[name].astype(old.dtype).astype(np.float64) - old) / rate
                for name, old in before.items()
            }
            self._record(number, changes)
            return arrays, metrics

        return compared

    def on_end(self, result: Result) -> None:
        """Save the recorded releases."""
        releases = {f"{phase}/": vars(self._releases(phase)) for phase in self._plans}
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

    def _releases(self, phase: str) -> _CanaryReleases:
        by_round = self._recorded[phase]
        rounds = sorted(by_round)
        count = self._plans[phase].count
        released = np.array([by_round[number][0] for number in rounds])
        quiet = np.array([by_round[number][1] for number in rounds])
        directions = self._directions.get(phase)
        return _CanaryReleases(
            np.array(rounds, dtype=np.int64),
            released.reshape(len(rounds), count),
            quiet.reshape(len(rounds), -1 if rounds else 0),
            np.array(directions.groups if directions else [""] * count, dtype=np.str_),
        )


def _rate_of(experiment: Experiment) -> Callable[[int], float]:
    """Factor of a round's noisy mean in the strategy, by round number from 1."""
    settings = experiment.settings(STRATEGY)
    if not issubclass(resolve(STRATEGY, experiment.strategy.name), CohortStrategy):
        return lambda round_number: 1.0
    return lambda round_number: server_rate(settings, round_number)


def observed(
    run: RunFolder, plans: Mapping[str, CanaryPlan]
) -> dict[str, tuple[list[int], Observations]]:
    """Rounds and observations of each phase of an audited run with releases.

    Raises:
        ExperimentError: no phase has releases.
        RunError: the releases were not recorded, or their file is damaged.
    """
    observations = {}
    for phase, releases in recorded(run.path, plans).items():
        plan = plans[phase]
        canaries = plan.first + np.arange(plan.count)
        rounds = releases.rounds.tolist()
        if not rounds:  # the budget may have ended the run early
            continue
        cohorts = _cohorts(run.experiment, phase)
        seen = Observations(
            releases.released,
            np.array([np.isin(canaries, cohorts.sample(number)) for number in rounds]),
            plan.signs(),
            releases.quiet if releases.quiet.size else None,
            shared=plan.kind == "products",
            groups=releases.groups,
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


def recorded(folder: Path, plans: Mapping[str, CanaryPlan]) -> dict[str, _CanaryReleases]:
    """Load the releases of an audited run, by phase.

    Raises:
        RunError: their file is missing, or was not written by an audit.
    """
    file = folder / _FILE
    shown = "no such file"
    try:
        with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as arrays:
            tables = {name: arrays[name] for name in arrays.files}
        released = {phase: _CanaryReleases(**strip_prefix(f"{phase}/", tables)) for phase in plans}
        if all(releases.fits(plans[phase].count) for phase, releases in released.items()):
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


def check_auditable(experiment: Experiment, *, stated: bool) -> None:
    """Check that an audit can test the experiment.

    Args:
        experiment: the experiment, resolved.
        stated: whether the claim is given on the command line, instead of `[privacy]`.

    Raises:
        ExperimentError: the audit does not support the experiment.
    """
    strategy = resolve(STRATEGY, experiment.strategy.name)
    phased = issubclass(strategy, CohortStrategy) and strategy.phases is not CohortStrategy.phases
    still = experiment.privacy is None and _rate_of(experiment)(experiment.rounds) <= 0
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


def noisy_plans(experiment: Experiment, clients: int) -> dict[str, Plan]:
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
    _check_claim(experiment.privacy)
    return PhasePlans.before_a_run(experiment, np.arange(clients)).plans


def charged_claim(plan: Plan, charges: Sequence[Charge], rounds: int) -> PrivacyClaim:
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


def charges_of(run: RunFolder, phase: str) -> list[Charge]:
    """Charges in a run's privacy ledger for the rounds of a phase."""
    phases = phases_of(run.experiment)
    charges = Ledger(run.path / "privacy.jsonl").charges
    return [charge for charge in charges if phase_at(phases, charge.round_number).name == phase]


def expected_cohort(experiment: Experiment, clients: int) -> float:
    """Mean cohort size of an experiment with `clients` clients.

    Raises:
        ExperimentError: the sampler does not define it, or `clients` is too small.
    """
    everyone = np.arange(clients)
    sampler = component_of(SAMPLER, experiment.sampler, everyone, experiment.seed)
    if sampler.expected_cohort is None:
        raise ExperimentError(
            f"sampler {experiment.sampler.name!r} has no known sampling rate",
            fix="use sampler full, fixed-size or poisson, or define `expected_cohort`",
        )
    return sampler.expected_cohort


def _check_claim(privacy: PrivacyConfig) -> None:
    """Check that the audit's statistics cover the claim."""
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
