# SPDX-License-Identifier: Apache-2.0
"""Commands about components: `fedrec list`, with experiments, their papers and files, and `fedrec
new`."""

from __future__ import annotations

import importlib.util
import inspect
import json
import keyword
import re
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
from fedrec.components.sections import Section, file_of
from fedrec.config import Config, did_you_mean
from fedrec.errors import ROOT, ExperimentError, FedrecError, unknown
from fedrec.experiment.schema import Experiment, shipped_experiments
from fedrec.runtime.files import read_toml, write_atomically
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
            yield _entry(name, about, "", "")
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


# `fedrec new`: a module with one component, and its contract test. The components in `templates`
# are complete and also shown in docs/plugins.md.

TEMPLATES = ("dataset", "split", "model", "step", "strategy", "baseline", "metric", "attack")
"""Kinds of components with a template."""
_TEST = '''\
"""The contract of a {kind}: what fedrec expects of `{cls}`."""

{imports}from {module} import {cls}

from fedrec.testing import {contract}


class Test{cls}({contract}):
    component = {cls}
'''
_WRITES_A_TABLE = '''
    @pytest.fixture(autouse=True)
    def write(self, tmp_path_factory):
        """The contract's tests read this file."""
        file = tmp_path_factory.mktemp("data") / "plays.csv"
        pairs = [(user, artist) for user in range(24) for artist in range(1, 9)]
        rows = [f"u{user},a{(user * artist) % 13},{user + artist}" for user, artist in pairs]
        file.write_text("\\n".join(["listener,artist,plays", *rows]) + "\\n")
        type(self).settings = {"path": str(file)}
'''


def new(
    kind: Annotated[
        str,
        typer.Argument(help="dataset, split, model, step, strategy, baseline, metric or attack."),
    ],
    name: Annotated[
        str, typer.Argument(help="Name of the component, such as my-idea, which is my_idea:MyIdea.")
    ],
    into: Annotated[Path, typer.Option(help="Folder of both new files.")] = Path(),
) -> None:
    """Create a module with a working component, and its contract test."""
    if kind not in TEMPLATES:
        raise ExperimentError(
            f"unknown kind of component {kind!r}",
            expected=", ".join(TEMPLATES),
            got=kind,
            fix=did_you_mean(kind, TEMPLATES),
        )
    module = _module_of(name)
    file = into / f"{module}.py"
    test = into / f"test_{module}.py"
    _check_free(name, module, (file, test))
    cls = "".join(part.capitalize() for part in name.split("-"))
    write_atomically(file, _component_text(kind, cls))
    write_atomically(test, _test_text(kind, module, cls))
    typer.echo(f"wrote {file} and {test}")
    typer.echo(f'Use it in experiments as "{module}:{cls}", with its folder on Python\'s path')
    typer.echo("(export PYTHONPATH=.); pytest runs its contract test.")


def _component_text(kind: str, cls: str) -> str:
    """Source of a kind's template with another class name."""
    source = (Path(__file__).parent / "templates" / f"{kind}.py.txt").read_text(encoding="utf-8")
    return re.sub(r"\bExample(Config)?\b", rf"{cls}\1", source.partition("\n")[2])


def _test_text(kind: str, module: str, cls: str) -> str:
    """Source of the test, which for a dataset writes the file that the dataset reads."""
    is_dataset = kind == "dataset"
    text = _TEST.format(
        kind=kind,
        module=module,
        cls=cls,
        contract=f"{kind.capitalize()}Contract",
        imports="import pytest\n" if is_dataset else "",
    )
    return text + _WRITES_A_TABLE if is_dataset else text


def _module_of(name: str) -> str:
    """Module name of a component.

    Raises:
        ExperimentError: the name is invalid.
    """
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or keyword.iskeyword(module):
        raise ExperimentError(
            f"invalid component name {name!r}",
            expected=(
                "lower-case letters, digits and single hyphens, a letter first, not a Python"
                " keyword"
            ),
            got=name,
            fix="fedrec new strategy my-idea",
        )
    return module


def _check_free(name: str, module: str, files: tuple[Path, Path]) -> None:
    """Check that a module would not hide another one, and that its files do not exist."""
    taken = [f"{file} exists" for file in files if file.exists()]
    if not taken and importlib.util.find_spec(module) is not None:
        taken = [f"an importable module {module!r}"]
    if taken:
        raise ExperimentError(
            f"the name {name!r} is taken",
            expected="a new name",
            got=taken[0],
            fix="choose another name, or --into another folder",
        )
