# SPDX-License-Identifier: Apache-2.0
"""Every back-quoted Python name and path of ours in the documentation exists in the source."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("fedrec", "clients", "server", "strategies", "simulations")
FOLDERS = (*PACKAGES, "tests", "benchmarks", "examples")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOREIGN = {"KNNWithMeans", "snake_case"}  # of another library
NAME = re.compile(r"[A-Za-z_][\w.]*(\(\))?")
PATH = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./-]+")
WRITTEN = re.compile(r"\.(txt|db|crt|key|jsonl)$")  # files that a run writes


@pytest.fixture(scope="module")
def known() -> set[str]:
    """All names in the source: definitions, arguments, attributes, keys, and files."""
    found: set[str] = set()
    files = (file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    for file in (file for file in files if ".venvs" not in file.parts):  # of benchmarks
        found.update(*(part.split(".") for part in file.relative_to(ROOT).parts))
        own = file == Path(__file__)  # the names below are nowhere else
        code = compile(file.read_text(encoding="utf-8"), str(file), "exec")
        found.update(names_of(code, texts=not own))
    return found


def names_of(code: CodeType, *, texts: bool) -> Iterator[str]:
    """Names in compiled code, those of its functions and classes included, and texts."""
    yield from (code.co_name, *code.co_varnames, *code.co_cellvars)
    for name in code.co_names:  # a module's is dotted
        yield from name.split(".")
    values = list(code.co_consts)
    while values:
        value = values.pop()
        if isinstance(value, CodeType):
            yield from names_of(value, texts=texts)
        elif isinstance(value, tuple | frozenset):  # such as the names of keyword arguments
            values.extend(value)
        elif texts and isinstance(value, str):
            yield value


def unknown_names(text: str, known: set[str]) -> list[str]:
    """Back-quoted names of a page, outside of code blocks, that the source does not have."""
    quoted = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    return [name for name in quoted if name not in FOREIGN and not _is_there(name, known)]


def _is_there(name: str, known: set[str]) -> bool:
    if PATH.fullmatch(name):
        return (ROOT / name).exists()
    looks_like_python = re.search(r"[a-z]_[a-z]|[a-z][A-Z]|\w\.\w|\(\)$", name)
    if not (NAME.fullmatch(name) and looks_like_python) or WRITTEN.search(name):
        return True
    plain = name.removesuffix("()")
    return plain in known or (ROOT / plain).exists() or set(plain.split(".")) <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_names_of_a_page_exist(page, known):
    assert not unknown_names(page.read_text(encoding="utf-8"), known)


def test_a_name_that_is_nowhere_is_found(known):
    page = "`phases` `Strategy.by_phases` `clients/nowhere.py` `no_such_name()` `fedrec.load`"
    assert unknown_names(page, known) == [
        "Strategy.by_phases",
        "clients/nowhere.py",
        "no_such_name()",
    ]


UPGRADES = re.findall(
    r"^((?:fedrec|clients|server|strategies|simulations)\.[\w.:]+) +-> ([\w.:]+)$",
    (ROOT / "docs" / "upgrading.md").read_text(encoding="utf-8"),
    re.M,
)


@pytest.mark.parametrize(("before", "now"), UPGRADES)
def test_a_moved_module_is_where_the_upgrade_notes_say(before, now):
    assert _is_importable(now) and not _is_importable(before)


def _is_importable(name: str) -> bool:
    """Whether there is a module, or a name in a module (`package.module:Name`)."""
    module, _, member = name.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        return False
    return not member or hasattr(found, member)
