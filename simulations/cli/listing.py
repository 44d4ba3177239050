# SPDX-License-Identifier: Apache-2.0
"""`fedrec list`: what there is, which paper it comes from, and which file it is in."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fedrec.registry import Kind

Entry = dict[str, str]


def list_components(
    kind: Annotated[str | None, typer.Argument(help="One kind only, such as `dataset` or `strategy`.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List datasets, splits, models, steps, strategies, samplers, perturbations, baselines, callbacks and more."""
    from fedrec.config import did_you_mean
    from fedrec.errors import ExperimentError
    from fedrec.registry import KINDS

    kinds = {known.name: known for known in KINDS}
    wanted = kind.removesuffix("s") if kind else None
    if wanted not in (None, "experiment", *kinds):
        raise ExperimentError(f"unknown kind {kind!r}", fix=did_you_mean(str(kind), [*kinds, "experiment"]))
    found = {name: _components(known) for name, known in kinds.items() if wanted in (None, name)}
    if wanted in (None, "experiment"):
        found["experiment"] = _experiments()
    typer.echo(json.dumps(found, indent=2)) if as_json else _print(found)


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
