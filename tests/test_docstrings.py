# SPDX-License-Identifier: Apache-2.0
"""Docstrings of public functions with arrays give shapes, such as `int64 [users]`."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("fedrec", "clients", "server", "strategies", "simulations")

ARRAY = re.compile(r"\bnp\.ndarray\b|\bTensor\b|\bcsr_(array|matrix)\b")
# shapes of named parameters are those of the model
NAMED = re.compile(r"(Mapping|dict)\[(str|int), (Mapping\[str, )?(np\.ndarray|(torch\.)?Tensor)\]")


def annotated(function: ast.FunctionDef) -> Iterator[str]:
    """The annotations of a function's parameters and result, without those of named arrays."""
    args = function.args
    nodes = [
        parameter.annotation for parameter in (*args.posonlyargs, *args.args, *args.kwonlyargs)
    ]
    for node in (*nodes, function.returns):
        if node is not None:
            yield NAMED.sub("", ast.unparse(node))


def inherited(owner: ast.ClassDef, name: str, classes: dict[str, list[ast.ClassDef]]) -> bool:
    """Whether a base class documents the method, or, for `__init__`, its own arguments."""
    for base in owner.bases:
        for found in classes.get(ast.unparse(base).split("[")[0].split(".")[-1], []):
            methods = [node for node in found.body if isinstance(node, ast.FunctionDef)]
            if any(node.name == name and ast.get_docstring(node) for node in methods):
                return True
            if name == "__init__" and "[" in (ast.get_docstring(found) or ""):
                return True
            if found is not owner and inherited(found, name, classes):
                return True
    return False


def without_shape(sources: dict[str, str]) -> list[str]:
    """Public functions with arrays whose docstring has no `[`."""
    trees = {file: ast.parse(source) for file, source in sources.items()}
    classes: dict[str, list[ast.ClassDef]] = {}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)
    return [
        f"{file}:{function.lineno} {function.name}"
        for file, tree in trees.items()
        for function, owner in _public(tree, None)
        if any(map(ARRAY.search, annotated(function)))
        and "[" not in _docstring(function, owner)
        and not (owner and inherited(owner, function.name, classes))
    ]


def _public(
    parent: ast.Module | ast.ClassDef, owner: ast.ClassDef | None
) -> Iterator[tuple[ast.FunctionDef, ast.ClassDef | None]]:
    for node in parent.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public(node, node)
        elif isinstance(node, ast.FunctionDef) and not re.match("_(?!_init__)", node.name):
            yield node, owner


def _docstring(function: ast.FunctionDef, owner: ast.ClassDef | None) -> str:
    own = ast.get_docstring(function) or ""
    return own + (ast.get_docstring(owner) or "" if owner and function.name == "__init__" else "")


def test_public_functions_give_the_shapes_of_arrays():
    sources = {
        str(file.relative_to(ROOT)): file.read_text(encoding="utf-8")
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
    }
    assert without_shape(sources) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(x: np.ndarray) -> int:\n    '''A number.'''", 1),
        ("def f(x: np.ndarray) -> int:\n    '''A number of `[n]`.'''", 0),
        ("def f(x: dict[str, Tensor]) -> None:\n    '''Named.'''", 0),
        ("class A:\n    '''A.'''\n    def __init__(self, x: Tensor) -> None: ...", 1),
        ("class A:\n    '''`[n]`.'''\n    def __init__(self, x: Tensor) -> None: ...", 0),
        ("class A:\n    def f(self) -> Tensor: ...\nclass B(A):\n    pass", 1),
    ],
)
def test_a_missing_shape_is_found(source, found):
    assert len(without_shape({"a.py": source})) == found
