# SPDX-License-Identifier: Apache-2.0
"""Result table of a run, and notes on it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fedrec.evaluation.tables import NEW, NEW_OF_ALL, OLD, lower_is_better, main_metric
from fedrec.experiment.phases import last_phase
from fedrec.experiment.schema import EvaluationConfig, marked
from fedrec.report.comparison import bootstrap_intervals, is_private, system_rows
from fedrec.report.inputs import Inputs, budgets_line, inputs_line, system_inputs
from fedrec.runs.folder import RunFolder

if TYPE_CHECKING:
    from rich.table import Table

    from fedrec.runs.folder import Result

Rows = Mapping[str, Mapping[str, float]]
_SHOWN = ("hits@", "hits-of-", "mae", "rmse", "reconstruction-")
_RESAMPLES = 2000
_NOT_PRIVATE = " (not private)"
_REST = "See the report for what this covers and what it does not."
_RANDOM = "random"  # lists that do not depend on data


def summary_table(result: Result) -> Table:
    """Table of all systems of a run; non-private ones are marked if any is private."""
    rows = system_rows(result)
    private = {label for label in rows if is_private(result, label)}
    metrics = next(iter(rows.values()), {})
    settings = result.experiment.evaluation
    shown = [name for name in settings.shown or () if name in metrics]
    if not shown:
        shown = [name for name in metrics if name.startswith(_SHOWN)]
        of_items = ("", NEW, NEW_OF_ALL, OLD)
        shown += [name for prefix in of_items if (name := f"{prefix}ndcg@10") in metrics]
    epsilons = ("nominal-epsilon", "epsilon")
    shown += [name for name in epsilons if any(name in row for row in rows.values())]
    unmarked = {*private, _RANDOM} if private else set(rows)
    named = {
        label if label in unmarked else label + _NOT_PRIVATE: row for label, row in rows.items()
    }
    return comparison_table(named, shown, settings)


def comparison_table(
    rows: Rows, metrics: Sequence[str], settings: EvaluationConfig | None = None
) -> Table:
    """Table for the terminal, with the best value of each column in bold.

    Args:
        rows: metrics of each system.
        metrics: the columns, in order; a system without a metric, or with NaN, shows a dash.
        settings: `[evaluation]` of the experiment, with its added metrics.
    """
    from rich.markup import escape
    from rich.table import Table

    table = Table("system")
    for metric in metrics:
        table.add_column(metric, justify="right")
    best = {metric: _best(rows, metric, settings) for metric in metrics}
    for system, values in rows.items():
        cells = (_cell(values.get(metric, math.nan)) for metric in metrics)
        marked_cells = (
            f"[bold]{cell}[/bold]" if cell == best[metric] else cell
            for metric, cell in zip(metrics, cells, strict=True)
        )
        table.add_row(escape(system), *marked_cells)
    return table


def _best(rows: Rows, metric: str, settings: EvaluationConfig | None) -> str:
    """Best value of a metric, as printed."""
    values = (row.get(metric, math.nan) for row in rows.values())
    best = min if lower_is_better(metric, settings) else max
    return _cell(best((value for value in values if not math.isnan(value)), default=math.nan))


def _cell(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"


def answer_line(result: Result) -> str:
    """Comparison of the federated system with popularity and with the strongest centralised system
    of equal inputs (a private one, if the system is private), with intervals. Empty where there is
    nothing to compare with."""
    metric = deciding_metric(result) or main_metric(result.metrics)
    system = marked(result.experiment)
    if metric is None or not result.experiment.federated:
        return ""
    every = _differences(result, metric)
    rivals = {
        name: every[label]
        for label, name in _rivals(result, metric, system).items()
        if label in every
    }
    users = min(map(len, rivals.values()), default=0)
    if users < 2:
        return ""
    intervals = bootstrap_intervals(list(rivals.values()), resamples=_RESAMPLES)
    lower = lower_is_better(metric, result.experiment.evaluation)
    texts = [
        f"{_verdict(-high if lower else low, -low if lower else high)} than {name}, by"
        f" {values.mean():+.4f} [{low:+.4f}, {high:+.4f}]"
        for (name, values), (low, high) in zip(rivals.items(), intervals, strict=True)
    ]
    return (
        f"{system}, {metric} {result.metrics[metric]:.4f}: {'; '.join(texts)} (95% intervals over"
        f" {users:,} users)."
    )


def _rivals(result: Result, metric: str, system: str) -> dict[str, str]:
    """Names of the compared centralised systems, popularity and the strongest, by label."""
    inputs = system_inputs(result)
    values = {
        label: metrics[metric]
        for label, metrics in result.baselines.items()
        if metric in metrics and label != _RANDOM
    }
    kind = ""
    if is_private(result, system):
        private = {label: value for label, value in values.items() if is_private(result, label)}
        kind = "private " if private else "(not private) "
        values = private or values
    learned = {label: _learns_from(inputs.get(label)) for label in (*values, system)}
    equal = [label for label in values if learned[label] == learned[system]]
    differ = "of equal inputs" if equal else "though its inputs differ"
    sign = -1 if lower_is_better(metric, result.experiment.evaluation) else 1
    strongest = max(equal or values, key=lambda label: sign * values[label], default=None)
    popular = [label for label in ("dp-popularity", "popularity") if label in values]
    names = {label: label for label in popular[:1]}
    if strongest is not None:
        names[strongest] = f"{strongest}, the strongest {kind}baseline {differ}"
    return names


def _learns_from(inputs: Inputs | None) -> Inputs | None:
    """Inputs without client-rounds and number of settings tried."""
    return inputs and replace(inputs, client_rounds=None, settings_tried=None)


def _verdict(low: float, high: float) -> str:
    """Verdict in words from an interval of a difference, positive if better."""
    return "better" if low > 0 else "worse" if high < 0 else "not significantly different"


def _differences(result: Result, metric: str) -> dict[str, np.ndarray]:
    """Differences of a metric to each centralised system, for users with both."""
    differences = {
        label: (result.users[metric] - table[metric]).to_numpy()
        for label, table in result.baseline_users.items()
        if metric in table
    }
    return {label: values[np.isfinite(values)] for label, values in differences.items()}


def early_stopping_line(result: Result) -> str:
    """Line on the selected round and whether training ended early; empty without early stopping."""
    state = result.early_stopping
    best = state.get("best-round")
    if best is None:
        return ""
    since = state["evaluations-since"]
    end = (
        f"training ended with round {state['rounds']} of {state['planned-rounds']}, after"
        f" {since} evaluation{'s' if since > 1 else ''} without improvement"
        if state["stopped"]
        else f"all {state['rounds']} rounds were run"
    )
    return (
        f"Selected: round {best}, the best by {state['metric']} of {state['validation-users']:,}"
        f" validation users ({state['best']:.4f}); {end}."
    )


def interruption_line(result: Result) -> str:
    """Line on the cost of rounds repeated by a resumed private run and on rounds skipped for lack
    of budget; else empty."""
    privacy = RunFolder(result.folder).summary().get("privacy", {})
    return str(privacy.get("interruption", ""))


def result_lines(result: Result) -> list[str]:
    """Lines printed below the table of a run: comparison, inputs, early stopping and notes; for a
    private run also guarantee, cost of resuming and total cost, at most eight lines. The report has
    the rest."""
    summary = RunFolder(result.folder).summary()
    guarantee = summary.get("privacy", {}).get("in words", [])
    total = summary.get("baselines-privacy", {}).get("in words", [])
    total = [line for line in total if re.split("[:,]", line)[0] not in result.baselines]
    inputs = system_inputs(result)
    users = len(result.users)
    counts = f"{users} user{'' if users == 1 else 's'}"
    counts += f", {result.rounds_in_words}" if result.experiment.federated else ""
    lines = [answer_line(result), inputs_line(inputs), early_stopping_line(result)]
    if result.experiment.privacy is not None:
        lines = [*guarantee[:1], interruption_line(result), *total, *lines, f"{counts}. {_REST}"]
    else:
        stated = list(result.privacy)
        if result.experiment.dataset.name == "table" and stated:
            stated = [stated[0], *(line for line in total if line != stated[0]), _REST]
        lines += [budgets_line(inputs), *popularity_notes(result), *stated, f"{counts}."]
    return [line for line in lines if line]


def deciding_metric(result: Result) -> str | None:
    """Metric for the comparison with popularity: the first of `evaluation.shown`, Hits@10, or the
    first hit rate."""
    settings = result.experiment.evaluation
    for name in settings.shown or ():
        if name in result.metrics and not lower_is_better(name, settings):
            return name
    metric = main_metric(result.metrics)
    return metric if metric is not None and metric.startswith("hits@") else None


def popularity_notes(result: Result) -> list[str]:
    """Notes on a system that is not better than popularity, with suggestions."""
    experiment = result.experiment
    metric = deciding_metric(result)
    if metric is None:
        return []
    order = ["popularity", "dp-popularity"]
    labels = order if experiment.privacy is None else order[::-1]
    label = next((name for name in labels if metric in result.baselines.get(name, {})), None)
    if label is None or result.metrics[metric] > result.baselines[label][metric]:
        return []
    if last_phase(experiment) == "popularity":  # it is popularity itself
        return []
    advice = "more rounds (--set rounds=...), or strategy popularity-start"
    if experiment.privacy is not None:
        advice = (
            "a larger epsilon, or more users: the signal grows with their number, the noise does"
            " not"
        )
    return [
        f"{experiment.name} is not better than {label}: {metric} {result.metrics[metric]:.4f},"
        f" {label} {result.baselines[label][metric]:.4f}. Recommending the same items to all users"
        " serves these users as well.",
        f"Try: {advice}.",
    ]
