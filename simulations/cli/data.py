# SPDX-License-Identifier: Apache-2.0
"""Commands about data: `fedrec data`, `fedrec perturb` and `fedrec synthesise`."""

import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.console import Console
from rich.progress import DownloadColumn, Progress
from rich.table import Table

from fedrec.components.registry import DATASET, available, resolve
from fedrec.data.download import fetch as download
from fedrec.data.download import import_data
from fedrec.data.perturbation import Perturbed, perturbation_of
from fedrec.data.population import Population
from fedrec.data.reader import Reader, data_directory
from fedrec.errors import DataError, ExperimentError
from fedrec.experiment.schema import Experiment, load
from fedrec.perturb.noisy_cooccurrence import disclosure
from fedrec.perturb.substitutes import FIGURE, measured_similarity
from fedrec.runs.folder import RunFolder
from fedrec.runs.ids import check_ids
from fedrec.runtime.files import write_atomically
from simulations.cli import options
from simulations.cli.options import Named

# `fedrec data`. Data are downloaded only by `fetch`.

app = options.group("List, fetch, import and inspect datasets, and write the split of a run.")


Name = Annotated[str, typer.Argument(help="Name of a dataset, see `fedrec data list`.")]


@app.command("list")
def _list() -> None:
    """List the datasets and whether their files are present."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("name", "here", "fetch", "about"):
        table.add_column(column, overflow="fold")
    for name, cls in available(DATASET):
        if isinstance(cls, type):
            reader = _reader(cls, name)
            source = reader.source
            here = "yes" if source is not None and reader.default_folder().exists() else "no"
            fetchable = "yes" if source is not None and source.archive else "no"
            table.add_row(name, "-" if source is None else here, fetchable, reader.title)
    console = Console()
    console.print(table)
    console.print(f"data directory: {data_directory()}", highlight=False)


@app.command("fetch", short_help="Download a dataset from its publisher and verify it.")
def _fetch(name: Name) -> None:
    """Download a dataset from its publisher, verify size and SHA-256, and unpack it."""
    reader = _reader(resolve(DATASET, name), name)
    source = reader.source
    if source is None:
        raise DataError(f"{name!r} is not a published dataset", fix="set dataset.path to your file")
    typer.echo(f"{name}: {source.licence} ({source.page})", err=True)
    columns = (*Progress.get_default_columns(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("download")

        def progress(done: int, size: int) -> None:
            bars.update(task, completed=done, total=size)

        typer.echo(download(name, source, reader.default_folder(), progress=progress))


@app.command("import")
def _import(
    name: Name,
    path: Annotated[Path, typer.Argument(help="Local archive, folder or file with the data.")],
) -> None:
    """Verify a local archive or folder and install its dataset."""
    typer.echo(import_data(name, path))


@app.command("info")
def _info(name: Name) -> None:
    """Read and verify a dataset, and print its statistics."""
    reader = _reader(resolve(DATASET, name), name)
    data = reader.described(reader.read())
    size = f"{data.num_users:,} users, {data.num_items:,} items, {len(data):,} interactions"
    density = len(data) / max(data.num_users * data.num_items, 1)
    typer.echo(f"{name}: {size}")
    typer.echo(f"density {density:.4%}, times {'yes' if data.times is not None else 'no'}")
    if data.ratings is not None:
        counts = pd.Series(data.ratings).value_counts().sort_index()
        shown = [f"{value:g}: {count:,}" for value, count in counts.head(12).items()]
        typer.echo(f"ratings {', '.join(shown)}{', ...' if len(counts) > 12 else ''}")
    for owner, table in (("user", data.user_features), ("item", data.item_features)):
        for feature in (*table.features, *table.texts):
            typer.echo(f"{owner} feature {feature.name}: {len(feature.categories):,} categories")
        for vectors in table.vectors:
            typer.echo(f"{owner} vectors {vectors.name}: {vectors.known.sum():,} items with one")
    typer.echo(f"fingerprint {data.fingerprint()}")


def _reader(cls: type[Reader], name: str) -> Reader:
    """The reader of a dataset, with its default settings."""
    return cls(name, cls.Config())


# Output tables: CSV or Parquet, by the file's extension.

_PARQUET = (".parquet", ".pq")


def check_output(output: Path) -> None:
    """Check that an output file has a known, writable format.

    Raises:
        ExperimentError: the format is unknown or needs a missing package, or the path is a folder.
    """
    options.check_suffix(output, ".csv", *_PARQUET)
    if output.suffix.lower() in _PARQUET and find_spec("pyarrow") is None:
        raise ExperimentError(
            "writing Parquet needs pyarrow",
            fix="pip install 'fedrec[parquet]', or --output table.csv",
        )


def write_table(table: pd.DataFrame, output: Path, csv: str | None = None) -> None:
    """Write a table atomically.

    Args:
        table: its rows.
        output: the file, see `check_output`.
        csv: the text of a CSV file; default: that of the table.
    """
    if output.suffix.lower() == ".csv":
        write_atomically(output, table.to_csv(index=False) if csv is None else csv)
    else:
        write_atomically(output, table.to_parquet(index=False))


Overrides = Annotated[
    list[str] | None, options.overrides("Override a key: --set perturb.budget=0.3")
]


_TITLES = {
    "kept": "retained, share of the real rows that are in the table",
    "replaced": "replaced, share of the table's rows whose item the user does not have",
    "linked": "linked, share of users identified by their profile in the table",
    "chance": "linked by guessing",
    "recovered": "original item inferred by a trained attacker, share of replaced rows",
    "frequent": "original item inferred from frequencies alone",
}


def perturb(experiment: Named, overrides: Overrides = None) -> None:
    """Apply an experiment's perturbation without training, and report its effect and its
    guarantee."""
    loaded = load(experiment, overrides or [])
    population, perturbed = _perturbed_population(loaded)
    figures = {
        "clients": len(population.training_clients),
        "rows": len(population.partition.train_rows),
        "learned rows": len(perturbed.rows),
    }
    _print_figures(loaded, {**figures, **perturbed.figures})


def synthesise(
    experiment: Named,
    output: Annotated[Path, options.output("Output file: .csv or .parquet.")],
    overrides: Overrides = None,
) -> None:
    """Write the synthetic training rows of an experiment with a table [perturb], and measure what
    they reveal about the real rows.

    For example: fedrec synthesise upc-sdg-office --output synthetic.csv
    """
    check_output(output)
    loaded = load(experiment, overrides or [])
    population, perturbed = _perturbed_population(loaded)
    real = population.interactions.with_rows(population.partition.train_rows)
    write_table(perturbed.rows.frame(), output)
    measured = dict(perturbed.figures)
    if FIGURE not in measured and (alike := measured_similarity(real, perturbed, loaded.seed)):
        measured[FIGURE] = alike
    figures = {
        "table": str(output),
        "rows": len(perturbed.rows),
        "training rows": len(real),
        **disclosure(real, perturbed, loaded.seed),
        **measured,
    }
    _print_figures(loaded, {_TITLES.get(name, name): value for name, value in figures.items()})


def _perturbed_population(experiment: Experiment) -> tuple[Population, Perturbed]:
    """The population of an experiment, and its perturbed training rows.

    Raises:
        ExperimentError: the experiment has no perturbation.
    """
    if experiment.perturb is None:
        raise ExperimentError(
            f"experiment {experiment.name!r} has no perturbation",
            fix="--set perturb.name=random-replacement, or another of `fedrec list perturbation`",
        )
    population = Population.of(experiment)
    return population, population.perturbed  # type: ignore[return-value]


def _print_figures(experiment: Experiment, figures: Mapping[str, Any]) -> None:
    """Print counts, shares and spreads line by line, then the perturbation in words."""
    for line in (*_lines(figures), *perturbation_of(experiment).words()):  # type: ignore[union-attr]
        typer.echo(line)


def _lines(figures: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in figures.items():
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{name}: {_shown(value)}"


def _shown(value: Any) -> str:
    if isinstance(value, float) and math.isnan(value):
        return "nothing to measure"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@app.command("split", short_help="Write the rows of a run with their split.")
def _split(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    output: Annotated[Path, options.output("Output file: .csv or .parquet.")],
) -> None:
    """Write the rows of a run with the part of each: training, known (of a user who does not
    train), validation or test.

    For example: fedrec data split runs/films -o split.csv
    """
    check_output(output)
    folder = RunFolder(run)
    population = Population.of(folder.experiment)
    rows = population.interactions
    check_ids(folder.path, rows)
    table = rows.frame()
    table["part"] = population.partition.parts(rows)
    counts = table["part"].value_counts()
    write_table(table.loc[table["part"] != ""], output)
    typer.echo(
        ", ".join(f"{count:,} {part or 'left out'}" for part, count in counts.items()), err=True
    )
    typer.echo(output)
