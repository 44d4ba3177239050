# SPDX-License-Identifier: Apache-2.0
"""The result table of a run, and remarks on it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedrec.components.registry import MODEL
from fedrec.errors import ExperimentError
from fedrec.evaluation.tables import lower_is_better, main_metric
from fedrec.experiment.phases import last_phase
from fedrec.experiment.schema import marked
from fedrec.experiment.tables import EvaluationConfig
from fedrec.models.base import ProductsConfig
from fedrec.report.comparison import bootstrap_intervals, holm, wilcoxon
from fedrec.report.inputs import Inputs, budgets, input_codes, system_inputs
from fedrec.report.rows import is_private, system_rows
from fedrec.runs.folder import TIED_SHARE, RunFolder
from fedrec.sums.products import BIAS

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from fedrec.runs.result import Result

Rows = Mapping[str, Mapping[str, float]]
_SHOWN = ("hits@", "hits-of-", "mae", "rmse", "reconstruction-")
_RESAMPLES = 2000
_MOST_TIES = 0.1  # share of rows with tied times, above which the order of items is not judged
_NOT_PRIVATE = " (not private)"
_POPULARITY = "popularity"  # phase of the first round of `popularity-start`
_OF_OWN_DATA = ("item-weights", "fold-in")  # models of `fedrec try`
_RANDOM = "random"  # lists that do not depend on data
_ORDERED = "transitions"  # lists that depend on the order of a user's items


def summary_table(result: Result) -> Table:
    """All systems of a run; if any is private, the others are marked. Inputs have a column where
    any system has more than likes."""
    rows = system_rows(result)
    private = {label: is_private(result, label) for label in rows}
    known = next(iter(rows.values()), {})
    settings = result.experiment.evaluation
    shown = [name for name in settings.shown or () if name in known]
    if not shown:
        shown = [name for name in known if name.startswith(_SHOWN)]
        shown += [name for name in ("ndcg@10",) if name in known]
    shown += [
        name for name in ("nominal-epsilon", "epsilon") if any(name in row for row in rows.values())
    ]
    inputs = input_codes(system_inputs(result))
    names = {
        label: label
        if private[label] or label == _RANDOM or not any(private.values())
        else label + _NOT_PRIVATE
        for label in rows
    }
    codes = {names[label]: inputs.codes.get(label, "") for label in rows}
    named = {names[label]: row for label, row in rows.items()}
    return comparison_table(named, shown, settings, codes if inputs.legend else None)


def input_lines(result: Result) -> list[str]:
    """Below that table: what its inputs mean, a warning where systems differ in them, and the
    client-rounds and the numbers of settings tried, where these are known."""
    inputs = system_inputs(result)
    return [*input_codes(inputs).lines, *budgets(inputs)]


def comparison_table(
    rows: Rows,
    metrics: Sequence[str],
    settings: EvaluationConfig | None = None,
    inputs: Mapping[str, str] | None = None,
) -> Table:
    """A table for the terminal; the best value of each column is bold.

    Args:
        rows: metrics of each system.
        metrics: the columns, in order; a system without a metric, or with NaN, shows a dash.
        settings: `[evaluation]` of the experiment, whose own metrics say which values are better.
        inputs: of each system in short, a column; None: no such column.
    """
    from rich.markup import escape
    from rich.table import Table

    table = Table("system")
    for metric in metrics:
        table.add_column(metric, justify="right")
    if inputs is not None:
        table.add_column("inputs")
    lower = {metric: lower_is_better(metric, settings) for metric in metrics}
    best = {metric: _best(rows, metric, lower[metric]) for metric in metrics}
    for system, values in rows.items():
        cells = [_cell(values.get(metric)) for metric in metrics]
        marks = [system in best[metric] for metric in metrics]
        bold = [
            f"[bold]{cell}[/bold]" if mark else cell
            for cell, mark in zip(cells, marks, strict=True)
        ]
        table.add_row(escape(system), *bold, *([] if inputs is None else [inputs[system]]))
    return table


def _best(rows: Rows, metric: str, lower: bool) -> set[str]:
    """The systems that share the best value, as it is printed."""
    values = {
        system: row[metric]
        for system, row in rows.items()
        if not math.isnan(row.get(metric, math.nan))
    }
    if not values:
        return set()
    best = min(values.values()) if lower else max(values.values())
    return {system for system, value in values.items() if _cell(value) == _cell(best)}


def _cell(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.4f}"


def summary_notes(result: Result) -> list[str]:
    """Whether the system is better than popularity, and suggestions if it is not; whether the order
    of items pays."""
    name = deciding_metric(result)
    if name is None or not result.experiment.federated:
        return []
    if result.experiment.privacy is not None and _is_popularity(result):
        return _against_chance(result, name)
    notes = _below_popularity(result, name) + _without_private_popularity(result)
    return notes + _worth_of_order(result, name) + _without_products(result)


def _without_products(result: Result) -> list[str]:
    """How much of the catalogue a model of products recommends by popularity alone, and why."""
    items = len(result.parameters.get(BIAS, ()))
    try:
        settings = result.experiment.settings(MODEL)
    except ExperimentError:  # as above
        return []
    if not isinstance(settings, ProductsConfig) or settings.items >= items:
        return []
    return [
        f"{settings.items:,} of {items:,} items are recommended by products (limit: model.items);"
        " the rest follows behind these, by popularity"
    ]


def significance_line(result: Result) -> str:
    """How the system differs from each centralised one: difference of the deciding metric, its
    interval, and a test over the same users; empty where nothing can be compared."""
    metric = deciding_metric(result)
    if metric is None or metric not in result.users:
        return ""
    apart = _differences(result, metric)
    users = min(map(len, apart.values()), default=0)
    if users < 2:
        return ""
    intervals = bootstrap_intervals(list(apart.values()), resamples=_RESAMPLES)
    corrected = holm(np.array([wilcoxon(own)[0] for own in apart.values()]))
    said = [
        f"{label} {own.mean():+.4f} [{low:+.4f}, {high:+.4f}]"
        f" p {'< .001' if p < 1e-3 else f'= {p:.3f}'}"
        for (label, own), (low, high), p in zip(
            apart.items(), intervals, corrected.tolist(), strict=True
        )
    ]
    return (
        f"{metric} of {result.experiment.name} less that of {'; '.join(said)} (95% intervals and"
        f" Wilcoxon's test over {users:,} users, corrected by Holm)"
    )


def answer_line(result: Result) -> str:
    """Whether the federated system is better than popularity and than the strongest centralised
    system of equal inputs and, if the system is private, with a guarantee; by how much, with
    intervals. Empty where there is nothing to compare with."""
    metric = deciding_metric(result) or main_metric(result.metrics)
    own = marked(result.experiment)
    if metric is None or not result.experiment.federated:
        return ""
    rivals = _rivals(result, metric, own)
    apart = {label: one for label, one in _differences(result, metric).items() if label in rivals}
    if min(map(len, apart.values()), default=0) < 2:
        return ""
    intervals = bootstrap_intervals(list(apart.values()), resamples=_RESAMPLES)
    lower = lower_is_better(metric, result.experiment.evaluation)
    users = len(next(iter(apart.values())))
    said = [
        f"{_verdict(-high if lower else low, -low if lower else high)} than {rivals[label]}, by"
        f" {differences.mean():+.4f} [{low:+.4f}, {high:+.4f}]"
        for (label, differences), (low, high) in zip(apart.items(), intervals, strict=True)
    ]
    return (
        f"{own}, {metric} {result.metrics[metric]:.4f}: {'; '.join(said)} (95% intervals over"
        f" {users:,} users)."
    )


def _rivals(result: Result, metric: str, own: str) -> dict[str, str]:
    """The centralised systems that the answer names, popularity and the strongest one, and what
    they are called in it, by label."""
    inputs = system_inputs(result)
    known = {
        label: metrics[metric]
        for label, metrics in result.baselines.items()
        if metric in metrics and label != _RANDOM
    }
    private = [label for label in known if is_private(result, label)]
    kind = ""
    if is_private(result, own):
        kind = "private " if private else "(not private) "
        known = {label: known[label] for label in private or known}
    equal = [label for label in known if _learns_from(inputs, label) == _learns_from(inputs, own)]
    lower = lower_is_better(metric, result.experiment.evaluation)
    ranked = sorted(equal or known, key=lambda label: known[label], reverse=not lower)
    differ = "of equal inputs" if equal else "though its inputs differ"
    popular = [label for label in ("dp-popularity", _POPULARITY) if label in known]
    names = {label: label for label in popular[:1]}
    return names | {
        label: f"{label}, the strongest {kind}baseline {differ}" for label in ranked[:1]
    }


def _learns_from(inputs: Mapping[str, Inputs | None], label: str) -> tuple[Any, ...] | None:
    """What a system has to learn from, without how often and for how many settings it was run."""
    own = inputs.get(label)
    if own is None:
        return None
    return own.user_features, own.item_features, own.low_rated, own.test_users


def _verdict(low: float, high: float) -> str:
    """In words, by the ends of an interval of a difference that is above 0 for the better."""
    return "better" if low > 0 else "worse" if high < 0 else "not surely different"


def _differences(result: Result, metric: str) -> dict[str, np.ndarray]:
    """The system's metric less that of each centralised one, of the users who have both."""
    tables = _of_baselines(result, metric)
    return {label: _difference(result.users, table, metric) for label, table in tables.items()}


