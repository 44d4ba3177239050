# SPDX-License-Identifier: Apache-2.0
"""Plan of a sweep: its search space, its settings (the grid, random ones, or Optuna's proposals),
and the private choice of one."""

import itertools
import json
import math
import secrets
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from pydantic import BaseModel

from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.evaluation.tables import lower_is_better
from fedrec.experiment.schema import DataSettings, Experiment, load, read
from fedrec.privacy.accounting.accountant import Law, RandomTrials, rdp_total
from fedrec.privacy.accounting.rdp import epsilon_of
from fedrec.rng import seed_sequence, stream
from server.privacy.guard import PhasePlans

_MOST = 10_000  # settings of a grid
_EXAMPLES = (
    "--vary 'strategy.server-lr=[0.1, 0.5]', or '{low=0.01, high=1.0, log=true}' for a range"
)
_RESERVED = {"seed": "--seeds N", "evaluation.held-out": "--set evaluation.held-out=validation"}
_ATTEMPTS = 100  # to find a setting that was not tried before


@dataclass(frozen=True)
class Range:
    """Dimension with an inclusive range of numbers; integers if both bounds are.

    Attributes:
        low: smallest value.
        high: largest value, above `low`.
        log: draw uniformly on a logarithmic scale; then `low` is above 0.
    """

    low: float
    high: float
    log: bool = False

    @property
    def whole(self) -> bool:
        """True if values are integers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def draw(self, generator: np.random.Generator) -> float | int:
        """Draw a value uniformly on the range's scale."""
        low = self.low - 0.5 * self.whole
        high = self.high + 0.5 * self.whole
        if self.log:
            return self.rounded(math.exp(generator.uniform(math.log(low), math.log(high))))
        return self.rounded(generator.uniform(low, high))

    def rounded(self, value: float) -> float | int:
        """Round a value to five significant digits, or to an integer, within the range."""
        near = round(value) if self.whole else float(f"{value:.5g}")
        return min(max(near, self.low), self.high)


Dimension: TypeAlias = tuple[Any, ...] | Range
"""A range, or distinct values, at least one."""
Space: TypeAlias = dict[str, Dimension]
Point: TypeAlias = dict[str, Any]
"""A value for each key of a space."""


def _space_of(texts: Iterable[str]) -> Space:
    """Parse a space from texts such as `"strategy.server-lr=[0.1, 0.5]"`.

    Raises:
        ExperimentError: a text is malformed, or a key is duplicate or cannot be varied.
    """
    space: Space = {}
    for text in texts:
        key, dimension = _dimension(text)
        if key in space:
            raise _error(f"duplicate key {key!r}", "distinct keys", text)
        if key in _RESERVED:
            raise _error(f"{key!r} cannot be varied by --vary", _RESERVED[key], text)
        space[key] = dimension
    return space


def grid(space: Space) -> list[Point]:
    """All combinations of the values of a space; the last key varies fastest.

    Raises:
        ExperimentError: the space has a range, or more than 10,000 combinations.
    """
    for key, dimension in space.items():
        if isinstance(dimension, Range):
            raise _error(
                f"a grid cannot have the range of {key!r}",
                "a list of values, or a number of random trials, such as --trials 20",
                f"{dimension.low} to {dimension.high}",
            )
    choices = [dimension for dimension in space.values() if not isinstance(dimension, Range)]
    size = math.prod(map(len, choices))
    if size > _MOST:
        raise _error(
            f"the grid has {size} settings", f"at most {_MOST}", "fewer values, or --trials"
        )
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*choices)]


def _drawn(space: Space, seed: int, number: int, attempt: int = 0) -> Point:
    """Draw the point of a trial, as a function of seed, number and attempt."""
    generator = stream(seed, "sweep", number, attempt)
    return {
        key: dimension.draw(generator)
        if isinstance(dimension, Range)
        else dimension[int(generator.integers(len(dimension)))]
        for key, dimension in space.items()
    }


def overrides(point: Mapping[str, Any]) -> list[str]:
    """Convert a point to overrides such as `"strategy.server-lr=0.1"`."""
    return [f"{key}={toml_value(value)}" for key, value in point.items()]


