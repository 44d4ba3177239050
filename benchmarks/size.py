# SPDX-License-Identifier: Apache-2.0
"""Sizes of the packages: lines of code without blank lines, comments and docstrings.

    python benchmarks/size.py

Per package and in total: files, files of less than 40 and of more than 500 lines of code, lines of
code, public classes and functions, and assignments that pack two statements into one tuple (per
1,000 lines). Tests and benchmarks are counted separately. Below the table
are the public members of the main contracts, and beside all of it the targets.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("fedrec", "clients", "server", "strategies", "simulations")
TARGETS = {
    "fedrec files": 170,
    "fedrec lines": 20_500,
    "others files": 150,
    "others lines": 20_500,
    "source files": 320,
    "source lines": 41_000,
    "source public": 3000,
    "source short": 0,
    "source long": 0,
    "tests files": 240,
    "tests lines": 34_000,
    "benchmarks files": 16,
    "benchmarks lines": 1600,
    "Step": 12,
    "CohortStrategy": 12,
    "Model": 16,
    "Baseline": 14,
    "Mechanism": 6,
    "Callback": 5,
}
"""The most that each figure is to be."""
_SEVERAL = {"Model": ("Model", "HistoryModel", "SequenceModel")}
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_SHORT = 40
_LONG = 500
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Size:
    """Size of one file, or of many."""

    files: int = 0
    short: int = 0
    """Files of less than 40 lines of code, without `__init__.py` and `__main__.py`."""
    long: int = 0
    """Files of more than 500 lines of code."""
    lines: int = 0
    public: int = 0
    """Classes and functions without a leading underscore, methods included."""
    packed: int = 0
    """Assignments of several values to several targets at once."""

    def __add__(self, other: Size) -> Size:
        return Size(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def size_of(source: str, name: str = "") -> Size:
    """Size of the source text of one file of that name."""
    tree = ast.parse(source)
    lines = len(code_lines(source, tree))
    functions = [node for node in ast.walk(tree) if isinstance(node, _FUNCTION)]
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return Size(
        files=1,
        short=int(lines < _SHORT and name not in ("__init__.py", "__main__.py")),
        long=int(lines > _LONG),
        lines=lines,
        public=sum(not node.name.startswith("_") for node in [*functions, *classes]),
        packed=len(list(packed_assignments(tree))),
    )


def code_lines(source: str, tree: ast.Module) -> set[int]:
    """Numbers of the lines of a source, parsed to `tree`, that hold code: no blank lines, comments
    or docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        for text in _docstrings(node):
            lines -= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return lines


def packed_assignments(tree: ast.AST) -> Iterator[ast.Assign]:
    """Assignments such as `a, b = 1, 2`: two statements in one. Those whose values need the old
    ones of the targets (`a, b = b, a + b`) are one statement and do not count."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and len(node.targets) == 1
            and isinstance(node.targets[0], ast.Tuple)
            and isinstance(node.value, ast.Tuple)
            and len(node.targets[0].elts) == len(node.value.elts)
            and not _depend(node.targets[0], node.value)
        ):
            yield node


def _depend(targets: ast.Tuple, values: ast.Tuple) -> bool:
    """Whether a value uses a target that is assigned before it."""
    names = [ast.unparse(target) for target in targets.elts]
    return any(
        name in {ast.unparse(part) for part in ast.walk(value) if isinstance(part, ast.expr)}
        for index, name in enumerate(names)
        for value in values.elts[index + 1 :]
    )


def _docstrings(node: ast.AST) -> Iterator[ast.Expr]:
    """The texts that stand alone as statements in a body: docstrings of modules, classes,
    functions and attributes."""
    body = getattr(node, "body", None)
    for statement in body if isinstance(body, list) else ():
        match statement:
            case ast.Expr(value=ast.Constant(value=str())):
                yield statement


def members_of(source: str) -> dict[str, set[str]]:
    """Public names in the body of each class of a source."""
    members: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            names = {item.name for item in node.body if isinstance(item, _FUNCTION)}
            for item in node.body:
                targets = item.targets if isinstance(item, ast.Assign) else [item]
                targets = [item.target] if isinstance(item, ast.AnnAssign) else targets
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            members[node.name] = {name for name in names if not name.startswith("_")}
    return members


def contract_sizes(root: Path) -> dict[str, int]:
    """Number of public members of each main contract."""
    members: dict[str, set[str]] = {}
    for package in PACKAGES:
        for file in python_files(root / package):
            members |= members_of(file.read_text(encoding="utf-8"))
    contracts = {name: _SEVERAL.get(name, (name,)) for name in TARGETS if name[0].isupper()}
    return {
        contract: len(set().union(*(members.get(name, set()) for name in classes)))
        for contract, classes in contracts.items()
    }


def python_files(folder: Path) -> list[Path]:
    """All Python files below a folder, without hidden folders (environments)."""
    return [
        file
        for file in sorted(folder.rglob("*.py"))
        if not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]


def folder_size(folder: Path) -> Size:
    """Size of all Python files below a folder."""
    sizes = (size_of(file.read_text(encoding="utf-8"), file.name) for file in python_files(folder))
    return sum(sizes, Size())


def sizes_of(root: Path) -> dict[str, Size]:
    """Sizes of the packages, of those above `fedrec`, of all of them, of the tests and of the
    benchmarks."""
    sizes = {name: folder_size(root / name) for name in PACKAGES}
    others = sum((size for name, size in sizes.items() if name != "fedrec"), Size())
    sizes |= {"others": others, "source": sizes["fedrec"] + others}
    return sizes | {name: folder_size(root / name) for name in ("tests", "benchmarks")}


def figures(root: Path) -> dict[str, int]:
    """Every figure that has a target, by its name."""
    counted = contract_sizes(root)
    for name, size in sizes_of(root).items():
        counted |= {f"{name} {part}": number for part, number in asdict(size).items()}
    return {name: counted[name] for name in TARGETS}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the checkout")
    options = parser.parse_args()
    print(f"{'':12}  files   <40  >500   lines  public  packed/1000")
    for name, size in sizes_of(options.root).items():
        counts = f"{size.files:6} {size.short:5} {size.long:5} {size.lines:7} {size.public:7}"
        print(f"{name:12} {counts} {1000 * size.packed / max(1, size.lines):12.1f}")
    print(f"\n{'':16} {'now':>7} {'target':>7}")
    for name, number in figures(options.root).items():
        print(f"{name:16} {number:7} {TARGETS[name]:7}")


if __name__ == "__main__":
    main()