def _difference(first: pd.DataFrame, second: pd.DataFrame, metric: str) -> np.ndarray:
    """Values of the users who have both, the first less the second."""
    differences = (first[metric] - second[metric]).to_numpy()
    return differences[np.isfinite(differences)]


def _of_baselines(result: Result, metric: str) -> dict[str, pd.DataFrame]:
    """The tables of users of the centralised systems that have the metric."""
    return {label: table for label, table in result.baseline_users.items() if metric in table}


def early_stopping_line(result: Result) -> str:
    """The selected round, the reason, and whether training ended early; empty without early
    stopping."""
    found = result.early_stopping
    best = found.get("best-round")
    if not found or best is None:
        return ""
    since = found["evaluations-since"]
    end = (
        f"training ended after {found['rounds']} of {found['planned-rounds']} rounds, when"
        f" {since} evaluation{'s' if since > 1 else ''} had brought no improvement"
        if found["stopped"]
        else f"all {found['rounds']} rounds were run"
    )
    return (
        f"Kept: round {best}, the best by {found['metric']} of {found['validation-users']:,}"
        f" validation users ({found['best']:.4f}); {end}."
    )


def interruption_line(result: Result) -> str:
    """What a private run that was resumed paid for repeated rounds, and how many rounds its budget
    left out; empty where neither happened."""
    privacy = RunFolder(result.folder).summary().get("privacy", {})
    return str(privacy.get("interruption", ""))


