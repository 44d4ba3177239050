# SPDX-License-Identifier: Apache-2.0
"""The demonstration: PrivRec by REPTILE on Ray, in one stage, two stages and with user-level
differential privacy, and linear systems and popularity, in a table and a report. All runs have the
same synthetic users and test users.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrec.experiment.loading import load
from fedrec.report.comparison import epsilon_of, system_rows
from fedrec.report.inputs import system_inputs
from fedrec.report.page.sections import report
from fedrec.runs.result import Result
from fedrec.runtime.files import write_atomically
from server.callbacks.base import Callback
from simulations.runner import run


@dataclass(frozen=True)
class _DemoRow:
    """One system of the demonstration.

    Attributes:
        system: its name in the table.
        experiment: the shipped experiment that has it.
        label: label of the baseline; None: the federated system.
        what: description in one line.
    """

    system: str
    experiment: str
    label: str | None
    what: str


ROWS = (
    _DemoRow("popularity", "linear-synthetic", "popularity", "one list for all users"),
    _DemoRow("PrivRec", "privrec-synthetic", None, "REPTILE, adapts on device"),
    _DemoRow("PrivRec, two stages", "privrec-two-stage-synthetic", None, "after self-supervision"),
    _DemoRow("linear", "linear-synthetic", None, "two sums over devices"),
    _DemoRow("EASE, centralised", "linear-synthetic", "ease", "the same with central data"),
    _DemoRow("private popularity", "linear-private-synthetic", "dp-popularity", "noisy counts"),
    _DemoRow("DP-PrivRec", "dp-privrec-synthetic", None, "two stages under noise"),
    _DemoRow("linear, private", "linear-private-synthetic", None, "two noisy sums"),
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
        callbacks: creates the callbacks of a run.
        overrides: texts such as `"dataset.users=400"`, for all experiments.
        show: called with each result.

    Returns:
        Metrics of each row of `ROWS`, with `epsilon` (None: not private) and `inputs` (training
        inputs), by system; and the path of the report, `report.html` in `output`.

    Raises:
        RunError: `output` has runs.
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
    """Overrides for two nodes on Ray, although one node is faster for such short runs."""
    return ["engine.nodes=2"] if load(name).engine.name == "ray" else []


def table(results: Mapping[str, Result]) -> dict[str, dict[str, Any]]:
    """Metrics of each row of `ROWS` by system, with `epsilon` and `inputs`, from results by
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
