# SPDX-License-Identifier: Apache-2.0
"""Commands about components: `fedrec list`, with experiments, their papers and files, and `fedrec
new`."""

import importlib.util
import inspect
import keyword
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedrec.components.registry import KINDS, Kind, available, resolve, settings_of
from fedrec.components.sections import file_of
from fedrec.config import did_you_mean
from fedrec.errors import ROOT, ExperimentError, FedrecError, unknown
from fedrec.experiment.schema import load, shipped_experiments
from fedrec.runtime.files import read_toml, write_atomically

Entry = dict[str, str]
_COLUMNS = ("name", "about", "paper", "file")
_IN_A_PIPE = 4096


def show(
    kind: Annotated[
        str | None, typer.Argument(help="Kind of component, such as `dataset`; or `experiment`.")
    ] = None,
    name: Annotated[
        str | None, typer.Argument(help="Name of a component, such as `ml-1m`.")
    ] = None,
) -> None:
    """List components and shipped experiments; with KIND and NAME, show the settings of one.

    In a pipe, each entry is one line that starts with its kind.
    """
    kinds = {known.name: known for known in KINDS}
    names = [*kinds, "experiment"]
    if kind is not None and kind not in names:
        raise unknown("kind", kind, names)
    if name is None:
        listed = {key: list(_components(kinds[key])) for key in kinds if kind in (None, key)}
        if kind in (None, "experiment"):
            listed["experiment"] = list(_experiments())
        _print(listed)
    elif kind == "experiment":
        typer.echo(load(name).toml())
    else:
        _print_component(resolve(kinds[str(kind)], name))


def _print_component(component: type) -> None:
    """Print one component with its settings."""
    paper = getattr(component, "paper", "")
    for line in filter(None, [_about(component), paper, _relative(file_of(component))]):
        typer.echo(line)
    settings = settings_of(component)
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
