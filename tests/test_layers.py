# SPDX-License-Identifier: Apache-2.0
"""Imports go one way: simulations -> server -> strategies -> fedrec, and simulations -> clients ->
fedrec. A source file has 40 to 500 lines of code, `__init__` excepted; there may be several public
classes in a file and any number of files in a folder."""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from benchmarks.size import code_lines, packed_assignments

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("fedrec", "clients", "server", "strategies", "simulations")
FORBIDDEN = {
    "fedrec": {"clients", "server", "strategies", "simulations", "ray"},
    "clients": {"server", "strategies", "simulations"},
    "strategies": {"clients", "server", "simulations"},
    "server": {"clients", "simulations"},
    "simulations": set(),
}
PUBLIC_FLWR = {
    "flwr.app",
    "flwr.serverapp",
    "flwr.serverapp.strategy",
    "flwr.serverapp.exception",
    "flwr.clientapp",
}
PARSERS = {
    "fedrec/runtime/files.py",
    "fedrec/components/sections.py",  # a value on the command line
    "simulations/studies/search.py",  # likewise
    "fedrec/privacy/mechanisms.py",  # what it has written itself
    "simulations/contracts/data.py",  # what the attack under test has written
    "simulations/export/score.py",  # scores without fedrec
}
MEANINGLESS = {"found", "own", "one", "place", "places", "kept", "said"}
"""Names of variables, arguments and attributes that say nothing of their content."""
FEWEST_LINES = 40
MOST_LINES = 500
FLWR_IN_CORE = Path("fedrec/protocol")
FLWR_PRIVATE = tuple(
    Path("simulations", *name.split("/"))
    for name in ("engines/grid.py", "deployment/superlink.py", "deployment/supernode.py")
)


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """All nodes of a source."""
    return tuple(ast.walk(ast.parse(source)))


def imports(source: str) -> Iterator[str]:
    """Dotted names of everything that a source imports, also inside functions and by
    `import_module("...")`."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            # the names below are modules of their own
            if node.module in ("flwr", "flwr.supercore"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            yield from (str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def _called(node: ast.Call) -> str:
    """Name of a function without its module or object."""
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def violations(file: Path, source: str) -> list[str]:
    """Imports of a source that violate the rule; `file` is relative to the project's root."""
    found = []
    for name in imports(source):
        top = name.partition(".")[0]
        if top in FORBIDDEN[file.parts[0]]:
            found.append(f"{file} imports {name}")
        if top == "flwr" and file.parts[0] == "fedrec" and file.parent != FLWR_IN_CORE:
            found.append(f"{file} imports {name}: only {FLWR_IN_CORE} knows Flower in the core")
        if (
            top == "flwr"
            and name not in PUBLIC_FLWR
            and not {file, *file.parents} & set(FLWR_PRIVATE)
        ):
            found.append(
                f"{file} imports {name}: private parts of Flower belong in {FLWR_PRIVATE[0]} or"
                f" {', '.join(file.name for file in FLWR_PRIVATE[1:])}"
            )
    return found


def modules() -> dict[str, Path]:
    """Dotted name -> file, relative to the project's root, of every module of ours."""
    files = [
        file.relative_to(ROOT) for package in PACKAGES for file in (ROOT / package).rglob("*.py")
    ]
    return {".".join(file.with_suffix("").parts).removesuffix(".__init__"): file for file in files}


@cache
def sources() -> dict[Path, str]:
    """The text of every file of ours."""
    return {file: (ROOT / file).read_text(encoding="utf-8") for file in modules().values()}


def test_every_module_keeps_the_layers():
    assert len(sources()) > 200
    assert not [line for file, text in sources().items() for line in violations(file, text)]


def imported_modules(source: str, known: Iterable[str]) -> set[str]:
    """Those of `known` that a source imports, `from package import module` included."""
    known = set(known)
    found = set(imports(source))
    for node in nodes(source):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = {f"{node.module}.{alias.name}" for alias in node.names} & known
            if len(names) == len(node.names):  # modules all: the package itself is not meant
                found.discard(node.module or "")
            found |= names
    return found & known


def neighbours(texts: dict[str, str], files: dict[str, Path]) -> dict[Path, dict[str, set[str]]]:
    """For each folder: which of its other files and subfolders each one imports."""
    found: dict[Path, dict[str, set[str]]] = {}
    for module, source in texts.items():
        for other in imported_modules(source, files):
            one, two = files[module].parts, files[other].parts
            shared = next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), 0)
            if one != two and "__init__.py" not in (one[shared], two[shared]):
                folder = found.setdefault(Path(*one[:shared]), {})
                folder.setdefault(one[shared], set()).add(two[shared])
    return found


def circles(texts: dict[str, str], files: dict[str, Path]) -> list[str]:
    """Import cycles between a folder's files and subfolders, one line for each folder."""
    found = []
    for folder, graph in neighbours(texts, files).items():
        try:
            tuple(TopologicalSorter(graph).static_order())
        except CycleError as error:
            found.append(f"{folder}: {' -> '.join(error.args[1])}")
    return found


def test_no_files_or_folders_import_each_other_in_a_circle():
    files = modules()
    assert not circles({name: sources()[file] for name, file in files.items()}, files)


