# SPDX-License-Identifier: Apache-2.0
"""Paired comparison of runs over users: differences between systems, with intervals and tests.

Runs that differ in nothing but their seed are one system. Each user counts once: a user who was
tested under several seeds enters with the mean of its differences. With several seeds, a second
test is over seeds, each with its mean difference. Only systems that were tested on
the same users of the same data are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from fedrec.attacks.leaky_negatives import marked
from fedrec.config import did_you_mean
from fedrec.errors import ExperimentError
from fedrec.evaluation.metrics import lower_is_better, main_metric
from fedrec.report.bootstrap import bootstrap_intervals
from fedrec.report.inputs import Inputs, system_inputs
from fedrec.report.naming import baseline_names, settings_table, system_names
from fedrec.report.paired_tests import PairedTest, SeedTest, holm, paired_tests, seed_test
from fedrec.report.rows import is_private
from fedrec.runs.result import Result

_LEVELS: list = ["seed", "client"]
_SAME = ("dataset", "split", "task", "positive-above")


@dataclass(frozen=True, eq=False)
class ComparedSystem:
    """One system over all its seeds.

    Attributes:
        label: name in tables.
        by_seed: mean of the metric under each seed.
        users: metric of each user, indexed by (seed, client).
        private: whether it has a finite epsilon in every run.
        inputs: what it had to learn from, in the first run that states it; None: not stated.
    """

    label: str
    by_seed: Mapping[int, float]
    users: pd.Series
    private: bool
    inputs: Inputs | None = None


@dataclass(frozen=True, eq=False)
class Comparison:
    """All systems of some runs compared with one of them.

    Attributes:
        metric: what is compared.
        lower_is_better: whether its smaller value is the better one.
        reference: label of the system that the others are compared with.
        systems: by label.
        tests: over users, by label of each other system.
        seed_tests: over seeds, likewise.
    """

    metric: str
    lower_is_better: bool
    reference: str
    systems: dict[str, ComparedSystem]
    tests: dict[str, PairedTest]
    seed_tests: dict[str, SeedTest]

    def table(self) -> pd.DataFrame:
        """One row per system: `mean`, `low`, `high` (95% over users), `sd` over seeds, `seeds`,
        `private`, its inputs (`fedrec.report.inputs.COLUMNS`, with `_`), and for all but the
        reference the fields of `PairedTest` and of `SeedTest`, with `t_holm`, `wilcoxon_holm` and
        `seed_holm`."""
        compared = {
            label: asdict(test) | asdict(self.seed_tests[label])
            for label, test in self.tests.items()
        }
        for name in ("t", "wilcoxon", "seed"):
            corrected = holm(np.array([row[f"{name}_p"] for row in compared.values()]))
            for row, value in zip(compared.values(), corrected.tolist(), strict=True):
                row[f"{name}_holm"] = value
        rows = []
        users = [_by_user(system.users).to_numpy() for system in self.systems.values()]
        intervals = bootstrap_intervals(users)
        for (label, system), (low, high) in zip(self.systems.items(), intervals, strict=True):
            means = np.array(list(system.by_seed.values()))
            row = {
                "system": label,
                "private": system.private,
                "seeds": len(means),
                "mean": float(means.mean()),
                "sd": float(means.std(ddof=1)) if len(means) > 1 else np.nan,
                "mean_low": low,
                "mean_high": high,
            }
            row |= compared.get(label, {})
            row |= {
                name.replace("-", "_"): None if system.inputs is None else value
                for name, value in (system.inputs or Inputs()).cells().items()
            }
            rows.append(row)
        return pd.DataFrame(rows).set_index("system")


def compare(
    results: Sequence[Result], *, metric: str | None = None, against: str | None = None
) -> Comparison:
    """Compare all systems of some runs with one of them.

    Args:
        results: of finished runs.
        metric: a column of users.csv; default: hits@10, the first hit rate, rmse, or the first.
        against: label of the reference; default: the first run's system.

    Raises:
        ExperimentError: the runs are not of the same data and split, or there is no such metric or
            system, or there is one system only.
    """
    _refuse_different(results)
    metric = metric or _default_metric(results)
    systems = _systems(results, metric)
    reference = against or next(iter(systems))
    if reference not in systems:
        raise _unknown("system", reference, systems)
    if len(systems) < 2:
        raise ExperimentError(
            "there is nothing to compare",
            expected="two systems or more",
            got=reference,
            fix="name more runs, or add evaluation.baselines",
        )
    others = [label for label in systems if label != reference]
    _require_values(metric, systems.values())
    differences = [_differences(systems[label], systems[reference]) for label in others]
    lower = lower_is_better(metric, results[0].experiment.evaluation)
    samples = [_by_user(values).to_numpy() for values in differences]
    over_users = paired_tests(samples, lower_is_better=lower)
    over_seeds = [seed_test(_by_seed(values)) for values in differences]
    return Comparison(
        metric,
        lower,
        reference,
        systems,
        dict(zip(others, over_users, strict=True)),
        dict(zip(others, over_seeds, strict=True)),
    )


def _require_values(metric: str, systems: Iterable[ComparedSystem]) -> None:
    """The error for a metric that no user of a system has."""
    for system in systems:
        if system.users.isna().all():
            raise ExperimentError(
                f"no test user of {system.label!r} has a value of {metric}",
                expected="a metric with values: some compare test items that a user does not know",
                got="none",
                fix="name another one with --metric, or hold out items that users have no other row"
                " of",
            )


def _differences(system: ComparedSystem, reference: ComparedSystem) -> pd.Series:
    """Differences of each user under each seed, indexed by (seed, client)."""
    differences = pd.Series((system.users - reference.users).dropna())
    if differences.index.nunique() < 2:
        raise ExperimentError(
            f"{system.label!r} and {reference.label!r} were tested on different users",
            expected="the same test users under the same seed",
            got=f"{len(differences)} users in common",
            fix="run both with the same [dataset], [split], evaluation and seed",
        )
    return differences


def _by_seed(values: pd.Series) -> np.ndarray:
    """The mean of each seed, `[seeds]`."""
    return pd.Series(values.groupby(level="seed").mean()).to_numpy()


def _by_user(values: pd.Series) -> pd.Series:
    return pd.Series(values.groupby(level="client").mean()).dropna()


def _systems(results: Sequence[Result], metric: str) -> dict[str, ComparedSystem]:
    parts: dict[str, dict[int, pd.Series]] = {}
    private: dict[str, bool] = {}
    inputs: dict[str, Inputs | None] = {}
    named = zip(results, system_names(results), baseline_names(results), strict=True)
    for result, name, names in named:
        own = marked(result.experiment)
        tables = [(name, own, result.users)] if result.experiment.federated else []
        stated = system_inputs(result)
        tables += [(names[label], label, table) for label, table in result.baseline_users.items()]
        for shown, label, table in tables:
            if metric not in table:
                continue
            inputs[shown] = inputs.get(shown) or stated.get(label)
            private[shown] = private.get(shown, True) and is_private(result, label)
            parts.setdefault(shown, {}).setdefault(result.experiment.seed, pd.Series(table[metric]))
    if not parts:
        known = sorted({str(column) for result in results for column in result.users})
        raise _unknown("metric", metric, known)
    return {
        label: ComparedSystem(
            label,
            {seed: float(values.mean()) for seed, values in by_seed.items()},
            pd.concat(list(by_seed.values()), keys=list(by_seed), names=_LEVELS),
            private[label],
            inputs[label],
        )
        for label, by_seed in parts.items()
    }


def _default_metric(results: Sequence[Result]) -> str:
    columns = [str(column) for column in results[0].users] or [
        str(column) for table in results[0].baseline_users.values() for column in table
    ]
    return main_metric(columns) or "hits@10"


def _refuse_different(results: Sequence[Result]) -> None:
    tables = [settings_table(result) for result in results]
    for result, table in zip(results[1:], tables[1:], strict=True):
        for key in _SAME:
            if _tested_on(table, key) != _tested_on(tables[0], key):
                expected, got = _differing(_tested_on(tables[0], key), _tested_on(table, key))
                raise ExperimentError(
                    f"{result.folder.name} cannot be compared with {results[0].folder.name}",
                    expected=f"the same {key}: {expected}",
                    got=got,
                    fix="compare runs on the same data and split",
                )
        one, other = (r.experiment.evaluation.held_out for r in (results[0], result))
        if one != other:
            raise ExperimentError(
                f"{result.folder.name} cannot be compared with {results[0].folder.name}",
                expected=f"evaluation.held-out = {one!r}",
                got=repr(other),
                fix="compare runs that were evaluated on the same rows",
            )


def _tested_on(table: dict, key: str) -> Any:
    """A section, less what changes what clients learn from and not what they are tested on."""
    section = table.get(key)
    if key == "split" and isinstance(section, dict):
        return {name: value for name, value in section.items() if name != "leaky-negatives"}
    return section


def _differing(one: Any, other: Any) -> tuple[str, str]:
    """The differences of two sections, as texts: their names, or the settings that differ."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return repr(one), repr(other)
    keys = ["name"] if one.get("name") != other.get("name") else [*dict.fromkeys([*one, *other])]
    apart = [key for key in keys if one.get(key) != other.get(key)]
    first, second = (
        ", ".join(f"{key} = {side[key]!r}" if key in side else f"no {key}" for key in apart)
        for side in (one, other)
    )
    return first, second


def _unknown(kind: str, name: str, known) -> ExperimentError:
    return ExperimentError(
        f"there is no {kind} {name!r} in these runs",
        expected=", ".join(known),
        got=repr(name),
        fix=did_you_mean(name, known),
    )
