# SPDX-License-Identifier: Apache-2.0
"""`fedrec list`: components and experiments, their papers and files."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedrec.components.registry import KINDS, Kind, available, available_names, resolve, settings_of
from fedrec.components.registry import file_of as file_of_name
from fedrec.components.sections import Section, file_of
from fedrec.config import Config
from fedrec.errors import ROOT, ExperimentError, FedrecError, unknown
from fedrec.experiment.schema import Experiment, shipped_experiments
from fedrec.runtime.files import read_toml
from simulations.cli.options import AsJson

Entry = dict[str, str]
_COLUMNS = ("name", "about", "paper", "file")
_IN_A_PIPE = 4096
_EXPECTED = "the name of a kind or a component, or a word of its description"
SECTIONS: dict[str, type[Config]] = {
    "experiment": Experiment,
    **{
        name.replace("_", "-"): cls
        for name, field in Experiment.model_fields.items()
        for cls in (field.annotation, *get_args(field.annotation))
        if isinstance(cls, type) and issubclass(cls, Config) and not issubclass(cls, Section)
    },
}
"""Tables of an experiment whose keys are fixed; the others name a component."""


def show(
    kind: Annotated[
        str | None,
        typer.Argument(help="Kind of component, such as `dataset`; or a word to search for."),
    ] = None,
    word: Annotated[
        str | None,
        typer.Argument(help="Name of a component, or a word in its name, description or paper."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List components and shipped experiments; with KIND and NAME, show the settings of one
    component.

    The kind `section` lists the tables of an experiment: `fedrec list section privacy`. A single
    argument that is not a kind is a search word: `fedrec list noisy`. In a pipe, each entry is one
    line that starts with its kind.
    """
    kinds = {known.name: known for known in KINDS}
    names = [*kinds, "experiment", "section"]
    wanted = (kind or "").removesuffix("s")
    if kind is not None and wanted not in names:
        if word is not None:
            raise unknown("kind", kind, names)
        wanted = ""
        word = kind
    if wanted == "section":
        if word not in SECTIONS:
            raise unknown("table", word or "", SECTIONS)
        _print_component(wanted, SECTIONS[word], as_json)
        return
    known = kinds.get(wanted)
    if known and word and (":" in word or word in available_names(known)):
        _print_component(wanted, resolve(known, word), as_json)
        return
    listed = {name: list(_components(kinds[name])) for name in kinds if wanted in ("", name)}
    if wanted in ("", "experiment"):
        listed["experiment"] = list(_experiments())
    if word is not None:
        entries = [entry["name"] for kind in listed.values() for entry in kind]
        listed = {name: [e for e in kind if _mentions(e, word)] for name, kind in listed.items()}
        if not any(listed.values()):
            raise unknown("name or word", word, entries if wanted else names, _EXPECTED)
    typer.echo(json.dumps(listed, indent=2)) if as_json else _print(listed)


def _print_component(kind: str, component: type, as_json: bool) -> None:
    """Print one component with its settings."""
    about = {"about": _about(component), "paper": str(getattr(component, "paper", ""))}
    entry = {"kind": kind, **about, "file": _relative(file_of(component))}
    settings = settings_of(component, nested=component is not Experiment)
    if as_json:
        tables = [asdict(setting) for setting in settings]
        typer.echo(json.dumps({**entry, "settings": tables}, indent=2))
        return
    for line in filter(None, list(entry.values())[1:]):
        typer.echo(line)
    typer.echo("" if settings else "It has no settings.")
    for setting in settings:
        bounds = f", {setting.range}" if setting.range else ""
        typer.echo(f"{setting.key} = {setting.default or 'left out'}    ({setting.type}{bounds})")
        if setting.about:
            typer.echo(f"    {setting.about}")


def _about(component: type) -> str:
    """A component's title, or the first paragraph of its docstring."""
    first = (inspect.getdoc(component) or "").split("\n\n")[0]
    return getattr(component, "title", "") or " ".join(first.split())


def _mentions(entry: Entry, word: str) -> bool:
    return any(word.lower() in entry[column].lower() for column in ("name", "about", "paper"))


def _components(kind: Kind) -> Iterator[Entry]:
    for name, component in available(kind):
        if isinstance(component, FedrecError):
            about = f"BROKEN: {component.problem}: {component.got}"
            yield _entry(name, about, "", file_of_name(kind, name))
        else:
            paper = getattr(component, "paper", "")
            yield _entry(name, _about(component), paper, file_of(component))


def _experiments() -> Iterator[Entry]:
    for name, file in shipped_experiments().items():
        table = read_toml(file, ExperimentError)
        yield _entry(name, table.get("title", ""), table.get("paper", ""), str(file))


def _entry(*texts: str) -> Entry:
    return {**dict(zip(_COLUMNS, texts, strict=True)), "file": _relative(texts[-1])}


def _relative(file: str) -> str:
    """Path relative to the project's root; absolute for a plug-in."""
    path = Path(file).resolve()
    return str(path.relative_to(ROOT)) if file and path.is_relative_to(ROOT) else file


def _print(listed: dict[str, list[Entry]]) -> None:
    """Print entries as a table; in a pipe one line each, for `grep`, with papers and files."""
    terminal = sys.stdout.isatty()
    table = Table(box=None, show_header=False, pad_edge=False)
    for column in ("kind", "name", "about", "paper", "file")[: 3 if terminal else None]:
        table.add_column(column, overflow="fold", no_wrap=column in ("kind", "name"))
    for kind, entries in listed.items():
        for entry in entries:
            cells = [kind, *(escape(entry[column]) for column in _COLUMNS)]
            table.add_row(*cells[: len(table.columns)])
    (Console() if terminal else Console(width=_IN_A_PIPE)).print(table)
