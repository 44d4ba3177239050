# SPDX-License-Identifier: Apache-2.0
"""Names that tell runs apart: the experiment's name, and the settings in which runs of that name
differ, such as `mf-ml1m (server-lr=0.01)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedrec.attacks.leaky_negatives import marked
from fedrec.errors import ExperimentError
from fedrec.prefixes import flat
from fedrec.runs.result import Result

_APART = ("name", "seed", "title", "callbacks", "checkpoint", "engine")
_MOST_SETTINGS = 3  # in a name; runs that differ in more are told apart by their folders


class Run(NamedTuple):
    """A run among others.

    Attributes:
        name: of its system; runs that differ in their seed alone have the same.
        label: name and seed.
        result: what came out.
    """

    name: str
    label: str
    result: Result


def named(results: Sequence[Result]) -> list[Run]:
    """Runs with their names."""
    return [
        Run(name, f"{name}, seed {result.experiment.seed}", result)
        for name, result in zip(system_names(results), results, strict=True)
    ]


def system_names(results: Sequence[Result]) -> list[str]:
    """A name per run: the experiment's name, marked if its negatives leak, and in brackets the
    settings in which runs of that name differ. Runs that differ only in their seed have the same
    name; repetitions under one seed are told apart by their folders."""
    settings = [dict(flat(_decisive(result))) for result in results]
    names = []
    for result, own in zip(results, settings, strict=True):
        group = [
            (other, theirs)
            for other, theirs in zip(results, settings, strict=True)
            if marked(other.experiment) == marked(result.experiment)
        ]
        same = [other for other, theirs in group if theirs == own]
        twice = sum(other.experiment.seed == result.experiment.seed for other in same) > 1
        differing = _differing([theirs for _, theirs in group])
        if twice or len(differing) > _MOST_SETTINGS:
            said = [(result if twice else same[0]).folder.name]
        else:
            said = [f"{_short(key, differing)}={own.get(key, 'none')}" for key in differing]
        names.append(marked(result.experiment) + (f" ({', '.join(said)})" if said else ""))
    return names


def settings_table(result: Result) -> dict[str, Any]:
    """The experiment as a table, with the defaults of settings that are newer than the run."""
    try:
        return result.experiment.resolve().table()
    except ExperimentError:  # a component that is not installed here, or no longer has a setting
        return result.experiment.table()


def _decisive(result: Result) -> dict[str, Any]:
    """The settings on which results depend."""
    return {key: value for key, value in settings_table(result).items() if key not in _APART}


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys whose values are not all the same."""
    keys = dict.fromkeys(key for own in settings for key in own)
    absent = object()
    return [
        key
        for key in keys
        if any(own.get(key, absent) != settings[0].get(key, absent) for own in settings)
    ]


def _short(key: str, among: Sequence[str]) -> str:
    """The last word of a key, where it tells the key apart."""
    last = key.rpartition(".")[2]
    return last if [other.rpartition(".")[2] for other in among].count(last) == 1 else key
