# SPDX-License-Identifier: Apache-2.0
"""Search space of a sweep, and its settings: the grid, random ones, or Optuna's proposals."""

from __future__ import annotations

import itertools
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from fedrec.errors import ExperimentError
from fedrec.rng import seed_sequence, stream

MOST = 10_000  # settings of a grid
_EXAMPLES = (
    "--vary 'strategy.server-lr=[0.1, 0.5]', or '{low=0.01, high=1.0, log=true}' for a range"
)
_POINT = re.compile(r"(?<![\w.])\.(?=\d)")
_RESERVED = {"seed": "--seeds N", "evaluation.held-out": "--set evaluation.held-out=validation"}
_ATTEMPTS = 100  # to find a setting that was not tried before


@dataclass(frozen=True)
class Choice:
    """Dimension with a list of values.

    Attributes:
        values: at least one value, all distinct.
    """

    values: tuple[Any, ...]

    def draw(self, generator: np.random.Generator) -> Any:
        """Draw one of the values uniformly."""
        return self.values[int(generator.integers(len(self.values)))]


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


Space: TypeAlias = dict[str, Choice | Range]
Point: TypeAlias = dict[str, Any]
"""A value for each key of a space."""


def space_of(texts: Iterable[str]) -> Space:
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
    choices = [dimension.values for dimension in space.values() if isinstance(dimension, Choice)]
    size = math.prod(map(len, choices))
    if size > MOST:
        raise _error(
            f"the grid has {size} settings", f"at most {MOST}", "fewer values, or --trials"
        )
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*choices)]


def drawn(space: Space, seed: int, number: int, attempt: int = 0) -> Point:
    """Draw the point of a trial, as a function of seed, number and attempt."""
    generator = stream(seed, "sweep", number, attempt)
    return {key: dimension.draw(generator) for key, dimension in space.items()}


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


def _dimension(text: str) -> tuple[str, Choice | Range]:
    key, equals, written = text.partition("=")
    key = key.strip()
    try:
        value = _parsed(written)
    except (ValueError, RecursionError) as error:
        raise _error(f"cannot read {text!r}", f"KEY=[VALUE, ...] ({error})", text) from None
    if not equals or not key:
        raise _error(f"cannot read {text!r}", "KEY=[VALUE, ...]", text)
    if isinstance(value, list):
        distinct = {json.dumps(entry, sort_keys=True, default=str) for entry in value}
        if not value or len(distinct) < len(value):
            raise _error(f"cannot vary {text!r}", "at least one value, without duplicates", text)
        return key, Choice(tuple(value))
    if isinstance(value, dict):
        return key, _range(text, value)
    raise _error(f"{key!r} has a single value", "a list of values, or a range", text)


def _parsed(written: str) -> Any:
    """Parse a TOML value, in which numbers may begin with a point."""
    try:
        return tomllib.loads(f"value = {written}")["value"]
    except tomllib.TOMLDecodeError:
        return tomllib.loads(f"value = {_POINT.sub('0.', written)}")["value"]


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


def unlike(tried: Sequence[Point], propose: Any) -> Point | None:
    """First new setting of `propose(attempt)`; None after many attempts."""
    texts = {toml_value(point) for point in tried}
    points = map(propose, range(_ATTEMPTS))
    return next((point for point in points if toml_value(point) not in texts), None)


def proposed(
    space: Space,
    seed: int,
    directions: Sequence[str],
    tried: Sequence[Point],
    values: Mapping[int, Sequence[float]],
    attempt: int = 0,
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
    optuna = installed()
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


def installed() -> Any:
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


def _distribution(dimension: Choice | Range) -> Any:
    distributions = installed().distributions
    if isinstance(dimension, Choice):  # by index, because values may be lists and tables
        return distributions.CategoricalDistribution(range(len(dimension.values)))
    cls = distributions.IntDistribution if dimension.whole else distributions.FloatDistribution
    return cls(dimension.low, dimension.high, log=dimension.log)


def _index(dimension: Choice | Range, value: Any) -> Any:
    """Convert a value to Optuna's: the index of a choice, or the number."""
    return dimension.values.index(value) if isinstance(dimension, Choice) else value


def _value(dimension: Choice | Range, parameter: Any) -> Any:
    """Convert Optuna's parameter to a value."""
    if isinstance(dimension, Choice):
        return dimension.values[parameter]
    return dimension.rounded(parameter)
