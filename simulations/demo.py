# SPDX-License-Identifier: Apache-2.0
"""The demonstration: PrivRec by REPTILE on Ray, in one stage, in two, and under user-level
differential privacy, beside linear systems and popularity, in one table and a report.

All runs are of the same synthetic users, and test the same of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrec.experiment.loading import load
from fedrec.report.inputs import system_inputs
from fedrec.report.page.page import report
from fedrec.report.rows import epsilon_of, system_rows
from fedrec.runs.result import Result
from fedrec.runtime.files import write_atomically
from server.callbacks.base import Callback
from simulations.runner import run


@dataclass(frozen=True)
class DemoRow:
    """One system of the demonstration.

    Attributes:
        system: its name in the table.
        experiment: the shipped experiment that has it.
        label: of the baseline; None: the federated system.
        what: what it is, in one line.
    """

    system: str
    experiment: str
    label: str | None
    what: str


ROWS = (
    DemoRow("popularity", "linear-synthetic", "popularity", "one list for everybody"),
    DemoRow("PrivRec", "privrec-synthetic", None, "REPTILE, adapts on device"),
    DemoRow("PrivRec, two stages", "privrec-two-stage-synthetic", None, "after self-supervision"),
    DemoRow("linear", "linear-synthetic", None, "two sums over devices"),
    DemoRow("EASE, centralised", "linear-synthetic", "ease", "the same, data central"),
    DemoRow("private popularity", "linear-private-synthetic", "dp-popularity", "noisy counts"),
    DemoRow("DP-PrivRec", "dp-privrec-synthetic", None, "two stages under noise"),
    DemoRow("linear, private", "linear-private-synthetic", None, "two noisy sums"),
)


def demo(
    output: Path,
    *,
    callbacks: Callable[[], Sequence[Callback]] = list,
    overrides: Sequence[str] = (),
    show: Callable[[Result], None] = lambda result: None,
) -> tuple[dict[str, dict[str, Any]], Path]:
    """Run the experiments and write the report.

    Args:
        output: a folder; each run gets a folder below it.
        callbacks: makes those of a run.
        overrides: texts such as `"dataset.users=400"`, for all experiments.
        show: called with each result.

    Returns:
        Metrics of each row of `ROWS`, with `epsilon` (None: not private) and `inputs` (what it had
        to learn from), by system; and the page, `report.html` in `output`.

    Raises:
        RunError: there are runs in `output` already.
    """
    results: dict[str, Result] = {}
    for name in dict.fromkeys(row.experiment for row in ROWS):
        settings = [*_two_nodes(name), *overrides]
        results[name] = run(name, settings, output=output / name, callbacks=callbacks())
        show(results[name])
    page = output / "report.html"
    title = "Federated recommenders, with and without differential privacy"
    write_atomically(page, report(list(results.values()), title=title))
    return table(results), page


def _two_nodes(name: str) -> list[str]:
    """Settings of an experiment on Ray: two nodes also where one would be faster, as it is for such
    short runs."""
    return ["engine.nodes=2"] if load(name).engine.name == "ray" else []


def table(results: Mapping[str, Result]) -> dict[str, dict[str, Any]]:
    """Metrics of each row of `ROWS`, with `epsilon` and `inputs`, by system; results are by
    experiment."""
    rows = {}
    for row in ROWS:
        result = results[row.experiment]
        label = row.label or result.experiment.name
        values = system_rows(result)[label]
        rows[row.system] = {
            **values,
            "epsilon": epsilon_of(result, label),
            "inputs": system_inputs(result).get(label),
        }
    return rows
