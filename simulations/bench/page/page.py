# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page of all cells, which filters and sorts them; no network, no other
files. Without scripts it shows everything.

Its style is that of `fedrec report` (`fedrec/report/page/page.css`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fedrec.report.inputs import Inputs
from simulations.bench.cell import DISCOUNTED, GAP, PROBE, K
from simulations.bench.declaration import Bench, BenchCell
from simulations.bench.results import NUMBERS, at_chance, number_text, state
from simulations.reproduce.recorded import Number, Recorded

_HEADS = {
    f"hits@{K}": f"Hits@{K}",
    DISCOUNTED: f"Discounted hits@{K}",
    f"hits-of-100@{K}": f"Hits@{K} of 100",
    f"ndcg-of-100@{K}": f"NDCG@{K} of 100",
    f"coverage@{K}": "Coverage",
    f"gini@{K}": "Gini",
    PROBE: "Probe",
}


@dataclass(frozen=True)
class PageNumber:
    """A number, its interval, and what sorts it, as texts."""

    value: str
    range: str
    key: str


@dataclass(frozen=True)
class PageCell:
    """A cell of the bench on the page.

    Attributes:
        cell: its names.
        titles: of dataset, protocol and system.
        numbers: in the order of the columns; none where the cell is missing.
        state: how many seeds, or why it is missing.
        missing: whether it has no results.
        facts: what else is said of it, name and text.
    """

    cell: BenchCell
    titles: tuple[str, str, str]
    numbers: tuple[PageNumber, ...]
    state: str
    missing: bool
    facts: tuple[tuple[str, str], ...]


def rendered(bench: Bench, known: Mapping[BenchCell, Recorded]) -> str:
    """The page.

    Args:
        bench: the declaration.
        known: the results of cells.
    """
    from jinja2 import Environment, PackageLoader, PrefixLoader, StrictUndefined

    import fedrec

    cells = [_page_cell(bench, cell, known) for cell in bench.cells() if _shown(cell, known)]
    loaders = {
        "report": PackageLoader("fedrec.report", "page"),
        "bench": PackageLoader("simulations.bench", "page"),
    }
    environment = Environment(
        loader=PrefixLoader(loaders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = {
        "version": fedrec.__version__,
        "bench": bench,
        "cells": cells,
        "done": sum(not cell.missing for cell in cells),
        "heads": [_HEADS.get(name, name.capitalize()) for name in NUMBERS],
        "datasets": {cell.cell.dataset: cell.titles[0] for cell in cells},
        "protocols": {cell.cell.protocol: cell.titles[1] for cell in cells},
        "systems": {cell.cell.system: cell.titles[2] for cell in cells},
    }
    return environment.get_template("bench/page.html.j2").render(page=page)


def _shown(cell: BenchCell, known: Mapping[BenchCell, Recorded]) -> bool:
    """Synthetic data, on which everybody can try the bench, are shown where they have results."""
    return cell.dataset != "synthetic" or cell in known


def _page_cell(bench: Bench, cell: BenchCell, known: Mapping[BenchCell, Recorded]) -> PageCell:
    system = bench.systems[cell.system]
    titles = (
        bench.datasets[cell.dataset].title,
        bench.protocols[cell.protocol].title,
        system.title,
    )
    record = known.get(cell)
    row = {} if record is None else record.rows[cell.system]
    own = [
        ("Paper", system.paper),
        ("Stays on the device", system.private),
        ("Users who were in no round", system.serves.get(cell.protocol, "")),
    ]
    more = (
        _of_record(cell, record) if record else [("Command", f"fedrec bench run {' '.join(cell)}")]
    )
    return PageCell(
        cell,
        titles,
        tuple(_page_number(name, row[name]) for name in NUMBERS) if row else (),
        state(bench, cell, known),
        record is None,
        tuple((name, text) for name, text in [*more, *own] if text),
    )


def _of_record(cell: BenchCell, record: Recorded) -> list[tuple[str, str]]:
    row = record.rows[cell.system]
    gaps = {name.removeprefix(GAP): one for name, one in row.items() if name.startswith(GAP)}
    gap_text = "; ".join(f"{name} {one.text()}" for name, one in gaps.items())
    probe = "at chance" if at_chance(row[PROBE]) else "NOT at chance: held-out items leak"
    version = f"fedrec {record.fedrec}" + (f", {record.package}" if record.package else "")
    return [
        ("Command", record.command),
        ("Commit", record.commit or "not from a checkout"),
        ("Machine", f"{record.machine}, {record.date}, {version}"),
        ("Inputs", _input_text(record.inputs.get(cell.system))),
        (f"Gaps of discounted hits@{K} between groups", gap_text),
        ("Probe without a model", f"{row[PROBE].text()}, {probe}"),
    ]


def _input_text(inputs: Inputs | None) -> str:
    if inputs is None:
        return "not stated"
    features = [f"users' {one}" for one in inputs.user_features]
    features += [f"items' {one}" for one in inputs.item_features]
    parts = [f"features: {', '.join(features)}" if features else "who had which item alone"]
    if inputs.test_users:
        parts.append("known rows of test users in training")
    if inputs.client_rounds is not None:
        parts.append(f"{inputs.client_rounds:,} client-rounds")
    parts.append(f"{inputs.settings_tried or 1} settings tried")
    return "; ".join(parts)


def _page_number(name: str, number: Number) -> PageNumber:
    plain = number_text(name, number)
    whole = number_text(name, number, interval=True)
    key = "" if math.isnan(number.mean) else f"{number.mean:.6g}"
    return PageNumber(plain, whole.removeprefix(plain).strip(" ()"), key)
