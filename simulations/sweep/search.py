# SPDX-License-Identifier: Apache-2.0
"""Search strategies: the next setting of a grid, a random one, or Optuna's proposal.

A proposal is a function of the sweep, its number and the results so far, and is saved before its
first run begins; so no other state is needed after an interruption. Optuna's study is rebuilt from
the results for each proposal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from fedrec.rng import seed_sequence
from simulations.sweep.plan import SweepPlan
from simulations.sweep.private import drawn_setting
from simulations.sweep.space import Choice, Point, Range, drawn, grid

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution

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
    proposals = (_proposed(plan, tried, values, attempt) for attempt in range(_ATTEMPTS))
    known = {_text(point) for point in tried}
    return next((point for point in proposals if _text(point) not in known), None)


def _proposed(
    plan: SweepPlan, tried: Sequence[Point], values: Mapping[int, Values], attempt: int
) -> Point:
    seed = plan.seeds[0]
    if plan.method == "random":
        return drawn(plan.space, seed, len(tried), attempt)
    own = int(seed_sequence(seed, "optuna", len(tried), attempt).generate_state(1)[0])
    distributions = {key: _distribution(dimension) for key, dimension in plan.space.items()}
    study = _study(plan, tried, values, own, distributions)
    return _point(plan, study.ask(distributions).params)


def _study(
    plan: SweepPlan,
    tried: Sequence[Point],
    values: Mapping[int, Values],
    seed: int,
    distributions: dict[str, BaseDistribution],
) -> Study:
    optuna = installed()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    directions = ["minimize" if plan.lower_is_better(aim) else "maximize" for aim in plan.aims]
    sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    study = optuna.create_study(sampler=sampler, directions=directions)
    states = optuna.trial.TrialState
    for number, point in enumerate(tried):
        own = values.get(number)
        failed = own is not None and any(math.isnan(value) for value in own)
        state = states.RUNNING if own is None else states.FAIL if failed else states.COMPLETE
        study.add_trial(
            optuna.trial.create_trial(
                state=state,
                params=_parameters(plan, point),
                distributions=distributions,
                values=list(own) if own is not None and not failed else None,
            )
        )
    return study


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


def _distribution(dimension: Choice | Range) -> BaseDistribution:
    distributions = installed().distributions
    if isinstance(dimension, Choice):  # by place, as values may be lists and tables
        return distributions.CategoricalDistribution(range(len(dimension.values)))
    cls = distributions.IntDistribution if dimension.whole else distributions.FloatDistribution
    return cls(dimension.low, dimension.high, log=dimension.log)


def _parameters(plan: SweepPlan, point: Point) -> dict[str, Any]:
    """A point as Optuna has it."""
    return {
        key: dimension.values.index(point[key]) if isinstance(dimension, Choice) else point[key]
        for key, dimension in plan.space.items()
    }


def _point(plan: SweepPlan, parameters: Mapping[str, Any]) -> Point:
    return {
        key: dimension.values[parameters[key]]
        if isinstance(dimension, Choice)
        else dimension.rounded(parameters[key])
        for key, dimension in plan.space.items()
    }


def _text(point: Point) -> str:
    return json.dumps(point, sort_keys=True)
