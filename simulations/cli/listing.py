# SPDX-License-Identifier: Apache-2.0
"""`fedrec list`: components and experiments, their papers and files."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedrec.components.errors import file_of
from fedrec.components.registry import (
    KINDS,
    Kind,
    available,
    available_names,
    resolve,
    settings_of,
)
from fedrec.components.registry import file_of as file_of_name
from fedrec.config import Config, did_you_mean
from fedrec.devices import DevicesConfig
from fedrec.errors import ROOT, ExperimentError, FedrecError
from fedrec.experiment.loading import shipped_experiments
from fedrec.experiment.schema import (
    CheckpointConfig,
    EngineConfig,
    EvaluationConfig,
    Experiment,
)
from fedrec.experiment.tables import (
    AdversaryConfig,
    AsynchronousConfig,
    ClosingConfig,
    EarlyStoppingConfig,
    SecureAggregationConfig,
)
from fedrec.privacy.config import PrivacyConfig
from fedrec.runtime.files import read_toml
from simulations.cli.options import AsJson

Entry = dict[str, str]
_COLUMNS = ("name", "about", "paper", "file")
_WITH_PAPER = 120  # columns of a terminal
_WITH_FILE = 180
SECTIONS: dict[str, type[Config]] = {
    "experiment": Experiment,
    "evaluation": EvaluationConfig,
    "privacy": PrivacyConfig,
    "adversary": AdversaryConfig,
    "devices": DevicesConfig,
    "closing": ClosingConfig,
    "asynchronous": AsynchronousConfig,
    "engine": EngineConfig,
    "checkpoint": CheckpointConfig,
    "early-stopping": EarlyStoppingConfig,
    "secure-aggregation": SecureAggregationConfig,
}
"""Tables of an experiment whose keys are fixed; the others name a component."""


def show(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="Kind of component, such as `dataset` or `strategy`; or a word to search for."
        ),
    ] = None,
    word: Annotated[
        str | None,
        typer.Argument(help="Name of a component, or a word in name, description or paper."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List components and shipped experiments; with KIND and NAME, show the settings of one
    component.

    The kind `section` has the tables of an experiment: `fedrec list section privacy`. A single
    argument that is not a kind is a search word: `fedrec list noisy`. In a pipe, each entry is one
    line that starts with its kind.
    """
    kinds = {known.name: known for known in KINDS}
    names = [*kinds, "experiment"]
    wanted = (kind or "").removesuffix("s")
    if kind is not None and wanted not in (*names, "section"):
        if word is not None:
            raise _unknown(f"unknown kind {kind!r}", kind, [*names, "section"])
        wanted = ""
        word = kind
    component = _component(kinds.get(wanted), wanted, word)
    if component is not None:
        _print_component(wanted, component, as_json)
        return
    listed = {name: _components(kinds[name]) for name in kinds if wanted in ("", name)}
    if wanted in ("", "experiment"):
        listed["experiment"] = _experiments()
    if word is not None:
        known = sorted({entry["name"] for entries in listed.values() for entry in entries})
        listed = {
            name: [entry for entry in entries if _mentions(entry, word)]
            for name, entries in listed.items()
        }
        if not any(listed.values()):  # all names would be too many
            asked = [] if wanted else names
            near = not asked or get_close_matches(word, [*asked, *known])
            raise _unknown(f"no entry mentions {word!r}", word, [*asked, *(known if near else ())])
    if as_json:
        typer.echo(json.dumps(listed, indent=2))
    elif sys.stdout.isatty():
        _print_tables(listed)
    else:
        _print_lines(listed)


def _component(kind: Kind | None, name: str, word: str | None) -> type | None:
    """The component or table with a kind and a name; None for a search word.

    Raises:
        ExperimentError: there is no table of this name, or no name.
    """
    if name == "section":
        if word in SECTIONS:
            return SECTIONS[word]
        raise ExperimentError(
            "the kind 'section' needs the name of a table"
            if word is None
            else f"there is no table {word!r}",
            expected=f"one of {', '.join(SECTIONS)}",
            got="no name" if word is None else repr(word),
            fix="fedrec list section experiment" if word is None else did_you_mean(word, SECTIONS),
        )
    if kind is None or word is None:
        return None
    return resolve(kind, word) if ":" in word or word in available_names(kind) else None


def _unknown(problem: str, got: str, names: Iterable[str]) -> ExperimentError:
    expected = "a kind, or a word of a name, a description or a paper"
    return ExperimentError(problem, expected=expected, got=repr(got), fix=did_you_mean(got, names))


def _print_component(kind: str, component: type, as_json: bool) -> None:
    """Print one component with its settings."""
    about = {"about": _about(component), "paper": str(getattr(component, "paper", ""))}
    entry = {"kind": kind, **about, "file": _relative(file_of(component))}
    settings = settings_of(component, nested=component is not Experiment)
    if as_json:
        tables = [setting.table() for setting in settings]
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


def _components(kind: Kind) -> list[Entry]:
    entries = []
    for name, component in available(kind):
        if isinstance(component, FedrecError):
            about = f"BROKEN: {component.problem}: {component.got}"
            entries.append(_entry(name, about, "", file_of_name(kind, name)))
        else:
            paper = getattr(component, "paper", "")
            entries.append(_entry(name, _about(component), paper, file_of(component)))
    return entries


def _experiments() -> list[Entry]:
    tables = {
        name: (read_toml(file, ExperimentError), file)
        for name, file in shipped_experiments().items()
    }
    return [
        _entry(name, table.get("title", ""), table.get("paper", ""), str(file))
        for name, (table, file) in tables.items()
    ]


def _entry(*texts: str) -> Entry:
    return {**dict(zip(_COLUMNS, texts, strict=True)), "file": _relative(texts[-1])}


def _relative(file: str) -> str:
    """A path relative to the project's root; of a plug-in the absolute path."""
    path = Path(file).resolve()
    return str(path.relative_to(ROOT)) if file and path.is_relative_to(ROOT) else file


def _print_tables(listed: dict[str, list[Entry]]) -> None:
    """Without the columns that would be narrow ones of folded words: `fedrec list KIND NAME` has
    them."""
    console = Console()
    shown = _COLUMNS[: 2 + (console.width >= _WITH_PAPER) + (console.width >= _WITH_FILE)]
    for kind, entries in listed.items():
        table = Table(title=kind, title_justify="left", title_style="bold", box=None)
        for column in shown:
            table.add_column(column, overflow="fold", no_wrap=column == "name")
        for entry in entries:
            table.add_row(*(escape(entry[column]) for column in shown))
        console.print(table, "")


def _print_lines(listed: dict[str, list[Entry]]) -> None:
    """One line per entry, in columns of any width: for `grep`, `less` and `wc`."""
    rows = [(kind, *entry.values()) for kind, entries in listed.items() for entry in entries]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        typer.echo("  ".join(cells).rstrip())
