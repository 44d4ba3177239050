# SPDX-License-Identifier: Apache-2.0
"""The private modules of Flower that the sources import are few, counted in docs/deployment.md, and
in files that name what Flower lacks."""

import ast
import importlib
import re
from importlib.util import find_spec
from pathlib import Path

import flwr.app
import flwr.clientapp
import flwr.serverapp

from simulations.deployment.flower import patches
from tests.test_layers import PACKAGES, ROOT

PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp")


def names_in(tree):
    """Flower's modules and their members that a source imports; a module that is imported by a
    string counts too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def module_of(name):
    """The private module of Flower with this name, or with this member."""
    if not re.fullmatch(r"flwr(\.\w+)+", name) or re.match("|".join(PUBLIC) + r"(\.|$)", name):
        return None
    parent = name.rpartition(".")[0]
    return name if find_spec(parent) and _is_module(name) else parent


def _is_module(name):
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the parent is a module, not a package
        return False


def private_modules():
    found = {}
    for file in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        source = file.read_text()
        for name in names_in(ast.parse(source)) if "flwr" in source else ():
            if module := module_of(name):
                found.setdefault(module, set()).add(str(file.relative_to(ROOT)))
    return found


def test_how_an_import_is_counted():
    source = """
import flwr.app
from flwr.supercore import heartbeat
from flwr.supercore.control import ControlHttpClient
from flwr.serverapp.strategy import Strategy
importlib.import_module("flwr.supernode.main")
"""
    counted = {module_of(name) for name in names_in(ast.parse(source))} - {None}
    assert counted == {"flwr.supercore.heartbeat", "flwr.supercore.control", "flwr.supernode.main"}


def test_the_docs_name_all_private_modules_and_their_number():
    text = (ROOT / "docs" / "deployment.md").read_text()
    section = text.partition("## Private parts of Flower")[2].partition("\n## ")[0]
    found = private_modules()
    assert set(re.findall(r"`(flwr\.[\w.]+)`", section)) - set(PUBLIC) == set(found)
    (number,) = re.findall(r"imports (\d+) private modules", section)
    assert int(number) == len(found) < 15
    for file in set().union(*found.values()):
        assert f"`{file.removeprefix('simulations/')}`" in section, file


def test_each_patch_names_what_flower_lacks():
    (folder,) = patches.__path__
    for file in Path(folder).glob("[a-z]*.py"):
        module = importlib.import_module(f"{patches.__name__}.{file.stem}")
        assert "Missing in Flower: " in module.__doc__, file


def test_flower_has_no_public_interface_for_operators():
    """If this fails, a new version of Flower may no longer need `flower/control.py`."""
    public = [name for part in (flwr.app, flwr.clientapp, flwr.serverapp) for name in dir(part)]
    assert not [name for name in public if re.search("control|superlink|register", name.lower())]
