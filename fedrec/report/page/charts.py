# SPDX-License-Identifier: Apache-2.0
"""Charts, tables and notes of a page, and its templates.

Line charts and histograms as inline SVG.

They take their colours from the page's style sheet, so that they follow dark mode and print, and
weigh a few kilobytes; lines are distinguished by dashes and labels as well as by colour.
Matplotlib's SVG has its colours fixed and is ten times as large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from fedrec.report.comparison import Interval, bootstrap_intervals

_WIDTH = 480
_HEIGHT = 260
_LEFT = 66
_RIGHT = 14
_TOP = 14
_BOTTOM = 48
_POINTS = 200  # points of a line; more are not visible
_TICKS = 5
COLOURS = 8


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        label: what it shows.
        xs: ascending, finite.
        ys: as many, finite.
    """

    label: str
    xs: Sequence[float]
    ys: Sequence[float]


def line_chart(lines: Sequence[Line], *, title: str, x_label: str, y_label: str) -> str:
    """Lines over a common axis, with a legend below; empty without any point."""
    lines = [line for line in lines if len(line.xs)]
    if not lines:
        return ""
    values = [x for line in lines for x in line.xs]
    whole = all(float(x).is_integer() for x in values)
    xs = _Axis.of(values, _LEFT, _WIDTH - _RIGHT, whole=whole)
    ys = _Axis.of([0.0, *(y for line in lines for y in line.ys)], _HEIGHT - _BOTTOM, _TOP)
    drawn = [_path(line, place, xs, ys) for place, line in enumerate(lines)]
    said = "; ".join(f"{line.label}: from {line.ys[0]:.4g} to {line.ys[-1]:.4g}" for line in lines)
    legend = "".join(
        f'<li><svg class="key" viewBox="0 0 28 8" aria-hidden="true">'
        f'<path class="line c{place % COLOURS}" d="M0 4H28"/></svg>{escape(line.label)}</li>'
        for place, line in enumerate(lines)
    )
    return _figure(title, said, [*_axes(xs, ys, x_label, y_label), *drawn], legend)


def histogram(
    values: np.ndarray, *, title: str, x_label: str, bins: int = 20, colour: int = 0
) -> str:
    """Histogram of the users' `values` `float [users]`, which are finite. Empty without any."""
    values = np.asarray(values, dtype=np.float64)
    if not len(values):
        return ""
    top = max(float(values.max()), 1.0 if values.max() <= 1 else float(values.max()))
    counts, edges = np.histogram(values, bins=bins, range=(min(0.0, float(values.min())), top))
    xs = _Axis.of(edges.tolist(), _LEFT, _WIDTH - _RIGHT)
    ys = _Axis.of([0.0, float(counts.max())], _HEIGHT - _BOTTOM, _TOP, whole=True)
    bars = [
        f'<rect class="bar b{colour % COLOURS}" x="{xs.at(low):.1f}" y="{ys.at(count):.1f}"'
        f' width="{max(0.5, xs.at(high) - xs.at(low) - 1):.1f}"'
        f' height="{ys.at(0) - ys.at(count):.1f}"/>'
        for count, low, high in zip(counts.tolist(), edges[:-1], edges[1:], strict=True)
        if count
    ]
    said = (
        f"{len(values)} users; mean {values.mean():.4f}, median {np.median(values):.4f},"
        f" {np.mean(values == 0):.0%} at zero"
    )
    return _figure(title, said, [*_axes(xs, ys, x_label, "users"), *bars], "")


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    start: float
    stop: float
    ticks: tuple[float, ...]

    @classmethod
    def of(
        cls, values: Sequence[float], start: float, stop: float, *, whole: bool = False
    ) -> _Axis:
        low = min(values)
        high = max(values)
        if low == high:
            high = low + (abs(low) or 1.0)
        step = _step((high - low) / _TICKS)
        step = max(1.0, round(step)) if whole else step
        first = math.ceil(low / step - 1e-9)
        ticks = [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]
        return cls(low, high, start, stop, tuple(ticks))

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)


def _step(rough: float) -> float:
    """The next larger of 1, 2, 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(rough))
    return next(power * one for one in (1, 2, 5, 10) if power * one >= rough - 1e-12)


def _path(line: Line, place: int, xs: _Axis, ys: _Axis) -> str:
    kept = np.unique(np.linspace(0, len(line.xs) - 1, min(len(line.xs), _POINTS)).astype(int))
    points = [(xs.at(line.xs[one]), ys.at(line.ys[one])) for one in kept.tolist()]
    style = f"c{place % COLOURS}"
    if len(points) == 1:
        return (
            f'<circle class="dot {style}" cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="4"/>'
        )
    return (
        f'<path class="line {style}" d="M' + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) + '"/>'
    )


def _axes(xs: _Axis, ys: _Axis, x_label: str, y_label: str) -> list[str]:
    bottom = _HEIGHT - _BOTTOM
    right = _WIDTH - _RIGHT
    parts = [
        f'<path class="grid" d="M{_LEFT} {ys.at(tick):.1f}H{right}"/>'
        + _text("tick", _LEFT - 6, ys.at(tick) + 4, f"{tick:.4g}", "end")
        for tick in ys.ticks
    ]
    parts += [_text("tick", xs.at(tick), bottom + 17, f"{tick:.4g}") for tick in xs.ticks]
    middle = (_LEFT + right) / 2
    parts.append(_text("label", middle, _HEIGHT - 6, x_label))
    parts.append(
        f'<text class="label" transform="translate(14 {(_TOP + bottom) / 2}) rotate(-90)"'
        f' text-anchor="middle">{escape(y_label)}</text>'
    )
    return parts


def _text(kind: str, x: float, y: float, text: str, anchor: str = "middle") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(text)}</text>'


def _figure(title: str, said: str, parts: Sequence[str], legend: str) -> str:
    keys = f'<ul class="legend">{legend}</ul>' if legend else ""
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
        f' aria-label="{escape(title)}. {escape(said)}">{"".join(parts)}</svg>{keys}'
        f"<figcaption>{escape(title)}. {escape(said)}.</figcaption></figure>"
    )


# Parts of a page: tables and notes as plain values for the template.

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


# The templates of pages, which escape every text.


def rendered(template: str, **values: Any) -> str:
    """A template of this folder with values; one that is missing is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("fedrec.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)