def toml_value(value: Any) -> str:
    """Format a value as TOML on one line."""
    if isinstance(value, Mapping):
        entries = (f"{json.dumps(key)} = {toml_value(inner)}" for key, inner in value.items())
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value)


def _dimension(text: str) -> tuple[str, Dimension]:
    key, _, written = text.partition("=")
    key = key.strip()
    try:
        value = tomllib.loads(f"value = {written}")["value"]
    except (ValueError, RecursionError) as error:
        raise _error(f"cannot read {text!r}", f"KEY=[VALUE, ...] ({error})", text) from None
    if not key:
        raise _error(f"cannot read {text!r}", "KEY=[VALUE, ...]", text)
    if isinstance(value, list):
        distinct = {json.dumps(entry, sort_keys=True, default=str) for entry in value}
        if not value or len(distinct) < len(value):
            raise _error(f"cannot vary {text!r}", "at least one value, without duplicates", text)
        return key, tuple(value)
    if isinstance(value, dict):
        return key, _range(text, value)
    raise _error(f"{key!r} has a single value", "a list of values, or a range", text)


def _range(text: str, table: Mapping[str, Any]) -> Range:
    low: Any = table.get("low")
    high: Any = table.get("high")
    log = table.get("log", False)
    known = table.keys() <= {"low", "high", "log"} and isinstance(log, bool)
    numbers = type(low) in (int, float) and type(high) in (int, float)
    if known and numbers and low < high and (low > 0 or not log) and math.isfinite(high - low):
        return Range(low, high, log)
    raise _error(
        f"cannot read the range {text!r}",
        "numbers low and high with low < high, and with log = true 0 < low",
        text,
    )


def _error(problem: str, expected: str, got: str) -> ExperimentError:
    return ExperimentError(problem, expected=expected, got=got, fix=_EXAMPLES)


# A proposal is a function of the space, its number and the results so far, and is saved before its
# first run begins; so resuming needs no other state. Optuna's study is rebuilt from the results for
# each proposal.


def _proposed(
    space: Space,
    seed: int,
    directions: Sequence[str],
    tried: Sequence[Point],
    values: Mapping[int, Sequence[float]],
    attempt: int,
) -> Point:
    """Propose a setting by Optuna's TPE sampler, which sees unfinished settings as running.

    Args:
        space: the search space.
        seed: seed of the sampler.
        directions: `minimize` or `maximize` for each aim.
        tried: the settings so far.
        values: aims of finished settings by number; NaN for failed runs.
        attempt: number of the attempt, which changes the proposal.

    Raises:
        ExperimentError: Optuna is not installed.
    """
    optuna = _installed()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    drawn_seed = int(seed_sequence(seed, "optuna", len(tried), attempt).generate_state(1)[0])
    sampler = optuna.samplers.TPESampler(seed=drawn_seed, constant_liar=True)
    study = optuna.create_study(sampler=sampler, directions=directions)
    distributions = {key: _distribution(dimension) for key, dimension in space.items()}
    states = optuna.trial.TrialState
    for number, point in enumerate(tried):
        aims = values.get(number)
        failed = aims is not None and any(map(math.isnan, aims))
        state = states.RUNNING if aims is None else states.FAIL if failed else states.COMPLETE
        trial = optuna.trial.create_trial(
            state=state,
            params={key: _index(space[key], value) for key, value in point.items()},
            distributions=distributions,
            values=list(aims) if aims is not None and not failed else None,
        )
        study.add_trial(trial)
    asked = study.ask(distributions).params
    return {key: _value(space[key], parameter) for key, parameter in asked.items()}


def _installed() -> Any:
    """Import Optuna.

    Raises:
        ExperimentError: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise ExperimentError(
            "--optimise needs Optuna",
            fix="pip install 'fedrec[tune]', or --trials N --choose METRIC for random settings",
        ) from None
    return optuna


def _distribution(dimension: Dimension) -> Any:
    distributions = _installed().distributions
    if not isinstance(dimension, Range):  # by index, because values may be lists and tables
        return distributions.CategoricalDistribution(range(len(dimension)))
    cls = distributions.IntDistribution if dimension.whole else distributions.FloatDistribution
    return cls(dimension.low, dimension.high, log=dimension.log)


def _index(dimension: Dimension, value: Any) -> Any:
    """Convert a value to Optuna's: the index in a list, or the number."""
    return value if isinstance(dimension, Range) else dimension.index(value)