def private_lines(result: Result) -> list[str]:
    """What is printed below the table of a private run: the guarantee first, then what resuming it
    cost, the total of all private systems, the answer, inputs and early stopping. At most seven
    lines; the report has the rest."""
    kept = RunFolder(result.folder).summary()
    metric = deciding_metric(result)
    chance = _against_chance(result, metric) if metric and _is_popularity(result) else []
    lines = [
        *kept.get("privacy", {}).get("in words", [])[:1],
        interruption_line(result),
        *total_lines(result),
        *(chance or [answer_line(result)]),
        *input_codes(system_inputs(result)).lines,
        early_stopping_line(result),
    ]
    return [line for line in lines if line]


def total_lines(result: Result) -> list[str]:
    """What all private systems of a run cost together; empty with at most one of them."""
    said = RunFolder(result.folder).summary().get("baselines-privacy", {}).get("in words", [])
    return [line for line in said if re.split("[:,]", line)[0] not in result.baselines]


def deciding_metric(result: Result) -> str | None:
    """The metric that is compared with popularity's: the first of `evaluation.shown`, Hits@10, or
    the first hit rate."""
    settings = result.experiment.evaluation
    for name in settings.shown or ():
        if name in result.metrics and not lower_is_better(name, settings):
            return name
    metric = main_metric(result.metrics)
    return metric if metric is not None and metric.startswith("hits@") else None


