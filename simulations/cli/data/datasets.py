# SPDX-License-Identifier: Apache-2.0
"""`fedrec data`: list, fetch, import and inspect datasets. Data are downloaded only by `fetch`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simulations.cli import options

if TYPE_CHECKING:
    from fedrec.data.reader import Reader

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


def _names(incomplete: str) -> list[str]:
    from fedrec.components.registry import DATASET, builtin_names

    return [name for name in builtin_names(DATASET) if name.startswith(incomplete)]


Name = Annotated[
    str, typer.Argument(help="Name of a dataset, see `fedrec data list`.", autocompletion=_names)
]
Settings = Annotated[
    list[str] | None, options.overrides("Setting of the reader, such as unit=pairs; may repeat.")
]


@app.command("list")
def list_datasets() -> None:
    """List the datasets and whether their files are present."""
    from rich.console import Console
    from rich.table import Table

    from fedrec.components.registry import DATASET, available
    from fedrec.data.reader import data_directory

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("name", "here", "fetch", "about"):
        table.add_column(column, overflow="fold")
    for name, found in available(DATASET):
        if isinstance(found, type):
            reader: Reader = found(name, found.Config())
            fetchable = "yes" if reader.source is not None and reader.source.archives else "no"
            table.add_row(name, _presence(reader), fetchable, reader.title)
    console = Console()
    console.print(table)
    console.print(f"data directory: {data_directory()}", highlight=False)


@app.command(short_help="Download a dataset from its publisher and verify it.")
def fetch(name: Name) -> None:
    """Download a dataset from its publisher, verify size and SHA-256, and unpack it."""
    from fedrec.data.fetching.download import fetch as download
    from fedrec.errors import DataError

    reader = _reader(name, [])
    source = reader.source
    if source is None or not source.archives:
        page = source.page if source is not None else "the owner of the data"
        raise DataError(
            f"{name!r} has no download that fedrec could check",
            expected="a dataset with a published archive",
            got=name,
            fix=f"get it from {page}, then: fedrec data import {name} PATH",
        )
    typer.echo(f"{name}: {source.licence} ({source.page})", err=True)
    typer.echo(
        _with_bar(
            lambda progress: download(name, source, reader.default_folder(), progress=progress)
        )
    )


@app.command("import")
def import_(
    name: Name,
    path: Annotated[Path, typer.Argument(help="Local archive, folder or file with the data.")],
) -> None:
    """Verify a local archive or folder and install its dataset."""
    from fedrec.data.fetching.importing import import_data

    typer.echo(import_data(name, path))


@app.command()
def info(name: Name, settings: Settings = None) -> None:
    """Read and verify a dataset, and print its statistics."""
    import numpy as np

    reader = _reader(name, settings or [])
    data = reader.described(reader.read())
    cells = data.num_users * data.num_items
    typer.echo(
        f"{name}: {data.num_users:,} users, {data.num_items:,} items, {len(data):,} interactions"
    )
    typer.echo(
        f"density {len(data) / max(cells, 1):.4%}, times"
        f" {'yes' if data.times is not None else 'no'}"
    )
    if data.ratings is not None:
        values, counts = np.unique(data.ratings, return_counts=True)
        shown = ", ".join(
            f"{value:g}: {count:,}" for value, count in zip(values[:12], counts[:12], strict=True)
        )
        typer.echo(f"ratings {shown}{', ...' if len(values) > 12 else ''}")
    for owner, table in (("user", data.user_features), ("item", data.item_features)):
        for feature in table.features:
            typer.echo(
                f"{owner} feature {feature.name}: {len(feature.categories)} categories, up to"
                f" {feature.width} each"
            )
        for text in table.texts:
            typer.echo(f"{owner} text {text.name}: {len(text.categories):,} words")
        for one in table.vectors:
            width = one.values.shape[1]
            typer.echo(f"{owner} vectors {one.name}: width {width}, {one.known.sum():,} known")
    typer.echo(f"fingerprint {data.fingerprint()}")


def _reader(name: str, settings: list[str]) -> Reader:
    from fedrec.components.registry import DATASET, resolve
    from fedrec.experiment.overrides import override

    table: dict = {}
    for text in settings:
        table = override(table, text)
    cls = resolve(DATASET, name)
    return cls(name, cls.Config.parse(table, at="dataset"))


def _presence(reader: Reader) -> str:
    if reader.source is None:
        return "-"
    return "yes" if reader.default_folder().exists() else "no"


def _with_bar(work):
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("download")
        return work(lambda done, size: bars.update(task, completed=done, total=size))
