# SPDX-License-Identifier: Apache-2.0
"""Names of runs, and the systems of a run as rows of a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from fedrec.components.registry import BASELINE
from fedrec.components.sections import Section, resolved_section
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import marked
from fedrec.runs.folder import Result, RunFolder
from fedrec.runtime.ragged import flat

_APART = ("name", "seed", "title", "settings-tried", "callbacks", "checkpoint", "engine")
_MOST_SETTINGS = 3  # in a name; runs that differ in more are told apart by their folders
_LONGEST_VALUE = 40  # characters of a setting in a name, likewise


class Run(NamedTuple):
    """A run with its names.

    Attributes:
        name: name of its system; equal for runs that differ only in their seed.
        label: name and seed.
        result: result of the run.
    """

    name: str
    label: str
    result: Result

    @property
    def folder(self) -> RunFolder:
        """The run's folder."""
        return RunFolder(self.result.folder)

    @property
    def baseline_seconds(self) -> float | None:
        """Time of fitting and evaluating the centralised systems; None without any."""
        states = [self.folder.read_baseline(label) or {} for label in self.result.baselines]
        return sum(sum(s.get("seconds", {}).values()) for s in states) if states else None


def named(results: Sequence[Result]) -> list[Run]:
    """Name runs by system and seed."""
    return [
        Run(name, f"{name}, seed {result.experiment.seed}", result)
        for name, result in zip(system_names(results), results, strict=True)
    ]


def system_names(results: Sequence[Result]) -> list[str]:
    """Name per run: the experiment's name, marked if its negatives leak, and in brackets the
    settings in which runs of that name differ. Runs that differ only in their seed have the same
    name; repetitions under one seed are told apart by their folders."""
    runs = [
        _System(marked(result.experiment), dict(flat(_decisive(result))), result)
        for result in results
    ]
    return [_name(run, runs, repeats=True) for run in runs]


def baseline_names(results: Sequence[Result]) -> list[dict[str, str]]:
    """Names of each run's centralised systems, by label: the label, and in brackets the settings in
    which systems of that label differ, such as `dp-popularity (epsilon=5)`. Equal settings under
    one seed are one system."""
    runs = [
        {label: _System(label, _baseline(result, label), result) for label in result.baseline_users}
        for result in results
    ]
    every = [system for systems in runs for system in systems.values()]
    return [
        {label: _name(system, every, repeats=False) for label, system in systems.items()}
        for systems in runs
    ]


class _System(NamedTuple):
    """A system of a run: its name, the settings on which its results depend, and the run."""

    title: str
    settings: Mapping[str, Any]
    result: Result


def _name(system: _System, systems: Sequence[_System], *, repeats: bool) -> str:
    """Name of a system among those of its title; with `repeats`, equal settings under one seed are
    repetitions."""
    group = [other for other in systems if other.title == system.title]
    same = [other.result for other in group if other.settings == system.settings]
    seeds = [result.experiment.seed for result in same]
    repeated = repeats and seeds.count(system.result.experiment.seed) > 1
    keys = _differing([other.settings for other in group])
    values = [_text(other.settings.get(key)) for key in keys for other in group]
    if repeated or len(keys) > _MOST_SETTINGS or max(map(len, values), default=0) > _LONGEST_VALUE:
        run = system.result if repeated else same[0]
        texts = [_folder(run, [other.result for other in group])]
    else:
        texts = [f"{_short(key, keys)}={_text(system.settings.get(key))}" for key in keys]
    return system.title + (f" ({', '.join(texts)})" if texts else "")


def _text(value: Any) -> str:
    """Format a value in a name; whole numbers without decimals."""
    return "none" if value is None else str(value).removesuffix(".0")


def _folder(result: Result, others: Sequence[Result]) -> str:
    """Last part of a run's folder if unique, else the whole path."""
    name = result.folder.name
    alike = {other.folder for other in others if other.folder.name == name}
    return name if len(alike) == 1 else str(result.folder)


def settings_table(result: Result) -> dict[str, Any]:
    """Experiment as a table, with the defaults of settings newer than the run."""
    try:
        return result.experiment.resolve().table()
    except ExperimentError:  # a component that is not installed here, or no longer has a setting
        return result.experiment.table()


def _decisive(result: Result) -> dict[str, Any]:
    """Settings that determine the results of the federated system."""
    table = {key: value for key, value in settings_table(result).items() if key not in _APART}
    evaluation = {**table.get("evaluation", {})}
    evaluation.pop("baselines", None)
    return {**table, "evaluation": evaluation}


def _baseline(result: Result, label: str) -> dict[str, Any]:
    """Settings that determine the results of a centralised system, with defaults."""
    options = result.experiment.evaluation.baseline_settings().get(label, {})
    section = Section.model_validate({"name": label, **options})
    with suppress(ExperimentError):  # see `settings_table`
        section = resolved_section(BASELINE, section)
    perturbed = settings_table(result).get("perturb")
    return dict(flat({"name": section.name, **section.options, "perturb": perturbed}))


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys with different values."""
    absent = object()
    return [
        key
        for key in dict.fromkeys(key for table in settings for key in table)
        if any(table.get(key, absent) != settings[0].get(key, absent) for table in settings)
    ]


def _short(key: str, keys: Sequence[str]) -> str:
    """Last word of a key if unique among the keys, else the key."""
    last = key.rpartition(".")[2]
    return last if [other.rpartition(".")[2] for other in keys].count(last) == 1 else key


# The systems of a run as rows of a table, and their privacy.

BEFORE = "before fine-tuning"


def system_rows(result: Result) -> dict[str, dict[str, Any]]:
    """Metrics of the federated system (first, if there is one) and of the baselines, by label."""
    rows: dict[str, dict[str, Any]] = {}
    if result.experiment.federated:
        epsilon = {} if result.epsilon is None else {"epsilon": result.epsilon}
        rows[marked(result.experiment)] = {**result.metrics, **epsilon}
        if result.before_fine_tuning:
            rows[f"  {BEFORE}"] = result.before_fine_tuning
    for label, metrics in result.baselines.items():
        epsilon = _baseline_epsilon(result, label)
        rows[label] = dict(metrics) | ({} if epsilon is None else {"epsilon": epsilon})
    return rows


def _baseline_epsilon(result: Result, label: str) -> float | None:
    """Epsilon of a private centralised system, else None."""
    state = RunFolder(result.folder).read_baseline(label) or {}
    metrics = result.baselines.get(label, {})
    epsilon = state.get("privacy", {}).get("epsilon", metrics.get("epsilon"))
    return None if epsilon is None else float(epsilon)


def epsilon_of(result: Result, label: str) -> float | None:
    """Epsilon of a system in a table; None without differential privacy."""
    federated = (marked(result.experiment), f"  {BEFORE}")
    if label in federated and result.experiment.federated:
        return result.epsilon
    return _baseline_epsilon(result, label)


def is_private(result: Result, label: str) -> bool:
    """True if a row of a table has a finite epsilon."""
    epsilon = epsilon_of(result, label)
    return epsilon is not None and math.isfinite(epsilon)