def _is_popularity(result: Result) -> bool:
    """Whether the run ended with the first round of `popularity-start`."""
    try:
        return last_phase(result.experiment) == _POPULARITY
    except ExperimentError:  # a component that is not installed here, or no longer has a setting
        return False


def _against_chance(result: Result, metric: str) -> list[str]:
    """How private popularity compares with lists at random, if these are a baseline."""
    if metric not in result.baselines.get(_RANDOM, {}):
        return []
    return [
        f"{metric} of private popularity is {result.metrics[metric]:.4f}; lists at random have"
        f" {result.baselines[_RANDOM][metric]:.4f}."
    ]


def _below_popularity(result: Result, metric: str) -> list[str]:
    system = result.metrics[metric]
    labels = [
        label
        for label in ("popularity", "dp-popularity")
        if metric in result.baselines.get(label, {})
    ]
    if not labels:
        return []
    if result.experiment.privacy is not None and "dp-popularity" in labels:
        labels = ["dp-popularity"]
    label = labels[0]
    popular = result.baselines[label][metric]
    if system > popular:
        return []
    experiment = result.experiment
    said = [
        f"{experiment.name} is not better than {label}: {metric} {system:.4f}, {label}"
        f" {popular:.4f}. Recommending the same items to everybody serves these users as well."
    ]
    if experiment.model.name not in _OF_OWN_DATA:
        said.append(
            "Try: fedrec try TABLE.csv, whose federated model needs no features;"
            " more rounds (--set rounds=...); strategy popularity-start, which starts from"
            " popularity."
        )
    elif experiment.privacy is not None:
        # the kept round of popularity has no products of items
        popular = result.early_stopping.get("best-round") == 1
        fewer = "" if popular else " products of fewer items (--set model.items=100),"
        said.append(
            f"Try: a larger epsilon,{fewer} or more users: noise does not grow with their number,"
            " what is learned does."
        )
    else:
        said.append(
            "Try: another lambda (--set strategy.main.regularisation=...), chosen with"
            " --set evaluation.held-out=validation; or more data per user."
        )
    return said


def _worth_of_order(result: Result, metric: str) -> list[str]:
    """Whether transitions between items rank better than the best baseline without order, over the
    test users of an own table, unless too many rows have no order."""
    if _ORDERED not in result.baseline_users or result.experiment.dataset.name != "table":
        return []
    if RunFolder(result.folder).summary().get(TIED_SHARE, 1.0) > _MOST_TIES:
        return []
    tables = _of_baselines(result, metric)
    means = {label: float(np.nanmean(table[metric])) for label, table in tables.items()}
    others = [label for label in tables if label not in (_ORDERED, _RANDOM)]
    if _ORDERED not in tables or not others:
        return []
    best = max(others, key=means.__getitem__)
    differences = _difference(tables[_ORDERED], tables[best], metric)
    if len(differences) < 2:
        return []
    ((low, high),) = bootstrap_intervals([differences])
    pays = "pays" if low > 0 else "does not pay" if high < 0 else "makes no sure difference"
    return [
        f"The order of items {pays} here: {metric} {means[_ORDERED]:.4f} by transitions between"
        f" items, {means[best]:.4f} by {best}, which knows no order (difference"
        f" {differences.mean():+.4f}, {low:+.4f} to {high:+.4f})."
    ]


def _without_private_popularity(result: Result) -> list[str]:
    privacy = result.experiment.privacy
    if privacy is None or "dp-popularity" in result.baselines or not result.baselines:
        return []
    epsilon = privacy.epsilon or 5.0
    return [
        "The fair bar for a private system is private popularity: add { name ="
        f' "dp-popularity", epsilon = {epsilon:g} }} to evaluation.baselines.'
    ]
