# SPDX-License-Identifier: Apache-2.0
"""`fedrec bench`: FedRec-Bench, a cell at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simulations.cli import options
from simulations.cli.finishing import end_with, refuse_other_page, run_tasks, wide_console

if TYPE_CHECKING:
    from simulations.bench.declaration import Bench, BenchCell


app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Dataset = Annotated[str, typer.Argument(help="Dataset; `fedrec bench list` shows all.")]
AnyDataset = Annotated[str | None, typer.Argument(help="Dataset; default: all.")]
Protocol = Annotated[
    str | None, typer.Argument(help="leave-one-out or user-holdout; default: both.")
]
System = Annotated[str | None, typer.Argument(help="System; default: all.")]
Systems = Annotated[
    list[Path] | None,
    typer.Option("--systems", help="TOML file with further systems; may repeat."),
]
ResultFiles = Annotated[
    list[Path] | None,
    typer.Argument(help="Further files of results, such as of `fedrec bench run`."),
]
_FILE_WIDTH = 160  # columns of a table in a file or a pipe


@app.command(short_help="Run cells, or what is left of them, and print their numbers.")
def run(
    dataset: Dataset,
    protocol: Protocol = None,
    system: System = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Number of seeds or folds; default: that of the bench."),
    ] = None,
    workers: Annotated[int, options.workers("runs")] = 1,
    systems: Systems = None,
    output: Annotated[
        Path | None, options.output("Folder of runs and results; default: bench in runs.")
    ] = None,
) -> None:
    """Run the cells of a dataset, protocol and system. What is done is not repeated, and what was
    interrupted continues. The numbers go to results.json in the folder that is printed last.
    `fedrec bench run synthetic` needs no data.
    """
    from simulations.bench.cell import study_of
    from simulations.bench.results import done, keep

    bench, tables = _tables(systems, dataset, protocol, system)
    path = _folder(output)
    failures: dict[str, str] = {}
    for cells in tables:
        for cell in cells:
            if why := bench.reason(cell):
                typer.echo(f"{cell.key}: {why}", err=True)
        study = study_of(bench, cells)
        _, jobs, failed = run_tasks(
            study, study.title, path / study.item, seeds or bench.seeds, workers
        )
        failures |= failed
        keep(done(bench, cells, jobs), path / "results.json")
    _print_results(bench, path / "results.json", [cell for cells in tables for cell in cells])
    typer.echo(path)
    end_with(failures)


@app.command(short_help="Compare the candidate settings of systems on validation rows.")
def tune(
    dataset: Dataset,
    protocol: Annotated[str, typer.Argument(help="leave-one-out or user-holdout.")],
    system: System = None,
    workers: Annotated[int, options.workers("runs")] = 1,
    systems: Systems = None,
    output: Annotated[
        Path | None, options.output("Folder of the runs; default: bench in runs.")
    ] = None,
) -> None:
    """Compare the candidates of systems on validation rows, best first. The place of the best on
    MovieLens-100K goes into `chosen` of a system's declaration, and holds for all datasets."""
    from simulations.bench.cell import search_of
    from simulations.studies import tables as study_tables

    bench, tables = _tables(systems, dataset, protocol, system)
    path = _folder(output)
    failures: dict[str, str] = {}
    for cells in tables:
        study = search_of(bench, cells)
        _, jobs, failed = run_tasks(study, study.title, path / study.item, 1, workers)
        failures |= failed
        found = study_tables.write(study, path / study.item, jobs, {}, quick=False).comparison
        typer.echo(study.title)
        for row in found.to_dict("records"):
            if row["metric"] != bench.searched_by:
                continue
            name, _, place = str(row["model"]).rpartition("-")
            settings = " ".join(bench.systems[name].candidates[int(place)])
            typer.echo(f"  {row['ours']:.4f}  {name}, candidate {place}: {settings}")
    typer.echo(path)
    end_with(failures)


@app.command("list", short_help="List the cells: done, missing and why, or how long they take.")
def list_cells(
    dataset: AnyDataset = None,
    protocol: Protocol = None,
    system: System = None,
    systems: Systems = None,
) -> None:
    """List cells with the command that runs each, and what is recorded of it."""
    from simulations.bench.results import recorded_cells, state

    bench, tables = _tables(systems, dataset, protocol, system)
    known = recorded_cells()
    for cells in tables:
        for cell in cells:
            typer.echo(f"fedrec bench run {' '.join(cell):44} {state(bench, cell, known)}")


