# SPDX-License-Identifier: Apache-2.0
"""The docstrings below the fields of a class, read from its source when they are asked for.

pydantic can read them too, but when a class is made: that is a tenth of the time of all imports,
for texts that few commands show.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import ModuleType


@functools.cache
def field_docstrings(cls: type, root: type) -> Mapping[str, str | None]:
    """The docstring of each field that a class declares or has from a base that derives from
    `root`, or None; of two bases the first counts. Empty for a class without source."""
    found: dict[str, str | None] = {}
    for base in reversed(cls.__bases__):
        if issubclass(base, root):
            found |= field_docstrings(base, root)
    module = sys.modules.get(cls.__module__)
    own = {} if module is None else _declared(module).get(cls.__qualname__, {})
    return {**found, **own}


@functools.lru_cache
def _declared(module: ModuleType) -> Mapping[str, Mapping[str, str | None]]:
    """By qualified name of a class the fields that a module declares, with their docstrings."""
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):
        return {}
    return {name: dict(_fields(body)) for name, body in _classes(ast.parse(source).body, "")}


def _classes(body: Sequence[ast.stmt], within: str) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Qualified names and bodies of all classes, also of those within classes, functions and
    branches."""
    for one in body:
        inner = within
        if isinstance(one, ast.ClassDef):
            yield within + one.name, one.body
            inner = f"{within}{one.name}."
        elif isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{within}{one.name}.<locals>."
        parts = (getattr(one, name, ()) for name in ("body", "orelse", "finalbody"))
        for part in parts:
            yield from _classes(part, inner)


def _fields(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str | None]]:
    """Annotated names, and the text below each of them."""
    for one, following in pairwise([*body, ast.Pass()]):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            match following:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield one.target.id, inspect.cleandoc(text)
                case _:
                    yield one.target.id, None
