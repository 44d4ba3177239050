# SPDX-License-Identifier: Apache-2.0
"""Draws `docs/images/report.svg`, the picture at the top of README.md: results and distributions of
a real run, by the functions and in the colours of `fedrec report`.

    fedrec run --data ratings.csv --system linear --output runs/a
    python docs/draw_report.py runs/a "what the data are" docs/images/report.svg
"""

from __future__ import annotations

import re
import sys
from html import escape
from importlib.resources import files
from pathlib import Path

import numpy as np

from fedrec.report.comparison import bootstrap_intervals, named
from fedrec.report.page.sections import distributions
from fedrec.report.summary import deciding_metric, early_stopping_line
from fedrec.runs.folder import Result, RunFolder

WIDTH = 960
ROW = 34
LEFT = 190
BAR = 430  # pixels
_SVG = re.compile(r"<svg viewBox=.*?</svg>", re.S)
_RULES = (".grid {", ".tick", ".c", ".b", ".line")
_COLOUR = re.compile(r"(--\w+): (#\w+);")


def draw(result: Result, data: str) -> str:
    """The picture as SVG text.

    Args:
        result: of a finished run with rankings.
        data: what the data are, in a few words.
    """
    metric = deciding_metric(result)
    if metric is None:
        raise SystemExit("this picture is of hit rates; the run has none")
    systems = {result.experiment.name: result.users, **result.baseline_users}
    values = [table[metric].dropna().to_numpy(dtype=np.float64) for table in systems.values()]
    bars = _bars(list(systems), values)
    top = 92 + ROW * len(systems) + 30
    charts = [_SVG.findall(chart)[0] for chart in distributions(named([result]))[:2]]
    parts = [
        _text(24, 36, f"{result.experiment.title or result.experiment.name}", "head"),
        _text(24, 60, f"{data}; {metric} of {len(values[0]):,} test users, 95% intervals", "tick"),
        *bars,
    ]
    names = (f"{metric} of single users: {result.experiment.name}", "popularity")
    for place, (chart, name) in enumerate(zip(charts, names, strict=False)):
        x = 24 + place * (WIDTH // 2 - 12)
        parts.append(_text(x, top + 14, name, "name"))
        size = f'<svg x="{x}" y="{top + 22}" width="440" height="238" viewBox='
        parts.append(chart.replace("<svg viewBox=", size, 1))
    height = top + 294
    parts.append(_text(24, height - 12, early_stopping_line(result), "tick"))
    return _coloured(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        f' font-family="sans-serif"><title>{escape(data)}: results of a run</title>'
        f"<style>{_style()}</style>"
        f'<rect width="{WIDTH}" height="{height}" fill="var(--page)"/>{"".join(parts)}</svg>\n'
    )


def _bars(names: list[str], values: list[np.ndarray]) -> list[str]:
    """A bar per system with its interval."""
    intervals = bootstrap_intervals(values)
    scale = BAR / max(high for _, high in intervals)
    parts = []
    for place, (name, own, (low, high)) in enumerate(zip(names, values, intervals, strict=True)):
        y = 84 + place * ROW
        mean = float(own.mean())
        start = LEFT + low * scale
        end = LEFT + high * scale
        colour = "b0" if place == 0 else "b7"
        parts += [
            _text(LEFT - 12, y + 17, name, "name end"),
            f'<rect class="{colour}" x="{LEFT}" y="{y}" width="{mean * scale:.1f}" height="22"/>',
            f'<path class="whisker" d="M{start:.1f} {y + 11}H{end:.1f}"/>',
            _text(LEFT + BAR + 24, y + 17, f"{mean:.4f}   {low:.4f} to {high:.4f}", "name"),
        ]
    return parts


def _text(x: int, y: int, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>'


def _coloured(picture: str) -> str:
    """The picture with the light colours of the page in place of their names: renderers of images
    other than browsers do not know CSS variables."""
    colours: dict[str, str] = {}
    for name, value in _COLOUR.findall(_page_style()):
        colours.setdefault(name, value)  # the light ones stand first
    return re.sub(r"var\((--\w+)\)", lambda found: colours[found[1]], picture)


def _page_style() -> str:
    return (files("fedrec.report.page") / "page.css").read_text(encoding="utf-8")


def _style() -> str:
    """Those of the report's rules that charts use."""
    lines = _page_style().splitlines()
    kept = [line for line in lines if line.startswith(_RULES) and line.endswith("}")]
    own = (
        ".head { fill: var(--ink); font-size: 22px; font-weight: 600; }"
        " .name { fill: var(--ink); font-size: 15px; } .end { text-anchor: end; }"
        " .whisker { stroke: var(--ink); stroke-width: 2; }"
    )
    return "\n".join([*kept, own])


def main() -> None:
    """Draw the run that is named."""
    folder, data, file = sys.argv[1:]
    Path(file).write_text(draw(RunFolder(Path(folder)).read_result(), data), encoding="utf-8")


if __name__ == "__main__":
    main()
