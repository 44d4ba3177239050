# SPDX-License-Identifier: Apache-2.0
"""Table of systems: one row per system, one column per metric, the best value of each column
marked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedrec.evaluation.metrics import lower_is_better
from fedrec.experiment.tables import EvaluationConfig

if TYPE_CHECKING:
    from rich.table import Table

Rows = Mapping[str, Mapping[str, float]]


def comparison_table(
    rows: Rows, metrics: Sequence[str], settings: EvaluationConfig | None = None
) -> Table:
    """A table for the terminal; the best value of each column is bold.

    Args:
        rows: metrics of each system.
        metrics: the columns, in order; a system without a metric, or with NaN, shows a dash.
        settings: `[evaluation]` of the experiment, whose own metrics say which values are better.
    """
    from rich.markup import escape
    from rich.table import Table

    table = Table("system")
    for metric in metrics:
        table.add_column(metric, justify="right")
    lower = {metric: lower_is_better(metric, settings) for metric in metrics}
    best = {metric: _best(rows, metric, lower[metric]) for metric in metrics}
    for system, values in rows.items():
        cells = [_cell(values.get(metric)) for metric in metrics]
        marks = [system in best[metric] for metric in metrics]
        bold = [
            f"[bold]{cell}[/bold]" if mark else cell
            for cell, mark in zip(cells, marks, strict=True)
        ]
        table.add_row(escape(system), *bold)
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