def _value(dimension: Dimension, parameter: Any) -> Any:
    """Convert Optuna's parameter to a value."""
    if isinstance(dimension, Range):
        return dimension.rounded(parameter)
    return dimension[parameter]


# Private choice of settings: only the best of a random number of trials, each with a randomly drawn
# setting, is published (`fedrec.privacy.accounting.accountant`).
#
# All trials have one population: the data, the split and the threshold of positive rows are the
# same for all settings, and the split has its own seed. All other randomness of a trial follows
# from a seed that does not reveal the trial's number, because the number is not published.
#
# The guarantee is for training users. Validation users must not train: their rows give scores
# without noise, and no epsilon covers them.

_OF_TRAINING_USERS = "popularity"


def _choice_stream(experiment: Experiment, name: str, *address: int) -> np.random.Generator:
    """Random generator of a private choice, which must be secret. In mode `secure` it is seeded by
    the operating system, so that neither a published seed nor initial values derived from it
    reveal the trial's number; in mode `reproducible` it follows from the experiment's seed, so
    that a simulation can be repeated."""
    if experiment.hides_cohorts:
        return np.random.default_rng(secrets.randbits(256))
    return stream(experiment.seed, f"private-choice/{name}", *address)


@dataclass(frozen=True)
class ChoiceCost:
    """Cost of a private choice, known before the first run.

    Attributes:
        epsilon: epsilon of all published results.
        delta: delta of this epsilon.
        once: epsilon of one trial by the same accountant.
        choice: distribution of the number of trials.
        aim: the metric.
    """

    epsilon: float
    delta: float
    once: float
    choice: RandomTrials
    aim: str

    def lines(self) -> list[str]:
        """Sentences on published results, their cost, covered users and secret files."""
        return [
            f"Published: the best setting, its model and its {self.aim}. Together they cost"
            f" training users epsilon {self.epsilon:.4g} at delta {self.delta:g} for any number"
            f" of trials ({self.choice.law}, {self.choice.mean:g} on average); a single trial"
            f" costs {self.once:.4g} by the same accountant.",
            "Validation users do not train: their rows choose the setting without noise, and no"
            " epsilon covers them.",
            "All other results of the sweep must stay private: the number of trials, the number"
            " of the chosen trial, the tables of runs and settings, and the sweep's runs.",
        ]


def _cost_of(
    experiment: Mapping[str, Any], space: Space, choice: RandomTrials, aim: str
) -> ChoiceCost:
    """Compute the cost of a private choice among the settings of a grid.

    Args:
        experiment: table of the experiment that is varied.
        space: lists of values; the most expensive setting counts at each Rényi order.
        choice: distribution of the number of trials.
        aim: the metric.

    Raises:
        ExperimentError: a setting is not private, settings have different data, the space has a
            range, or training users are scored.
    """
    settings = [load(experiment, overrides(point)) for point in grid(space)]
    _check_same_data(settings)
    population = Population.of(settings[0])
    trained = population.partition.training_clients
    validated = population.interactions.users[population.partition.validation_rows]
    curves = []
    deltas = []
    for setting in settings:
        _check_private(setting, aim, covered=bool(np.isin(validated, trained).any()))
        plans = PhasePlans.before_a_run(setting, trained)
        curves.append(rdp_total(dict(plans.planned().releases)))
        deltas.append(plans.delta)
    curve = np.max(curves, axis=0)
    delta = max(deltas)
    epsilon = choice.epsilon(curve[:-1], delta)
    return ChoiceCost(epsilon, delta, float(epsilon_of(curve, delta)), choice, aim)


