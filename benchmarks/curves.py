# SPDX-License-Identifier: Apache-2.0
"""Curves side by side as one SVG file, the same bytes for the same numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: title above it.
        across: label of the horizontal axis.
        lines: points of each curve by its name, each `(x, y)` or, with a label, `(x, y, text)`.
        levels: values that do not depend on x, by name; drawn as dashed lines.
        logarithmic: whether the horizontal axis is.
        most: larger values are drawn at the upper edge; None: no limit.
    """

    title: str
    across: str
    lines: Mapping[str, Sequence[tuple]]
    levels: Mapping[str, float] = field(default_factory=dict)
    logarithmic: bool = False
    most: float | None = None


def write_panels(file: Path, panels: Sequence[Panel]) -> None:
    """Draw panels side by side; a name has the same colour in all of them, and one legend is for
    all.

    Args:
        file: what is written, an SVG.
        panels: from left to right.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    fixed = {"svg.hashsalt": file.name, "svg.fonttype": "none", "font.size": 8, "figure.dpi": 100}
    with matplotlib.rc_context(fixed):
        figure, row = pyplot.subplots(
            1,
            len(panels),
            figsize=(4.2 * len(panels) + 1.8, 3.6),
            squeeze=False,
            layout="constrained",
        )
        names = dict.fromkeys(name for one in panels for name in (*one.lines, *one.levels))
        colours = {name: f"C{number % 10}" for number, name in enumerate(names)}
        for axes, panel in zip(row[0], panels, strict=True):
            _draw(axes, panel, colours)
        handles = {
            label: handle
            for axes in row[0]
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            list(handles.values()), list(handles), loc="outside right upper", frameon=False
        )
        figure.savefig(file, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


def _draw(axes, panel: Panel, colours: Mapping[str, str]) -> None:
    for name, points in panel.lines.items():
        placed = sorted(points, key=lambda point: point[:2])
        heights = [
            point[1] if panel.most is None else min(point[1], panel.most) for point in placed
        ]
        axes.plot(
            [point[0] for point in placed], heights, "o-", ms=3, lw=1.2, c=colours[name], label=name
        )
        for (x, _, *text), y in zip(placed, heights, strict=True):
            for one in text:
                axes.annotate(
                    one, (x, y), (3, 3), textcoords="offset points", fontsize=6, color=colours[name]
                )
    for name, value in panel.levels.items():
        axes.axhline(value, ls="--", lw=1, c=colours[name], label=name)
    if panel.logarithmic:
        axes.set_xscale("log")
        ticks = sorted({point[0] for points in panel.lines.values() for point in points})
        axes.set_xticks(ticks, [f"{one:g}" for one in ticks])
        axes.minorticks_off()
    axes.set_title(panel.title)
    axes.set_xlabel(panel.across)
    axes.grid(alpha=0.3)
