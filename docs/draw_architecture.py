# SPDX-License-Identifier: Apache-2.0
"""Draws `docs/images/architecture.svg`: the packages, and one round as data flows through them.

python docs/draw_architecture.py
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

WIDTH = 960
HEIGHT = 560
INK = "#1f2933"
LINE = "#52606d"
PAPER = "#ffffff"
FILLS = {"simulations": "#e3f2fd", "server": "#fff3e0", "clients": "#e8f5e9", "fedrec": "#f3f4f6"}


class Box(NamedTuple):
    """A rectangle with a title and lines of text; position and size in pixels."""

    x: int
    y: int
    width: int
    height: int
    fill: str
    title: str
    lines: tuple[str, ...]


class Arrow(NamedTuple):
    """An arrow with a label at its middle; ends in pixels."""

    start: tuple[int, int]
    end: tuple[int, int]
    label: str


BOXES = (
    Box(30, 20, 900, 78, FILLS["simulations"], "simulations", (
        "command line, engines (serial, ray, flower), experiments, studies, deployment, attacks",
        "start the server and reach the nodes through a Flower Grid",
    )),
    Box(30, 140, 410, 176, FILLS["server"], "server", (
        "loop: one round after the other",
        "cohort: the clients of a round and their nodes",
        "extensions: privacy guard, budgets by user",
        "federation: simulated or real nodes, secure sums",
        "evaluation, checkpoints, callbacks",
    )),
    Box(520, 140, 410, 176, FILLS["clients"], "clients", (
        "app: Flower ClientApp of a node",
        "node: its clients, their model and private state",
        "round: blocks of clients, clip, sum of updates",
        "steps: local procedures, such as SGD",
        "device: a real node's data and its owner's policy",
    )),
    Box(30, 350, 410, 62, FILLS["server"], "strategies", (
        "aggregation rules; dp adds the noise around any of them",
    )),
    Box(30, 446, 900, 96, FILLS["fedrec"], "fedrec", (
        "experiment, components, protocol, runs | data, perturb | models, nn, training, kernel",
        "privacy, secure, attacks | baselines, neighbourhood, sums | metrics, evaluation, report",
        "imports none of the packages above, and never Ray",
    )),
)  # fmt: skip
ARROWS = (
    Arrow((235, 98), (235, 140), "experiment, grid"),
    Arrow((725, 98), (725, 140), "nodes"),
    Arrow((440, 190), (520, 190), "orders"),
    Arrow((520, 262), (440, 262), "sums"),
    Arrow((170, 316), (170, 350), "messages"),
    Arrow((300, 350), (300, 316), "parameters"),
    Arrow((235, 412), (235, 446), ""),
    Arrow((725, 316), (725, 446), ""),
)


def box(one: Box) -> str:
    """The SVG of a box."""
    lines = [
        f'<rect x="{one.x}" y="{one.y}" width="{one.width}" height="{one.height}" rx="6"'
        f' fill="{one.fill}" stroke="{LINE}"/>',
        f'<text x="{one.x + 14}" y="{one.y + 24}" font-weight="bold" font-size="15"'
        f' fill="{INK}">{escape(one.title)}</text>',
    ]
    for number, text in enumerate(one.lines):
        y = one.y + 46 + 22 * number
        lines.append(f'<text x="{one.x + 14}" y="{y}" fill="{INK}">{escape(text)}</text>')
    return "\n".join(lines)


def arrow(one: Arrow) -> str:
    """The SVG of an arrow and its label."""
    x1, y1 = one.start
    x2, y2 = one.end
    beside = x1 == x2
    x = (x1 + x2) / 2 + (8 if beside else 0)
    y = (y1 + y2) / 2 + (4 if beside else -7)
    anchor = "start" if beside else "middle"
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{LINE}" stroke-width="1.6"'
        ' marker-end="url(#head)"/>\n'
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="12"'
        f' fill="{LINE}">{escape(one.label)}</text>'
    )


def draw() -> str:
    """The whole picture as SVG text."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="13" role="img"'
        ' aria-label="Packages of fedrec and one round of training">',
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7"'
        ' markerHeight="7" orient="auto">'
        f'<path d="M0 0L10 5L0 10z" fill="{LINE}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>',
        *map(box, BOXES),
        *map(arrow, ARROWS),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "images" / "architecture.svg").write_text(draw(), encoding="utf-8")
