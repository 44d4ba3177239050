# SPDX-License-Identifier: Apache-2.0
"""Writes the files of a new component."""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path

from fedrec.config import did_you_mean
from fedrec.errors import ExperimentError
from fedrec.runtime.files import write_atomically

TEMPLATES = ("dataset", "split", "model", "step", "strategy", "baseline", "metric", "attack")
"""Kinds of components that have a template."""
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


def write_component(kind: str, name: str, folder: Path) -> tuple[Path, Path, str]:
    """Write a module with one component, and the test of its contract.

    Args:
        kind: one of `TEMPLATES`.
        name: lower-case letters, digits and hyphens; `my-idea` is the class `MyIdea` of the module
            `my_idea`.
        folder: where both files are made.

    Returns:
        The module, its test, and the name of the component in experiments.

    Raises:
        ExperimentError: the kind has no template, the name is taken or invalid, or a file exists.
    """
    if kind not in TEMPLATES:
        raise ExperimentError(
            f"there is no template of the kind {kind!r}",
            expected=", ".join(TEMPLATES),
            got=kind,
            fix=did_you_mean(kind, TEMPLATES),
        )
    module = _module_of(name)
    file = folder / f"{module}.py"
    test = folder / f"test_{module}.py"
    _check_free(name, module, (file, test))
    cls = "".join(part.capitalize() for part in name.split("-"))
    write_atomically(file, component_text(kind, cls))
    write_atomically(test, _test_text(kind, module, cls))
    return file, test, f"{module}:{cls}"


def component_text(kind: str, cls: str) -> str:
    """The source of the example of a kind, with a class name of one's own."""
    source = (Path(__file__).parent / "templates" / f"{kind}.py.txt").read_text(encoding="utf-8")
    return re.sub(r"\bExample(Config)?\b", rf"{cls}\1", source.partition("\n")[2])


def _test_text(kind: str, module: str, cls: str) -> str:
    """The source of the test; that of a dataset writes the file that the dataset reads."""
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
    """The Python module of that name.

    Raises:
        ExperimentError: it is not a valid name of a module.
    """
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or keyword.iskeyword(module):
        raise ExperimentError(
            f"{name!r} is not a valid name of a component",
            expected=(
                "lower-case letters, digits and single hyphens, a letter first, no word of Python"
            ),
            got=name,
            fix="fedrec new strategy my-idea",
        )
    return module


def _check_free(name: str, module: str, files: tuple[Path, Path]) -> None:
    """Refuse a module that would hide another one, and files that exist."""
    taken = [f"{file} exists already" for file in files if file.exists()]
    if not taken and importlib.util.find_spec(module) is not None:
        taken = [f"a module {module!r} that can be imported already"]
    if taken:
        raise ExperimentError(
            f"the name {name!r} is taken",
            expected="a new name",
            got=taken[0],
            fix="choose another name, or --into another folder",
        )