def _check_same_data(settings: Sequence[Experiment]) -> None:
    """Check that all settings have the same clients and scored users.

    Raises:
        ExperimentError: they differ.
    """
    keys = set(DataSettings.model_fields) - {"seed"}
    tables = [setting.model_dump(mode="json", include=keys) for setting in settings]
    for table, setting in zip(tables, settings, strict=True):
        table["evaluation.final_users"] = setting.evaluation.final_users
    differing = sorted(key for key in tables[0] if any(t[key] != tables[0][key] for t in tables))
    if differing:
        names = ", ".join(differing).replace("_", "-")
        raise ExperimentError(
            f"the settings of a private choice have different data ({names})",
            expected="the same clients, held-out rows and scored users in all trials",
            fix="run one sweep per value, and add up the costs of their choices",
        )


def _check_private(setting: Experiment, aim: str, *, covered: bool) -> None:
    """Check that a setting has an epsilon for a private choice; validation users train if
    `covered`."""
    privacy = setting.privacy
    rules = {
        "a table [privacy] with noise": privacy is not None and privacy.noise_multiplier != 0,
        "placement = 'central' or 'distributed'": privacy is None or privacy.placement != "local",
        "validation users who do not train, as with split.validation-role = 'held-out'": (
            not covered
        ),
        "a metric of the validation users' own rows, not of training users": (
            not aim.startswith(_OF_TRAINING_USERS)
        ),
    }
    for expected, holds in rules.items():
        if not holds:
            raise ExperimentError(
                "this choice cannot be made private",
                expected=expected,
                got=f"{setting.name}, chosen by {aim}",
                fix="change this setting, or leave out --private-choice",
            )


# The plan of a sweep.

_TRIALS = 20  # default number of settings that `optimise` tries
_SEEDS = 2**53  # integers that all JSON readers represent exactly
Method: TypeAlias = Literal["grid", "random", "optimise", "private"]


class SweepPlan(BaseModel, frozen=True, extra="forbid"):
    """Plan of a sweep.

    Attributes:
        experiment: table of the experiment that is varied, without defaults.
        vary: varied keys and values, see `_space_of`; empty if only the seed varies.
        seeds: seeds of each setting's runs; under private choice one per trial.
        method: how settings are found.
        trials: number of settings.
        aims: metrics for selection, such as `hits@10` or `epsilon`; none: no setting is selected.
        private: private choice of one setting; None: not private.
    """

    experiment: dict[str, Any]
    vary: tuple[str, ...]
    seeds: tuple[int, ...]
    method: Method
    trials: int
    aims: tuple[str, ...] = ()
    private: RandomTrials | None = None

    @cached_property
    def space(self) -> Space:
        """Search space of the sweep."""
        return _space_of(self.vary)

    @cached_property
    def cost(self) -> ChoiceCost | None:
        """Cost of a private choice; None for other sweeps.

        Raises:
            ExperimentError: see `_cost_of`.
        """
        if self.private is None:
            return None
        return _cost_of(self.experiment, self.space, self.private, self.aims[0])

    @property
    def runs_each(self) -> int:
        """Number of runs of each setting."""
        return len(self.seeds) if self.private is None else 1

    def at(self, point: Point, seed: int) -> Experiment:
        """Experiment of a run.

        Raises:
            ExperimentError: the settings are inconsistent, or would be selected on test rows.
        """
        experiment = load(self.experiment, [*overrides(point), f"seed={seed}"])
        if self.aims and experiment.evaluation.held_out == "test":
            raise ExperimentError(
                "settings cannot be selected on test users",
                expected="evaluation.held-out = 'validation' in a sweep with aims",
                got="'test', on which the selected setting is evaluated later",
                fix="--set evaluation.held-out=validation, with validation rows in the split, such "
                "as --set split.validation-users=0.1; where validation users train, "
                "--set split.validation-role=held-out",
            )
        return experiment

    def lower_is_better(self, aim: str) -> bool:
        """True if smaller values of an aim are better."""
        return lower_is_better(aim, load(self.experiment).evaluation)

    def next_point(
        self, tried: Sequence[Point], values: Callable[[], Mapping[int, Sequence[float]]]
    ) -> Point | None:
        """Next setting to try; None if there are no more.

        Args:
            tried: the settings so far.
            values: returns the aims of ended settings by number; NaN for failed runs.

        Raises:
            ExperimentError: Optuna is required but not installed.
        """
        number = len(tried)
        seed = self.seeds[0] if self.seeds else 0
        if number >= self.trials:
            return None
        if self.method == "grid":
            return grid(self.space)[number]
        if self.private is not None:  # uniformly, whatever was tried before
            points = grid(self.space)
            draws = _choice_stream(load(self.experiment), "setting", number)
            return points[int(draws.integers(len(points)))]
        if self.method == "random":
            propose = partial(_drawn, self.space, seed, number)
        else:
            signs = ["minimize" if self.lower_is_better(aim) else "maximize" for aim in self.aims]
            propose = partial(_proposed, self.space, seed, signs, tried, values())
        texts = {toml_value(point) for point in tried}
        points = map(propose, range(_ATTEMPTS))  # new ones are few in a small space
        return next((point for point in points if toml_value(point) not in texts), None)


