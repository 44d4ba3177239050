# SPDX-License-Identifier: Apache-2.0
"""`fedrec list`: what there is, which paper it comes from, and which file it is in."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from fedrec.registry import Kind

Entry = dict[str, str]


def list_components(
    kind: Annotated[str | None, typer.Argument(help="One kind only, such as `dataset` or `strategy`.")] = None,
    word: Annotated[
        str | None, typer.Argument(help="Only entries with this word in name, description or paper.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List datasets, splits, models, steps, strategies, samplers, perturbations, baselines, callbacks and more.

    A single argument that is no kind is a word to search for: `fedrec list noisy`. In a pipe every entry is one line
    that begins with its kind.
    """
    from fedrec.registry import KINDS

    kinds = {known.name: known for known in KINDS}
    wanted, word = _question([*kinds, "experiment"], kind, word)
    found = {name: _components(known) for name, known in kinds.items() if wanted in (None, name)}
    if wanted in (None, "experiment"):
        found["experiment"] = _experiments()
    if word is not None:
        found = {name: [entry for entry in entries if _mentions(entry, word)] for name, entries in found.items()}
        if not any(found.values()):
            _refuse(f"nothing mentions {word!r}", word, [*kinds, "experiment"])
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    elif sys.stdout.isatty():
        _print(found)
    else:
        _print_lines(found)


def _question(kinds: list[str], kind: str | None, word: str | None) -> tuple[str | None, str | None]:
    """The kind and the word that are asked for, None where any will do."""
    if kind is None:
        return None, word
    if (singular := kind.removesuffix("s")) in kinds:
        return singular, word
    if word is not None:
        _refuse(f"unknown kind {kind!r}", kind, kinds)
    return None, kind


def _refuse(problem: str, got: str, kinds: list[str]) -> NoReturn:
    from fedrec.config import did_you_mean
    from fedrec.errors import ExperimentError

    expected = "a kind, or a word of a name, a description or a paper"
    raise ExperimentError(problem, expected=expected, got=repr(got), fix=did_you_mean(got, kinds))


def _mentions(entry: Entry, word: str) -> bool:
    return any(word.lower() in entry[column].lower() for column in ("name", "about", "paper"))


def _components(kind: Kind) -> list[Entry]:
    import inspect

    from fedrec.blame import file_of
    from fedrec.errors import FedrecError
    from fedrec.registry import available
    from fedrec.registry import file_of as file_of_name

    entries = []
    for name, found in available(kind):
        if isinstance(found, FedrecError):
            reason = f"BROKEN: {found.problem}: {found.got}"
            entries.append({"name": name, "about": reason, "paper": "", "file": _relative(file_of_name(kind, name))})
            continue
        about = getattr(found, "title", "") or (inspect.getdoc(found) or "").split("\n")[0]
        paper = getattr(found, "paper", "")
        entries.append({"name": name, "about": about, "paper": paper, "file": _relative(file_of(found))})
    return entries


def _experiments() -> list[Entry]:
    import tomllib

    from fedrec.experiment import shipped_experiments

    entries = []
    for name, file in shipped_experiments().items():
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        about, paper = table.get("title", ""), table.get("paper", "")
        entries.append({"name": name, "about": about, "paper": paper, "file": _relative(str(file))})
    return entries


def _relative(file: str) -> str:
    """A file below the project's root, or whole when it is a plug-in's."""
    from pathlib import Path

    if not file:
        return ""
    root = Path(__file__).resolve().parent.parent.parent
    path = Path(file).resolve()
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _print(found: dict[str, list[Entry]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for kind, entries in found.items():
        table = Table(title=kind, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
        for column in ("name", "about", "paper", "file"):
            table.add_column(column, overflow="fold", no_wrap=column == "name")
        for entry in entries:
            table.add_row(*entry.values())
        console.print(table, "")


def _print_lines(found: dict[str, list[Entry]]) -> None:
    """One line an entry, in columns, whatever their width: for `grep`, `less` and `wc`."""
    rows = [(kind, *entry.values()) for kind, entries in found.items() for entry in entries]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
