# SPDX-License-Identifier: Apache-2.0
"""Imports go one way: simulations -> server -> strategies -> fedrec, and simulations -> clients -> fedrec."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

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
FLWR_IN_CORE = (Path("fedrec/wire.py"), Path("fedrec/live_arrays.py"))
FLWR_PRIVATE = (Path("simulations/engines/flwr_private.py"), Path("simulations/deploy/flower"))


def imports(source: str) -> Iterator[str]:
    """Dotted names of everything that a source imports, also inside functions and by `import_module("...")`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            if node.module in ("flwr", "flwr.supercore"):  # the names below are modules of their own
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def violations(file: Path, source: str) -> list[str]:
    """What a source imports against the rule; `file` is relative to the project's root."""
    found = []
    for name in imports(source):
        top = name.partition(".")[0]
        if top in FORBIDDEN[file.parts[0]]:
            found.append(f"{file} imports {name}")
        if top == "flwr" and file.parts[0] == "fedrec" and file not in FLWR_IN_CORE:
            found.append(f"{file} imports {name}: only {FLWR_IN_CORE[0]} and {FLWR_IN_CORE[1]} know Flower in the core")
        if top == "flwr" and name not in PUBLIC_FLWR and not {file, file.parent} & set(FLWR_PRIVATE):
            found.append(
                f"{file} imports {name}: private parts of Flower belong in {FLWR_PRIVATE[0]} or {FLWR_PRIVATE[1]}"
            )
    return found


def test_every_module_keeps_the_layers():
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    assert len(files) > 50
    found = [v for file in files for v in violations(file.relative_to(ROOT), file.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def test_data_know_no_perturbation():
    """Clients' data take what a perturbation made of them; which ones there are, the registry knows."""
    files = list((ROOT / "fedrec" / "data").rglob("*.py"))
    found = [(file.name, name) for file in files for name in imports(file.read_text(encoding="utf-8"))]
    assert len(files) > 20 and not [one for one in found if one[1].startswith("fedrec.perturb")]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("fedrec/rng.py", "import clients.app"),
        ("fedrec/rng.py", "def f():\n    from server.loop import Loop"),
        ("fedrec/models/privrec.py", "import numpy, ray.util"),
        ("fedrec/models/privrec.py", "from flwr.app import Message"),
        ("clients/app.py", "from strategies.base import Cohorts"),
        ("clients/app.py", "import importlib\nimportlib.import_module('server.loop')"),
        ("strategies/base.py", "import clients"),
        ("strategies/base.py", "from server import loop"),
        ("server/loop.py", "from clients.hosting import Node"),
        ("server/loop.py", "if True:\n    import simulations.runner"),
        ("server/loop.py", "from flwr.common import NDArray"),
        ("server/loop.py", "from flwr import common"),
        ("simulations/deploy/door.py", "from flwr.supercore.control import ControlHttpClient"),
        ("simulations/engines/ray.py", "from flwr.supercore.task_identity import TaskIdentity"),
    ],
)
def test_the_rule_can_fail(file, source):
    assert len(violations(Path(file), source)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("fedrec/live_arrays.py", "from flwr.app import Array"),
        ("fedrec/wire.py", "from flwr.app import Array\nfrom fedrec.rng import stream\nfrom . import errors"),
        ("clients/app.py", "from flwr.clientapp import ClientApp\nimport fedrec.wire\nimport clientship"),
        ("server/loop.py", "from strategies.base import Cohorts\nfrom flwr import serverapp"),
        ("simulations/engines/flwr_private.py", "from flwr.supercore.task_identity import TaskIdentity"),
        ("simulations/deploy/flower/control.py", "from flwr.supercore.control import ControlHttpClient"),
        ("simulations/runner.py", "import ray\nfrom server.loop import Loop\nfrom clients.app import app"),
    ],
)
def test_the_rule_lets_right_imports_pass(file, source):
    assert violations(Path(file), source) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_the_one_of_this_checkout(package):
    """Their names are common words, so another installed package could stand before them."""
    assert importlib.import_module(package).__file__ == str(ROOT / package / "__init__.py")