@app.command(short_help="Write the page that shows and filters the results.")
def page(
    results: ResultFiles = None,
    systems: Systems = None,
    output: Annotated[Path, options.output("Output file.")] = Path("bench.html"),
) -> None:
    """Write one self-contained HTML page of all cells: the recorded ones, those of further files of
    results, and those that are missing, with the reason."""
    from fedrec.runtime.files import write_atomically
    from simulations.bench.declaration import bench as declared
    from simulations.bench.page.page import rendered
    from simulations.bench.results import recorded_cells

    refuse_other_page(output)
    bench = declared(*(systems or ()))
    write_atomically(output, rendered(bench, recorded_cells(*(results or ()))))
    typer.echo(output)


@app.command(short_help="Check a file of results: run a sample again and compare.")
def check(
    results: Annotated[
        Path, typer.Argument(help="File of results, such as of a contributed system.")
    ],
    cells: Annotated[int, typer.Option(min=0, help="Number of cells that are run again.")] = 1,
    draw: Annotated[int, typer.Option(min=0, help="Seed of the draw of cells and seeds.")] = 0,
    systems: Systems = None,
    output: Annotated[
        Path | None, options.output("Folder of the runs; default: bench-check in runs.")
    ] = None,
) -> None:
    """Check results: their form, the probe, and cells drawn at random, of each of which one seed is
    run again and compared number by number."""
    from fedrec.rng import stream
    from simulations.bench.check import refuse_unsound, rerun, sample
    from simulations.bench.declaration import bench as declared
    from simulations.bench.results import results as read

    bench = declared(*(systems or ()))
    known = read(results)
    refuse_unsound(bench, known)
    path = _folder(output, "bench-check")
    differs = False
    for cell in sample(known, cells, draw):
        seed = int(stream(draw, "bench-check", 1).integers(known[cell].seeds))
        place = path / f"{'-'.join(cell)}-seed{seed}"
        lines = list(rerun(bench, cell, known[cell], seed, place))
        typer.echo(f"{cell.key}, seed {seed}: {'differs' if lines else 'as recorded'}")
        for line in lines:
            typer.echo(f"  {line}")
        differs |= bool(lines)
    if differs:
        raise typer.Exit(1)


@app.command(short_help="Put results into those that come with fedrec.")
def record(results: Annotated[list[Path], typer.Argument(help="Files of results.")]) -> None:
    """Put files of results into those that come with fedrec, in place of what these had of the same
    cells. For checkouts."""
    from fedrec.runtime.files import read_json
    from simulations.bench.check import refuse_unsound
    from simulations.bench.declaration import bench as declared
    from simulations.bench.results import FILE, keep
    from simulations.bench.results import results as read

    for file in results:
        refuse_unsound(declared(), read(file))
        found = read_json(file)
        keep(found, FILE)
        typer.echo(f"{len(found)} cells of {file} are in {FILE}")


def _tables(
    systems: Sequence[Path] | None, *asked: str | None
) -> tuple[Bench, list[list[BenchCell]]]:
    """The bench, and the cells that are asked for, those of one dataset and protocol together."""
    from itertools import groupby

    from simulations.bench.declaration import bench as declared

    bench = declared(*(systems or ()))
    return bench, [list(own) for _, own in groupby(bench.cells(*asked), lambda cell: cell[:2])]


def _folder(output: Path | None, name: str = "bench") -> Path:
    from fedrec.runs.ids import runs_directory

    return (output or runs_directory() / name).expanduser()


def _print_results(bench: Bench, file: Path, cells: Sequence[BenchCell]) -> None:
    from rich.table import Table

    from simulations.bench.results import NUMBERS, number_text, results

    known = results(file)
    console = wide_console(_FILE_WIDTH)
    for dataset, protocol in dict.fromkeys((cell.dataset, cell.protocol) for cell in cells):
        title = f"{bench.datasets[dataset].title}, {bench.protocols[protocol].title.lower()}"
        table = Table("system", title=title, title_justify="left", box=None)
        for name in NUMBERS:
            table.add_column(name, justify="right")
        for cell in cells:
            if cell in known and cell[:2] == (dataset, protocol):
                row = known[cell].rows[cell.system]
                title = bench.systems[cell.system].title
                table.add_row(title, *(number_text(name, row[name]) for name in NUMBERS))
        console.print(table)
