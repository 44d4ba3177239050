# SPDX-License-Identifier: Apache-2.0
"""`fedrec demo`: five runs, one table and a report, offline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulations.cli import options

if TYPE_CHECKING:
    from fedrec.runs.result import Result

_METRICS = ("hits@10",)


def demo(
    output: Annotated[Path | None, options.output("Folder of the runs and the report.")] = None,
) -> None:
    """Train PrivRec on Ray, in one stage, in two, and under differential privacy, beside linear
    systems and popularity on synthetic data; print one table and write a report. Works offline."""
    from fedrec.runs.directory import runs_directory, stamp
    from server.callbacks.progress import Progress
    from simulations.demo import demo as demonstrate

    folder = output or runs_directory() / f"demo-{stamp()}"
    shown: list[Progress] = []
    results: list[Result] = []

    def watched() -> list[Progress]:
        shown.append(Progress())
        return shown[-1:]

    def show(result: Result) -> None:
        shown[-1].close()
        results.append(result)

    rows, page = demonstrate(folder, callbacks=watched, show=show)
    _print(rows, results)
    typer.echo(f"report: {page}")


def _print(rows: Mapping[str, Mapping[str, Any]], results: list[Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    from fedrec.report.input_codes import input_codes
    from fedrec.report.privacy_total import shown_together
    from simulations.demo import ROWS

    codes = input_codes({row.system: rows[row.system]["inputs"] for row in ROWS})
    table = Table("system", *_METRICS, "epsilon", "inputs", "what it is")
    for row in ROWS:
        values = rows[row.system]
        epsilon = values["epsilon"]
        private = epsilon is not None and math.isfinite(epsilon)
        cells = [f"{values[name]:.3f}" for name in _METRICS]
        spent = f"{epsilon:.2f}" if private else "-"
        table.add_row(row.system, *cells, spent, codes.codes[row.system], row.what)
    console = Console()
    console.print(table)
    private = next(result for result in results if result.privacy)
    count = len(results[0].users)
    seed = results[0].experiment.seed
    console.print(f"The same {count} test users in each row, seed {seed}.", highlight=False)
    for line in [
        *codes.lines,
        *private.privacy[:1],
        *shown_together([one.folder for one in results]),
    ]:
        console.print(line, highlight=False)