def test_a_circle_of_folders_is_found():
    names = ("fedrec.a.one", "fedrec.a.two", "fedrec.b.three")
    files = {name: Path(f"{name.replace('.', '/')}.py") for name in names}
    texts = dict.fromkeys(names, "") | {"fedrec.a.one": "import fedrec.b.three"}
    assert not circles(texts, files)
    assert circles(texts | {"fedrec.b.three": "from fedrec.a import two"}, files)


def test_no_two_files_have_a_class_of_one_name():
    classes = Counter(
        name for text in sources().values() for name in re.findall(r"^class (\w+)", text, re.M)
    )
    assert len(classes) > 500
    assert not [name for name, count in classes.items() if count > 1]


def body_length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or body[-1].lineno) - body[0].lineno + 1 if body else 0


def test_no_function_is_longer_than_a_page():
    """Lines of a body without its docstring."""
    assert not {
        f"{file} {node.name}"
        for file, text in sources().items()
        for node in nodes(text)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and body_length(node) > 60
    }


def test_files_are_neither_long_nor_short():
    sizes = {
        str(file): len(code_lines(text, ast.parse(text)))
        for file, text in sources().items()
        if file.stem not in ("__init__", "__main__")
    }
    assert not {file: n for file, n in sizes.items() if not FEWEST_LINES <= n <= MOST_LINES}


def test_no_two_statements_are_packed_into_one_tuple():
    trees = (nodes(text)[0] for text in sources().values())
    assert not [ast.unparse(packed) for tree in trees for packed in packed_assignments(tree)]


def test_files_and_messages_are_parsed_in_one_place():
    """Where sizes and depths are limited."""
    parsing = re.compile(r"\b(?:json|tomllib|toml)\.loads?\(")
    assert {file.as_posix() for file, text in sources().items() if parsing.search(text)} == PARSERS


TASK_IDENTITY = "from flwr.supercore.task_identity import TaskIdentity"
REFUSED = [
    ("fedrec/rng.py", "import clients.app"),
    ("fedrec/rng.py", "def f():\n    from server.run import execute"),
    ("fedrec/models/privrec.py", "import numpy, ray.util"),
    ("fedrec/models/privrec.py", "from flwr.app import Message"),
    ("clients/app.py", "import importlib\nimportlib.import_module('server.run')"),
    ("strategies/base.py", "import clients"),
    ("server/run.py", "if True:\n    import simulations.runner"),
    ("server/run.py", "from flwr import common"),
    ("simulations/engines/ray.py", TASK_IDENTITY),
]
RIGHT = [
    ("fedrec/protocol/serialization.py", "from flwr.app import Array"),
    ("clients/app.py", "from flwr.clientapp import ClientApp\nimport clientship"),
    ("server/run.py", "from strategies.base import Cohorts\nfrom flwr import serverapp"),
    ("simulations/engines/grid.py", TASK_IDENTITY),
    ("simulations/runner.py", "import ray\nfrom server.run import execute\nimport clients.app"),
]


@pytest.mark.parametrize(
    ("file", "source", "violated"),
    [(*case, 1) for case in REFUSED] + [(*case, 0) for case in RIGHT],
)
def test_the_rule_finds_wrong_imports_and_no_others(file, source, violated):
    assert len(violations(Path(file), source)) == violated


def meaningless_names(source: str) -> Iterator[str]:
    """Names of variables, arguments and attributes that say nothing of their content."""
    for node in nodes(source):
        stored = isinstance(getattr(node, "ctx", None), ast.Store)
        if isinstance(node, ast.Name) and stored:
            name = node.id
        elif isinstance(node, ast.Attribute) and stored:
            name = node.attr
        elif isinstance(node, ast.arg):
            name = node.arg
        else:
            continue
        if name.lstrip("_") in MEANINGLESS:
            yield name


def test_names_say_what_a_value_is():
    source = "found = 1\ndef f(own): self._kept = own"
    assert set(meaningless_names(source)) == {"found", "own", "_kept"}
    named = {str(file): set(meaningless_names(text)) for file, text in sources().items()}
    assert not {file: names for file, names in named.items() if names}


# Docstrings of public functions with arrays give shapes, such as `int64 [users]`.

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


def without_shape(texts: dict[str, str]) -> list[str]:
    """Public functions with arrays whose docstring has no `[`; a subclass has the shapes of another
    class's method of that name."""
    functions = [
        (f"{file}:{function.lineno} {function.name}", function, owner)
        for file, source in texts.items()
        for function, owner in _public(ast.parse(source), None)
    ]
    documented = {method.name for _, method, owner in functions if "[" in _docstring(method, owner)}
    return [
        place
        for place, function, owner in functions
        if any(map(ARRAY.search, annotated(function)))
        and "[" not in _docstring(function, owner)
        and not (owner and owner.bases and function.name in documented)
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
    assert without_shape({str(file): text for file, text in sources().items()}) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(x: np.ndarray) -> int:\n    '''A number.'''", 1),
        ("def f(x: np.ndarray) -> int:\n    '''A number of `[n]`.'''", 0),
        ("def f(x: dict[str, Tensor]) -> None:\n    '''Named.'''", 0),
        ("class A:\n    def f(self) -> Tensor: ...\nclass B(A):\n    pass", 1),
    ],
)
def test_a_missing_shape_is_found(source, found):
    assert len(without_shape({"a.py": source})) == found
