# SPDX-License-Identifier: Apache-2.0
"""Charts, tables and notes of a page, and its templates.

Line charts and histograms as inline SVG.

They take their colours from the page's style sheet, so that they follow dark mode and print, and
weigh a few kilobytes; lines are distinguished by dashes and labels as well as by colour.
Matplotlib's SVG has its colours fixed and is ten times as large.
"""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedrec.report.comparison import bootstrap_intervals

if TYPE_CHECKING:
    from jinja2 import Environment

# ends of the axes, in the units of `chart.html.j2`
_LEFT = 66
_RIGHT = 466
_BOTTOM = 212
_TOP = 14
_POINTS = 200  # points of a line; more are not visible
_TICKS = 5


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        label: name of the line.
        xs: ascending, finite.
        ys: values at `xs`, finite.
    """

    label: str
    xs: Sequence[float]
    ys: Sequence[float]


def line_chart(lines: Sequence[Line], *, title: str, x_label: str, y_label: str) -> str:
    """Render a line chart with a legend below; empty without any point."""
    lines = [line for line in lines if len(line.xs)]
    if not lines:
        return ""
    xs = _Axis.of([x for line in lines for x in line.xs], _LEFT, _RIGHT)
    ys = _Axis.of([0.0, *(y for line in lines for y in line.ys)], _BOTTOM, _TOP)
    drawn = []
    for line in lines:
        last = len(line.xs) - 1
        shown = np.unique(np.linspace(0, last, min(last + 1, _POINTS)).astype(int)).tolist()
        drawn.append((line.label, [(xs.at(line.xs[n]), ys.at(line.ys[n])) for n in shown]))
    ends = [f"{line.label}: from {line.ys[0]:.4g} to {line.ys[-1]:.4g}" for line in lines]
    axes = {"title": title, "x_label": x_label, "y_label": y_label, "xs": xs, "ys": ys}
    return rendered("chart.html.j2", **axes, summary="; ".join(ends), lines=drawn, bars=[])


def histogram(
    values: np.ndarray, *, title: str, x_label: str, bins: int = 20, colour: int = 0
) -> str:
    """Render a histogram of finite users' `values` `float [users]`. Empty without any."""
    if not len(values):
        return ""
    ends = min(0.0, float(values.min())), max(1.0, float(values.max()))
    counts, edges = np.histogram(values, bins=bins, range=ends)
    xs = _Axis.of(edges.tolist(), _LEFT, _RIGHT)
    ys = _Axis.of([0, *counts.tolist()], _BOTTOM, _TOP)
    bars = [
        (xs.at(low), ys.at(n), max(0.5, xs.at(high) - xs.at(low) - 1), ys.at(0) - ys.at(n))
        for n, low, high in zip(counts.tolist(), edges[:-1], edges[1:], strict=True)
        if n
    ]
    summary = (
        f"{len(values)} users; mean {values.mean():.4f}, median {np.median(values):.4f},"
        f" {np.mean(values == 0):.0%} at zero"
    )
    axes = {"title": title, "x_label": x_label, "y_label": "users", "xs": xs, "ys": ys}
    return rendered("chart.html.j2", **axes, summary=summary, lines=[], bars=bars, colour=colour)


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    start: float
    stop: float
    least_step: float

    @classmethod
    def of(cls, values: Sequence[float], start: float, stop: float) -> _Axis:
        low = min(values)
        high = max(values)
        high = high if high > low else low + (abs(low) or 1.0)
        least = float(all(float(value).is_integer() for value in values))
        return cls(low, high, start, stop, least)

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Positions and labels at multiples of 1, 2 or 5 times a power of ten."""
        rough = (self.high - self.low) / _TICKS
        power = 10 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough - 1e-12)
        step = max(step, self.least_step)
        first = math.ceil(self.low / step - 1e-9)
        numbers = range(first, math.floor(self.high / step + 1e-9) + 1)
        return [(self.at(number * step), f"{number * step:.4g}") for number in numbers]


# Parts of a page: tables and notes as plain values for the template.

_RESAMPLES = 2000


@dataclass(frozen=True)
class Cell:
    """A number and its interval, as texts."""

    value: str
    range: str = ""


@dataclass(frozen=True)
class Row:
    """A row of a table; `federated` marks the federated systems."""

    name: str
    cells: tuple[Cell | str, ...]
    federated: bool = False


@dataclass(frozen=True)
class PageTable:
    """A table with a caption."""

    caption: str
    heads: tuple[str, ...]
    rows: tuple[Row, ...]

    def is_text(self, column: int) -> bool:
        """True if a column holds sentences or names, and no numbers; column 0 names the rows."""
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
    samples = [values[np.isfinite(values)] for values in samples]
    filled = [values for values in samples if len(values)]
    intervals = iter(bootstrap_intervals(filled, resamples=_RESAMPLES))
    texts = ("{:.4f} to {:.4f}".format(*ends) for ends in intervals)
    return [
        Cell(f"{values.mean():.4f}", next(texts)) if len(values) else Cell("-")
        for values in samples
    ]


def metric_cell(value: float) -> Cell:
    """Format a mean of a metric; a dash if it is missing."""
    return Cell("-" if value != value else f"{value:.4f}")


def number_cell(value: float | None) -> Cell:
    """Format a number with four digits; a dash if it is missing."""
    return Cell("-" if value is None or value != value else f"{value:.4g}")


# The templates of pages, which escape every text.


def rendered(template: str, **values: Any) -> str:
    """Render a template of this folder; missing values are errors."""
    return _environment().get_template(template).render(**values)


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("fedrec.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"seconds": _seconds, "bytes": _bytes, "quoted": shlex.quote}
    return environment


def _seconds(value: float | None) -> str:
    """Format a time; a dash if it was not measured."""
    if value is None:
        return "-"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"


def _bytes(value: float | None, unit: int = 1) -> str:
    """Format a number of bytes, or of units, with three digits; a dash if it was not measured."""
    if value is None:
        return "-"
    power = sum(value * unit >= 1000**step for step in (1, 2, 3))
    return f"{value * unit / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"
