# SPDX-License-Identifier: Apache-2.0
"""`fedrec list`: components and experiments, their papers and files."""

from __future__ import annotations

import inspect
import json
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedrec.components.errors import file_of
from fedrec.components.registry import KINDS, Kind, available, available_names, resolve, settings_of
from fedrec.components.registry import file_of as file_of_name
from fedrec.config import Config, did_you_mean
from fedrec.devices import DevicesConfig
from fedrec.errors import ExperimentError, FedrecError
from fedrec.experiment import schema
from fedrec.experiment.loading import shipped_experiments
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
_WITH_PAPER = 120  # columns of a terminal
_WITH_FILE = 180


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
    wanted, word = _question([*kinds, "experiment", "section"], kind, word)
    if (one := _one(wanted, word)) is not None:
        _show(str(wanted), one, as_json)
        return
    found = {name: _components(known) for name, known in kinds.items() if wanted in (None, name)}
    if wanted in (None, "experiment"):
        found["experiment"] = _experiments()
    names = sorted({entry["name"] for entries in found.values() for entry in entries})
    if word is not None:
        found = {
            name: [entry for entry in entries if _mentions(entry, word)]
            for name, entries in found.items()
        }
        if not any(found.values()):
            _refuse_word(word, [] if wanted else [*kinds, "experiment"], names)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    elif sys.stdout.isatty():
        _print(found)
    else:
        _print_lines(found)


SECTIONS = (
    "experiment",
    "evaluation",
    "privacy",
    "adversary",
    "devices",
    "closing",
    "asynchronous",
    "engine",
    "checkpoint",
    "early-stopping",
    "secure-aggregation",
)
"""Tables of an experiment whose keys are fixed; the others name a component."""


def section_class(name: str) -> type[Config]:
    """The configuration class of a table of an experiment."""

    classes: dict[str, type[Config]] = {
        "experiment": schema.Experiment,
        "evaluation": schema.EvaluationConfig,
        "privacy": PrivacyConfig,
        "adversary": AdversaryConfig,
        "devices": DevicesConfig,
        "closing": ClosingConfig,
        "asynchronous": AsynchronousConfig,
        "engine": schema.EngineConfig,
        "checkpoint": schema.CheckpointConfig,
        "early-stopping": EarlyStoppingConfig,
        "secure-aggregation": SecureAggregationConfig,
    }
    return classes[name]


def _one(kind: str | None, name: str | None) -> type | None:
    """The component or table with a kind and a name; None for a search word."""
    if kind == "section":
        return _section(name)
    known = next((one for one in KINDS if one.name == kind), None)
    if known is None or name is None:
        return None
    return resolve(known, name) if ":" in name or name in available_names(known) else None


def _section(name: str | None) -> type[Config]:
    """The configuration class of a table of an experiment.

    Raises:
        ExperimentError: there is no table of this name, or no name.
    """
    if name in SECTIONS:
        return section_class(name)
    raise ExperimentError(
        "the kind 'section' needs the name of a table"
        if name is None
        else f"there is no table {name!r}",
        expected=f"one of {', '.join(SECTIONS)}",
        got="no name" if name is None else repr(name),
        fix=f"fedrec list section {SECTIONS[0]}" if name is None else did_you_mean(name, SECTIONS),
    )


def _show(kind: str, component: type, as_json: bool) -> None:
    """Print one component with its settings."""
    entry = {
        "kind": kind,
        "about": _about(component),
        "paper": str(getattr(component, "paper", "")),
        "file": _relative(file_of(component)),
    }
    settings = settings_of(component, nested=component is not section_class("experiment"))
    if as_json:
        typer.echo(json.dumps({**entry, "settings": [one.table() for one in settings]}, indent=2))
        return
    for line in (entry["about"], entry["paper"], entry["file"]):
        if line:
            typer.echo(line)
    typer.echo("" if settings else "It has no settings.")
    for one in settings:
        bounds = f", {one.range}" if one.range else ""
        default = one.default if one.default else "left out"
        typer.echo(f"{one.key} = {default}    ({one.type}{bounds})")
        if one.about:
            typer.echo(f"    {one.about}")


def _about(component: type) -> str:
    """A component's title, or the first paragraph of its docstring."""
    first = (inspect.getdoc(component) or "").split("\n\n")[0]
    return getattr(component, "title", "") or " ".join(first.split())


def _question(
    kinds: list[str], kind: str | None, word: str | None
) -> tuple[str | None, str | None]:
    """The requested kind and word, None for any."""
    if kind is None:
        return None, word
    if (singular := kind.removesuffix("s")) in kinds:
        return singular, word
    if word is not None:
        _refuse(f"unknown kind {kind!r}", kind, kinds)
    return None, kind


def _refuse_word(word: str, kinds: list[str], names: list[str]) -> NoReturn:
    """Suggests similar names; without any, the kinds, because all names would be too many."""
    far = kinds and not get_close_matches(word, [*kinds, *names])
    _refuse(f"no entry mentions {word!r}", word, kinds if far else [*kinds, *names])


def _refuse(problem: str, got: str, kinds: list[str]) -> NoReturn:
    expected = "a kind, or a word of a name, a description or a paper"
    raise ExperimentError(problem, expected=expected, got=repr(got), fix=did_you_mean(got, kinds))


def _mentions(entry: Entry, word: str) -> bool:
    return any(word.lower() in entry[column].lower() for column in ("name", "about", "paper"))


def _components(kind: Kind) -> list[Entry]:
    entries = []
    for name, found in available(kind):
        if isinstance(found, FedrecError):
            reason = f"BROKEN: {found.problem}: {found.got}"
            entries.append(
                {
                    "name": name,
                    "about": reason,
                    "paper": "",
                    "file": _relative(file_of_name(kind, name)),
                }
            )
            continue
        paper = getattr(found, "paper", "")
        file = _relative(file_of(found))
        entries.append({"name": name, "about": _about(found), "paper": paper, "file": file})
    return entries


def _experiments() -> list[Entry]:
    entries = []
    for name, file in shipped_experiments().items():
        table = read_toml(file, ExperimentError)
        about = table.get("title", "")
        paper = table.get("paper", "")
        entries.append({"name": name, "about": about, "paper": paper, "file": _relative(str(file))})
    return entries


def _relative(file: str) -> str:
    """A path relative to the project's root; of a plug-in the absolute path."""
    if not file:
        return ""
    root = Path(__file__).resolve().parents[2]
    path = Path(file).resolve()
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _print(found: dict[str, list[Entry]]) -> None:
    console = Console()
    # Narrow columns of folded words are hard to read: what does not fit is in `fedrec list KIND
    # NAME`.
    columns = ["name", "about", "paper", "file"]
    shown = columns[: 2 + (console.width >= _WITH_PAPER) + (console.width >= _WITH_FILE)]
    for kind, entries in found.items():
        table = Table(
            title=kind, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0)
        )
        for column in shown:
            table.add_column(column, overflow="fold", no_wrap=column == "name")
        for entry in entries:
            table.add_row(*(escape(entry[column]) for column in shown))
        console.print(table, "")


def _print_lines(found: dict[str, list[Entry]]) -> None:
    """One line per entry, in columns of any width: for `grep`, `less` and `wc`."""
    rows = [(kind, *entry.values()) for kind, entries in found.items() for entry in entries]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo(
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        )
