# SPDX-License-Identifier: Apache-2.0
"""Files of a new component."""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path

from fedrec.config import did_you_mean
from fedrec.errors import ExperimentError
from fedrec.runtime.files import write_atomically

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


def write_component(kind: str, name: str, folder: Path) -> tuple[Path, Path, str]:
    """Write a module with one component, and its contract test.

    Args:
        kind: one of `TEMPLATES`.
        name: lower-case letters, digits and hyphens; `my-idea` is the class `MyIdea` of the module
            `my_idea`.
        folder: folder of both files.

    Returns:
        The module, its test, and the name of the component in experiments.

    Raises:
        ExperimentError: the kind has no template, the name is taken or invalid, or a file exists.
    """
    if kind not in TEMPLATES:
        raise ExperimentError(
            f"unknown kind of component {kind!r}",
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
