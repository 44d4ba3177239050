# SPDX-License-Identifier: Apache-2.0
"""What a page is made of: tables and notes as plain values, which the template lays out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedrec.metrics.paired_tests import bootstrap_interval

_RESAMPLES = 1000


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
class Table:
    """A table with a caption."""

    caption: str
    heads: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Note:
    """A sentence at the top of the page."""

    text: str
    warning: bool = False


def interval_cell(values: np.ndarray) -> Cell:
    """Mean over users and its 95% bootstrap interval; a dash without any user."""
    values = np.asarray(values, dtype=np.float64)
    values = values[np.isfinite(values)]
    if not len(values):
        return Cell("-")
    low, high = bootstrap_interval(values, resamples=_RESAMPLES)
    return Cell(f"{values.mean():.4f}", f"{low:.4f} to {high:.4f}")


def number_cell(value: float | None) -> Cell:
    """A number with four digits; a dash where there is none."""
    return Cell("-" if value is None or value != value else f"{value:.4g}")
