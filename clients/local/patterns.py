# SPDX-License-Identifier: Apache-2.0
"""Settings for parameters by patterns of their names, such as `layer*`."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping

from fedrec.errors import ExperimentError


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name matches one of some patterns."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def refuse_idle(names: Iterable[str], patterns: Iterable[str], key: str) -> None:
    """Refuse a pattern that no name matches.

    Raises:
        ExperimentError: there is one; names the setting, `step.KEY`.
    """
    names = list(names)
    for pattern in patterns:
        if not any(fits(name, [pattern]) for name in names):
            raise ExperimentError(
                f"no parameter fits step.{key}",
                expected=f"a pattern of {', '.join(names)}",
                got=repr(pattern),
                fix="correct the pattern, or leave it out",
            )


def rates_by_name(names: Iterable[str], rates: Mapping[str, float]) -> dict[str, float]:
    """Factor on the learning rate of each parameter; 1 if no pattern matches.

    Args:
        names: of the parameters.
        rates: factors by pattern of names.

    Raises:
        ExperimentError: a pattern fits no name, or a name several patterns, as tables have no
            order.
    """
    names = list(names)
    refuse_idle(names, rates, "rates")
    factors = {}
    for name in names:
        fitting = [pattern for pattern in rates if fits(name, [pattern])]
        if len(fitting) > 1:
            raise ExperimentError(
                f"parameter {name!r} fits several patterns of step.rates",
                expected="one of them",
                got=" and ".join(map(repr, fitting)),
                fix="narrow one, for example `layer[1-4].*`",
            )
        factors[name] = rates[fitting[0]] if fitting else 1.0
    return factors
