# SPDX-License-Identifier: Apache-2.0
"""Search spaces: keys of an experiment, each with a list of values or a range."""

from __future__ import annotations

import itertools
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np

from fedrec.errors import ExperimentError
from fedrec.rng import stream

MOST = 10_000  # settings of a grid
_EXAMPLES = (
    "--vary 'strategy.server-lr=[0.1, 0.5]', or '{low=0.01, high=1.0, log=true}' for a range"
)
_POINT = re.compile(r"(?<![\w.])\.(?=\d)")
_RESERVED = {"seed": "--seeds N", "evaluation.held-out": "--set evaluation.held-out=validation"}


@dataclass(frozen=True)
class Choice:
    """A list of values.

    Attributes:
        values: at least one, distinct.
    """

    values: tuple[Any, ...]

    def draw(self, generator: np.random.Generator) -> Any:
        """One of the values, uniformly."""
        return self.values[int(generator.integers(len(self.values)))]


@dataclass(frozen=True)
class Range:
    """A range of numbers, inclusive; integers if both bounds are.

    Attributes:
        low: smallest value.
        high: largest value, above `low`.
        log: draw uniformly by order of magnitude; then `low` is above 0.
    """

    low: float
    high: float
    log: bool = False

    @property
    def whole(self) -> bool:
        """True where values are integers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def draw(self, generator: np.random.Generator) -> float | int:
        """A value, uniformly on the range's scale."""
        if self.whole and not self.log:
            return int(generator.integers(int(self.low), int(self.high), endpoint=True))
        low = self.low - 0.5 * self.whole
        high = self.high + 0.5 * self.whole
        low, high = (math.log(low), math.log(high)) if self.log else (low, high)
        value = generator.uniform(low, high)
        value = math.exp(value) if self.log else float(value)
        return self.rounded(value)

    def rounded(self, value: float) -> float | int:
        """A value rounded to five significant digits, or an integer; within the range."""
        near = round(value) if self.whole else float(f"{value:.5g}")
        return min(max(near, self.low), self.high)


Space: TypeAlias = dict[str, Choice | Range]
Point: TypeAlias = dict[str, Any]
"""A value for each key of a space."""


def space_of(texts: Iterable[str]) -> Space:
    """The space of some texts such as `"strategy.server-lr=[0.1, 0.5]"`.

    Raises:
        ExperimentError: a text cannot be read, or a key is there twice or is not for a sweep.
    """
    space: Space = {}
    for text in texts:
        key, dimension = _dimension(text)
        if key in space:
            raise _error(f"{key!r} is varied twice", "distinct keys", text)
        if key in _RESERVED:
            raise _error(f"{key!r} is not varied by --vary", _RESERVED[key], text)
        space[key] = dimension
    return space


def grid(space: Space) -> list[Point]:
    """All combinations of the values of a space; the last key varies fastest.

    Raises:
        ExperimentError: there is a range among them, or more than 10,000 combinations.
    """
    for key, dimension in space.items():
        if isinstance(dimension, Range):
            raise ExperimentError(
                f"a range of {key!r} has no grid",
                expected="a list of values, or a number of trials that are drawn from the range",
                got=f"{dimension.low} to {dimension.high}",
                fix="--trials 20",
            )
    choices = [dimension.values for dimension in space.values() if isinstance(dimension, Choice)]
    size = math.prod(map(len, choices))
    if size > MOST:
        raise _error(
            f"the grid has {size} settings", f"at most {MOST}", "fewer values, or --trials"
        )
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*choices)]


def drawn(space: Space, seed: int, number: int, attempt: int = 0) -> Point:
    """The random point of a trial: a function of seed, number and attempt."""
    generator = stream(seed, "sweep", number, attempt)
    return {key: dimension.draw(generator) for key, dimension in space.items()}


def overrides(point: Mapping[str, Any]) -> list[str]:
    """A point as overrides of an experiment, such as `"strategy.server-lr=0.1"`."""
    return [f"{key}={toml_value(value)}" for key, value in point.items()]


def toml_value(value: Any) -> str:
    """A value in TOML, on one line."""
    if isinstance(value, Mapping):
        entries = (f"{json.dumps(key)} = {toml_value(inner)}" for key, inner in value.items())
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value)


def to_record(space: Space) -> dict[str, Any]:
    """A space as JSON; `from_record` is the inverse."""
    return {
        key: list(dimension.values) if isinstance(dimension, Choice) else asdict(dimension)
        for key, dimension in space.items()
    }


def from_record(record: Mapping[str, Any]) -> Space:
    """The space that `to_record` wrote."""
    return {
        key: Choice(tuple(value)) if isinstance(value, list) else Range(**value)
        for key, value in record.items()
    }


def _dimension(text: str) -> tuple[str, Choice | Range]:
    key, equals, written = text.partition("=")
    try:
        value = _value(written)
    except (ValueError, RecursionError) as error:
        raise _error(f"cannot read {text!r}", f"KEY=[VALUE, ...] ({error})", text) from None
    key = key.strip()
    if not equals or not key:
        raise _error(f"cannot read {text!r}", "KEY=[VALUE, ...]", text)
    if isinstance(value, list):
        return key, _choice(text, value)
    if isinstance(value, dict):
        return key, _range(text, value)
    raise _error(f"{key!r} has one value only", "a list of values, or a range", text)


def _value(written: str) -> Any:
    """TOML's value of a text, where numbers may begin with a point."""
    try:
        return tomllib.loads(f"value = {written}")["value"]
    except tomllib.TOMLDecodeError:
        return tomllib.loads(f"value = {_POINT.sub('0.', written)}")["value"]


def _choice(text: str, values: list[Any]) -> Choice:
    known = [json.dumps(value, sort_keys=True, default=str) for value in values]
    if not values or len(set(known)) < len(known):
        raise _error(f"cannot vary {text!r}", "at least one value, each of them once", text)
    return Choice(tuple(values))


def _range(text: str, table: Mapping[str, Any]) -> Range:
    low = table.get("low", "none")
    high = table.get("high", "none")
    log = table.get("log", False)
    numbers = all(isinstance(n, int | float) and not isinstance(n, bool) for n in (low, high))
    if not numbers or set(table) - {"low", "high", "log"} or not isinstance(log, bool):
        raise _error(
            f"cannot read the range {text!r}", "numbers low and high, and log = true or false", text
        )
    if not low < high or (log and low <= 0) or not math.isfinite(high - low):
        raise _error(f"the range {text!r} is empty", "low < high, and 0 < low with log", text)
    return Range(low, high, log)


def _error(problem: str, expected: str, got: str) -> ExperimentError:
    return ExperimentError(problem, expected=expected, got=got, fix=_EXAMPLES)
