# SPDX-License-Identifier: Apache-2.0
"""Sweeps: their definition, and search strategies."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from fedrec.errors import ExperimentError
from fedrec.evaluation.tables import lower_is_better
from fedrec.experiment.loading import load, read
from fedrec.experiment.schema import Experiment
from fedrec.privacy.accounting.accountant import Law
from fedrec.rng import seed_sequence
from fedrec.runs.folder import FORMAT
from simulations.studies.private import PrivateChoice, check_same_data, drawn_setting
from simulations.studies.space import (
    MOST,
    Choice,
    Point,
    Range,
    Space,
    drawn,
    from_record,
    grid,
    overrides,
    space_of,
    to_record,
)

# Definition of a sweep: an experiment, the varied keys, seeds, and the metrics for selection.
# Settings are never selected on test users: a sweep with aims is rejected unless it evaluates
# validation rows.

Method: TypeAlias = Literal["grid", "random", "optimise", "private"]
TRIALS = 20
"""Default number of settings that `optimise` tries."""


@dataclass(frozen=True)
class SweepPlan:
    """A sweep.

    Attributes:
        experiment: table of the experiment that is varied, without defaults.
        space: what is varied; empty where only the seed is.
        seeds: of the runs of each setting; under private choice one for each trial.
        method: how settings are found.
        trials: number of settings.
        aims: metrics for selection, such as `hits@10` or `epsilon`; none: no setting is selected.
        private: how one setting is chosen privately; None: not privately.
    """

    experiment: dict[str, Any]
    space: Space
    seeds: tuple[int, ...]
    method: Method
    trials: int
    aims: tuple[str, ...] = ()
    private: PrivateChoice | None = None

    def seeds_of(self, trial: int) -> tuple[int, ...]:
        """The seeds of the runs of a trial, from 0; under private choice each trial has its own, as
        its noise must be."""
        return self.seeds if self.private is None else (self.seeds[trial],)

    @property
    def runs_each(self) -> int:
        """Number of runs of each setting."""
        return len(self.seeds) if self.private is None else 1

    def at(self, point: Point, seed: int) -> Experiment:
        """The experiment of a run.

        Raises:
            ExperimentError: the settings are inconsistent, or a setting is to be chosen by test
                rows.
        """
        experiment = load(self.experiment, [*overrides(point), f"seed={seed}"])
        if self.aims and experiment.evaluation.held_out == "test":
            raise ExperimentError(
                "a setting would be selected by test users",
                expected="evaluation.held-out = 'validation' in a sweep that chooses",
                got="'test', on which the selected setting could then no longer be evaluated",
                fix="--set evaluation.held-out=validation, with validation rows in the split, such "
                "as --set split.validation-users=0.1; where validation users train, "
                "--set split.validation-role=held-out",
            )
        return experiment

    def lower_is_better(self, aim: str) -> bool:
        """True where the smaller value of an aim is the better one."""
        return lower_is_better(aim, load(self.experiment).evaluation)

    def leaks(self, point: Point) -> bool:
        """True where held-out items never are negatives that clients learn from."""
        split = point.get("split", self.experiment.get("split", {}))
        inside = split.get("leaky-negatives", False) if isinstance(split, dict) else False
        return bool(point.get("split.leaky-negatives", inside))

    def record(self) -> dict[str, Any]:
        """The sweep as JSON; `of_record` is the inverse."""
        return {
            "format": FORMAT,
            "experiment": self.experiment,
            "vary": to_record(self.space),
            "seeds": list(self.seeds),
            "method": self.method,
            "trials": self.trials,
            "aims": list(self.aims),
            **({} if self.private is None else {"private": asdict(self.private)}),
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> SweepPlan:
        """The sweep that `record` wrote."""
        return cls(
            experiment=dict(record["experiment"]),
            space=from_record(record["vary"]),
            seeds=tuple(record["seeds"]),
            method=record["method"],
            trials=int(record["trials"]),
            aims=tuple(record["aims"]),
            private=PrivateChoice(**record["private"]) if "private" in record else None,
        )


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
    score_noise: float = 0.0,
) -> SweepPlan:
    """A sweep from the options of the command line; all settings of a grid are checked before
    anything runs.

    Args:
        source: a TOML file, the name of a shipped experiment, or a table.
        fixed: overrides that all runs have.
        vary: what is varied, see `space_of`.
        seeds: runs of each setting, with the experiment's seed and those that follow it.
        trials: number of settings that are drawn; default: the grid, or 20 with `optimise`.
        optimise: aims by which the next settings are proposed, at most two of them.
        choose: aims by which a setting is chosen afterwards, from a grid or from random settings.
        private: law of a random number of trials, of mean `trials`, for a private choice.
        score_noise: standard deviation of the noise on a trial's score, for a private choice.

    Raises:
        ExperimentError: something does not fit together, or a setting would be chosen by test
        users.
    """
    table = read(source, fixed)
    space = space_of(vary)
    base = load(table)
    _check_options(space, seeds, trials, optimise, choose)
    if "name" not in table.get("engine", {}):
        table = {**table, "engine": {**table.get("engine", {}), "name": "serial"}}
    if private is not None:
        if seeds != 1:
            raise _error(
                "several seeds with --private-choice",
                "one run for each trial, whose seed is drawn",
                f"--seeds {seeds}",
                "leave --seeds out; more trials: --trials",
            )
        return _private_plan(
            table, base, space, PrivateChoice(private, trials or TRIALS, score_noise), choose
        )
    method: Method = "optimise" if optimise else "random" if trials else "grid"
    points = grid(space) if method == "grid" else []
    plan = SweepPlan(
        experiment=table,
        space=space,
        seeds=tuple(range(base.seed, base.seed + seeds)),
        method=method,
        trials=len(points) if method == "grid" else trials or TRIALS,
        aims=tuple(optimise or choose),
    )
    for point in points or [{}]:
        plan.at(point, plan.seeds[0])
    return plan


def _private_plan(
    table: dict[str, Any],
    base: Experiment,
    space: Space,
    choice: PrivateChoice,
    aims: Sequence[str],
) -> SweepPlan:
    """A sweep of a random number of trials with one split."""
    if len(aims) != 1:
        aim = f"{len(aims)} metrics"
        raise _error("a private choice has one aim", "--choose METRIC", aim, "--choose hits@10")
    trials = choice.number.draw(choice.draws(base, "trials"))
    seeds = choice.seeds(base, trials)
    others = {key: value for key, value in table.items() if key != "split_seed"}
    table = {**others, "split-seed": base.seed_of_split}
    plan = SweepPlan(table, space, seeds, "private", trials, tuple(aims), choice)
    check_same_data([plan.at(point, base.seed) for point in grid(space)])
    return plan


def _check_options(
    space: Space,
    seeds: int,
    trials: int | None,
    optimise: Sequence[str],
    choose: Sequence[str],
) -> None:
    for what, count, fix in (("seeds", seeds, "--seeds 3"), ("trials", trials, "--trials 20")):
        if count is not None and not 1 <= count <= MOST:
            raise _error(f"wrong number of {what}", f"1 to {MOST}", str(count), fix)
    aims = ", ".join(optimise or choose)
    if optimise and choose:
        problem = "both --optimise and --choose"
        raise _error(problem, "--optimise or --choose", "both", "leave --choose out")
    if len(optimise or choose) > 2:
        raise _error("too many metrics", "one metric, or two", aims, "leave some out")
    if not space and (optimise or trials is not None):
        fix = "--vary KEY={low=.., high=..}" if trials is None else "--seeds 3 varies seeds"
        raise _error("nothing is varied", "--vary KEY=...", "none", fix)


def _error(problem: str, expected: str, got: str, fix: str) -> ExperimentError:
    return ExperimentError(problem, expected=expected, got=got, fix=fix)


# Search strategies: the next setting of a grid, a random one, or Optuna's proposal.
#
# A proposal is a function of the sweep, its number and the results so far, and is saved before its
# first run begins; so no other state is needed after an interruption. Optuna's study is rebuilt
# from the results for each proposal.

_ATTEMPTS = 100
Values = Sequence[float]
"""Values of a setting's aims; NaN where it failed."""


