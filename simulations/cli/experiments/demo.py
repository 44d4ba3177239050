# SPDX-License-Identifier: Apache-2.0
"""`fedrec demo`: two runs and a report, offline."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simulations.cli import options

if TYPE_CHECKING:
    from fedrec.runs.result import Result


def demo(
    output: Annotated[Path | None, options.output("Folder of the runs and the report.")] = None,
) -> None:
    """Train a federated recommender without and with differential privacy on synthetic data,
    compare it with baselines, and write a report; works offline."""
    from server.callbacks.progress import Progress
    from simulations.demo import demo as demonstrate

    base = Path(os.environ.get("FEDREC_RUNS", "runs")).expanduser()
    folder = output or base / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    shown: list[Progress] = []

    def watched() -> list[Progress]:
        shown.append(Progress())
        return shown[-1:]

    def show(result: Result) -> None:
        shown[-1].close()
        _print(result)

    page = demonstrate(folder, callbacks=watched, show=show)
    typer.echo(f"report: {page}")


def _print(result: Result) -> None:
    from rich.console import Console

    from fedrec.report.summary import summary_notes, summary_table

    console = Console()
    console.print(result.experiment.title, highlight=False)
    console.print(summary_table(result))
    for line in [*summary_notes(result), *result.privacy[:3]]:
        console.print(line, highlight=False)
