# SPDX-License-Identifier: Apache-2.0
"""A paper's numbers beside ours, as one table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import t as student

from simulations.reproduce.published import Cell, Published
from simulations.reproduce.study import Found

COLUMNS = ("dataset", "model", "metric", "published", "ours", "low", "high", "seeds", "difference")


def comparison(known: dict[Cell, Published], found: Iterable[Found]) -> pd.DataFrame:
    """One row per number: those of the paper in its order, then additional ones.

    Args:
        known: what is printed.
        found: what was found, any number of seeds.

    Returns:
        Columns `COLUMNS`. `low` and `high` bound a 95 % interval: over seeds (Student's t) where
        there are two or more, over the users of the run where there is one; NaN if neither is
        known, or without a result.
    """
    ours: dict[Cell, list[Found]] = {}
    for one in found:
        ours.setdefault(one.cell, []).append(one)
    cells = [*known, *(cell for cell in ours if cell not in known)]
    return pd.DataFrame(
        [_row(cell, known.get(cell), ours.get(cell, [])) for cell in cells], columns=COLUMNS
    )


def _row(cell: Cell, printed: Published | None, found: Sequence[Found]) -> dict[str, object]:
    value = math.nan if printed is None else printed.value
    mean, low, high = _interval(found)
    return {
        **dict(zip(("dataset", "model", "metric"), cell, strict=True)),
        "published": value,
        "ours": mean,
        "low": low,
        "high": high,
        "seeds": len(found),
        "difference": mean - value if math.isfinite(mean) and math.isfinite(value) else math.nan,
    }


def _interval(found: Sequence[Found]) -> tuple[float, float, float]:
    """Mean, and the ends of its interval."""
    if not found:
        return math.nan, math.nan, math.nan
    numbers = np.array([one.value for one in found])
    if len(found) == 1:
        low = found[0].low
        high = found[0].high
        return (
            float(numbers[0]),
            math.nan if low is None else low,
            math.nan if high is None else high,
        )
    if not np.isfinite(numbers).all():
        return float(numbers.mean()), math.nan, math.nan
    half = float(
        student.ppf(0.975, len(numbers) - 1) * numbers.std(ddof=1) / math.sqrt(len(numbers))
    )
    return float(numbers.mean()), float(numbers.mean()) - half, float(numbers.mean()) + half


def cells_of(row: Mapping[Any, Any]) -> list[str]:
    """A row as texts: dataset, model, metric, published, ours, interval."""
    span = "" if math.isnan(row["low"]) else f"{row['low']:.4f} to {row['high']:.4f}"
    names = [str(row[name]) for name in ("dataset", "model", "metric")]
    return [*names, number(row["published"]), number(row["ours"]), span]


def number(value: float) -> str:
    """A number with four decimals, a large whole one with none; a dash where there is none."""
    if math.isnan(value) or math.isinf(value):
        return "-" if math.isnan(value) else "inf"
    return f"{value:,.0f}" if abs(value) >= 100 and value == round(value) else f"{value:.4f}"


def markdown(table: pd.DataFrame, title: str, notes: Iterable[str]) -> str:
    """The table as Markdown."""
    head = ["dataset", "model", "metric", "published", "ours", "95 % interval"]
    lines = [f"# {title}", "", _line(head), _line(["---"] * len(head))]
    lines += [_line(cells_of(row)) for row in table.to_dict("records")]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