def next_point(
    plan: SweepPlan, tried: Sequence[Point], values: Mapping[int, Values]
) -> Point | None:
    """The setting to try next; None when there is none left.

    Args:
        plan: the sweep.
        tried: the settings so far.
        values: of the aims, of the settings that are done, by number.

    Raises:
        ExperimentError: Optuna is asked for and not installed.
    """
    number = len(tried)
    if number >= plan.trials:
        return None
    if plan.method == "grid":
        return grid(plan.space)[number]
    if plan.private is not None:
        return drawn_setting(plan.private, load(plan.experiment), plan.space, number)
    texts = set(map(_text, tried))
    for attempt in range(_ATTEMPTS):
        if plan.method == "random":
            point = drawn(plan.space, plan.seeds[0], number, attempt)
        else:
            point = _proposed(plan, tried, values, attempt)
        if _text(point) not in texts:
            return point
    return None


def _proposed(
    plan: SweepPlan, tried: Sequence[Point], values: Mapping[int, Values], attempt: int
) -> Point:
    """A proposal of Optuna, which sees settings that are not done as running."""
    optuna = installed()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    address = (plan.seeds[0], "optuna", len(tried), attempt)
    seed = int(seed_sequence(*address).generate_state(1)[0])
    directions = ["minimize" if plan.lower_is_better(aim) else "maximize" for aim in plan.aims]
    sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    study = optuna.create_study(sampler=sampler, directions=directions)
    distributions = {key: _distribution(dimension) for key, dimension in plan.space.items()}
    states = optuna.trial.TrialState
    for number, point in enumerate(tried):
        aims = values.get(number)
        failed = aims is not None and any(map(math.isnan, aims))
        state = states.RUNNING if aims is None else states.FAIL if failed else states.COMPLETE
        trial = optuna.trial.create_trial(
            state=state,
            params={key: _index(plan.space[key], value) for key, value in point.items()},
            distributions=distributions,
            values=list(aims) if aims is not None and not failed else None,
        )
        study.add_trial(trial)
    parameters = study.ask(distributions).params
    return {
        key: dimension.values[parameters[key]]
        if isinstance(dimension, Choice)
        else dimension.rounded(parameters[key])
        for key, dimension in plan.space.items()
    }


def installed() -> Any:
    """The module optuna.

    Raises:
        ExperimentError: it is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise ExperimentError(
            "--optimise needs Optuna",
            expected="the package optuna",
            got="it is not installed",
            fix="pip install 'fedrec[tune]', or --trials N --choose METRIC for random settings",
        ) from None
    return optuna


def _distribution(dimension: Choice | Range) -> Any:
    distributions = installed().distributions
    if isinstance(dimension, Choice):  # by index, as values may be lists and tables
        return distributions.CategoricalDistribution(range(len(dimension.values)))
    cls = distributions.IntDistribution if dimension.whole else distributions.FloatDistribution
    return cls(dimension.low, dimension.high, log=dimension.log)


def _index(dimension: Choice | Range, value: Any) -> Any:
    """A value as Optuna has it."""
    return dimension.values.index(value) if isinstance(dimension, Choice) else value


def _text(point: Point) -> str:
    return json.dumps(point, sort_keys=True)