def plan_of(
    source: str | Path | Mapping[str, Any],
    fixed: Iterable[str] = (),
    vary: Iterable[str] = (),
    *,
    seeds: int = 1,
    trials: int | None = None,
    optimise: Sequence[str] = (),
    choose: Sequence[str] = (),
    private: Law | None = None,
) -> SweepPlan:
    """Plan a sweep from command-line options; all settings of a grid are checked before the first
    run. A private choice has a random number of trials, one split, and a seed per trial.

    Args:
        source: a TOML file, the name of a shipped experiment, or a table.
        fixed: overrides of all runs.
        vary: varied keys and values, see `_space_of`.
        seeds: runs per setting, with consecutive seeds from the experiment's.
        trials: number of random settings; default: the grid, or 20 with `optimise`.
        optimise: at most two aims for Optuna's proposals.
        choose: aims for selecting from a grid or from random settings afterwards.
        private: distribution of the number of trials (mean: `trials`) of a private choice.

    Raises:
        ExperimentError: options are inconsistent, or settings would be selected on test users.
    """
    if optimise:
        _installed()
    table = read(source, fixed)
    space = _space_of(vary := tuple(vary))
    base = load(table)
    aims = tuple(optimise or choose)
    count = 1 if trials is None else trials
    varied = bool(space) or not (optimise or trials)
    one_each = seeds == 1 and len(choose) == 1
    rules = (
        (1 <= seeds <= _MOST, f"invalid number of seeds, {seeds}", f"--seeds 3, 1 to {_MOST}"),
        (1 <= count <= _MOST, f"invalid number of trials, {trials}", f"--trials 20, 1 to {_MOST}"),
        (not (optimise and choose), "--optimise and --choose exclude each other", "leave one out"),
        (len(aims) <= 2, f"{len(aims)} metrics, more than two", "leave some out"),
        (varied, "no keys to vary", "--vary KEY=[..] or KEY={low=.., high=..}"),
        (
            private is None or one_each,
            "a private choice needs one metric and one run per trial",
            "--choose hits@10 without --seeds (they are drawn); more trials: --trials",
        ),
    )
    for holds, problem, fix in rules:
        if not holds:
            raise ExperimentError(problem, fix=fix)
    table = {**table, "engine": {"name": "serial", **table.get("engine", {})}}
    method: Method = "optimise" if optimise else "random" if trials else "grid"
    choice = None
    chosen_seeds = range(base.seed, base.seed + seeds)
    if private is not None:
        method = "private"
        choice = RandomTrials(private, trials or _TRIALS)
        trials = choice.draw(_choice_stream(base, "trials"))
        chosen_seeds = _choice_stream(base, "seeds").integers(_SEEDS, size=trials).tolist()
        table["split-seed"] = base.seed_of_split
    points = grid(space) if method in ("grid", "private") else [{}]
    plan = SweepPlan(
        experiment=table,
        vary=vary,
        seeds=tuple(chosen_seeds),
        method=method,
        trials=len(points) if method == "grid" else _TRIALS if trials is None else trials,
        aims=aims,
        private=choice,
    )
    for point in points:
        plan.at(point, base.seed)  # raises errors
    return plan
