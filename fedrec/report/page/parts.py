# SPDX-License-Identifier: Apache-2.0
"""Parts of a page: tables and notes as plain values for the template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedrec.report.bootstrap import Interval, bootstrap_intervals

_RESAMPLES = 2000


@dataclass(frozen=True)
class Cell:
    """A number and the interval around it, as texts."""

    value: str
    range: str = ""


@dataclass(frozen=True)
class Row:
    """A row of a table; `own` marks the federated systems."""

    name: str
    cells: tuple[Cell | str, ...]
    own: bool = False


@dataclass(frozen=True)
class PageTable:
    """A table with a caption."""

    caption: str
    heads: tuple[str, ...]
    rows: tuple[Row, ...]

    def is_text(self, column: int) -> bool:
        """Whether a column holds sentences or names, and no numbers; column 0 names the rows."""
        return column == 0 or any(
            isinstance(cell := row.cells[column - 1], str) and cell != "" for row in self.rows
        )


@dataclass(frozen=True)
class Note:
    """A sentence at the top of the page."""

    text: str
    warning: bool = False


def interval_cells(samples: Sequence[np.ndarray]) -> list[Cell]:
    """Mean over users of each sample `[users]` and its 95% bootstrap interval; a dash without
    users."""
    known = [values[np.isfinite(values)] for values in samples]
    filled = [values for values in known if len(values)]
    intervals = iter(bootstrap_intervals(filled, resamples=_RESAMPLES))
    return [
        _interval_cell(values, next(intervals)) if len(values) else Cell("-") for values in known
    ]


def _interval_cell(values: np.ndarray, ends: Interval) -> Cell:
    return Cell(f"{values.mean():.4f}", f"{ends[0]:.4f} to {ends[1]:.4f}")


def metric_cell(value: float) -> Cell:
    """A mean of a metric; a dash where there is none."""
    return Cell("-" if value != value else f"{value:.4f}")


def number_cell(value: float | None) -> Cell:
    """A number with four digits; a dash where there is none."""
    return Cell("-" if value is None or value != value else f"{value:.4g}")
