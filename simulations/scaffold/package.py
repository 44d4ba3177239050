# SPDX-License-Identifier: Apache-2.0
"""Writes the files of a new package."""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path

from fedrec.components.registry import KINDS, builtin_names
from fedrec.config import did_you_mean
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import SECTIONS
from fedrec.runtime.atomic_files import write_atomically
from simulations.scaffold import files

SECTION_KINDS = tuple(kind.name for kind in SECTIONS)
_SYNTHETIC = '[dataset]\nname = "synthetic"\n'
_SMALL_COHORT = '[sampler]\nname = "fixed-size"\ncohort = 20\n'
_TABLE = '[dataset]\nname = "{name}"\npath = "{path}"\n'
_ROWS = (
    [("alice", artist, artist % 5 + 1) for artist in range(0, 12)]
    + [(f"user{user}", (user * step) % 37, 1 + (user + step) % 7)
       for user in range(1, 40) for step in range(1, 12)]
)  # fmt: skip


def write_package(kind_name: str, name: str, folder: Path) -> Path:
    """Write a package with one component.

    Args:
        kind_name: `strategy`, `step` and so on.
        name: of the package and of the component in experiments: lower-case letters, digits and
            hyphens.
        folder: the folder in which the package's own folder is made.

    Returns:
        The package's folder.

    Raises:
        ExperimentError: the kind is unknown, the name is taken or invalid, or the folder exists.
    """
    kind = next((kind for kind in KINDS if kind.name == kind_name), None)
    if kind is None:
        known = [known.name for known in KINDS]
        raise ExperimentError(
            f"unknown kind {kind_name!r}", got=kind_name, fix=did_you_mean(kind_name, known)
        )
    module = _module_of(name)
    target = folder / name
    _refuse_taken(name, module, builtin_names(kind), target)
    cls = "".join(part.capitalize() for part in name.split("-"))
    names = {"name": name, "module": module, "cls": cls, "kind": kind.name}
    for path, text in _texts(names, target.resolve()).items():
        write_atomically(target / path, text)
    return target


def component_text(kind_name: str, cls: str) -> str:
    """The source of the example of a kind, with a class name of one's own."""
    source = (Path(__file__).parent / "templates" / f"{kind_name}.py").read_text(encoding="utf-8")
    return re.sub(r"\bExample(Config)?\b", rf"{cls}\1", source.partition("\n")[2])


def experiment_text(kind_name: str, name: str, data: str = "plays.csv") -> str:
    """An experiment that uses a component of that kind and name; `data` is the file of a
    dataset."""
    sections = {
        "callback": f'[[callbacks]]\nname = "{name}"\n',
        "dataset": _SMALL_COHORT.replace("20", "10"),
        "baseline": _SMALL_COHORT,
        "attack": _SMALL_COHORT,
        "metric": _SMALL_COHORT,
        "sampler": f'[sampler]\nname = "{name}"\ncohort = 20\n',
        "mechanism": (
            '[sampler]\nname = "full"\n\n[privacy]\nclip-norm = 1.0\nnoise-multiplier = 1.0\n'
            f'mechanism = "{name}"\n'
        ),
        "poisoning": f'[adversary]\nattack = "{name}"\nshare = 0.1\n\n{_SMALL_COHORT}',
        "perturbation": f'[perturb]\nname = "{name}"\n\n{_SMALL_COHORT}',
    }
    own = sections.get(kind_name, f'[{kind_name}]\nname = "{name}"\n\n{_SMALL_COHORT}')
    baselines = ["popularity", "ease", *([name] if kind_name == "baseline" else [])]
    return files.EXPERIMENT.format(
        name=name,
        title=(
            f"The {kind_name} {name} on"
            f" {'its own data' if kind_name == 'dataset' else 'synthetic data'}"
        ),
        above="0.5" if kind_name == "dataset" else "3.0",
        dataset=_TABLE.format(name=name, path=data) if kind_name == "dataset" else _SYNTHETIC,
        sections=own,
        baselines=", ".join(f'"{one}"' for one in baselines),
        metrics=f'\nmetrics = ["{name}"]' if kind_name == "metric" else "",
    )


def _texts(names: dict[str, str], target: Path) -> dict[str, str]:
    """All files of the package, by path."""
    name = names["name"]
    module = names["module"]
    kind = names["kind"]
    run = f"fedrec run {name}.toml"
    if kind == "attack":
        run = f"fedrec attack {name} {name}.toml"
    settings = {
        "sampler": '    settings = {"cohort": 6}\n',
        "dataset": files.WRITES_A_TABLE,
        "mechanism": '    experiment = {"sampler": {"name": "full"}}\n',
    }.get(kind, "")
    imports = "import pytest\n" if kind == "dataset" else ""
    test = files.TEST.replace("{settings}", settings).replace("{imports}", imports)
    names = {**names, "run": run, "contract": f"{kind.capitalize()}Contract"}
    texts = {
        "pyproject.toml": _filled(files.PYPROJECT, names),
        "README.md": _filled(files.README + (files.FLOWER if kind in SECTION_KINDS else ""), names),
        f"{module}/__init__.py": f'"""{name}: a {kind} for fedrec."""\n',
        f"{module}/{kind}.py": component_text(kind, names["cls"]),
        f"{module}/server_app.py": files.SERVER_APP,
        f"{module}/client_app.py": files.CLIENT_APP,
        f"{name}.toml": experiment_text(kind, name, str(target / "plays.csv")),
        f"tests/test_{module}.py": _filled(test, names),
    }
    if kind == "dataset":
        rows = [f"{user},artist{artist},{plays}" for user, artist, plays in _ROWS]
        texts["plays.csv"] = "\n".join(["listener,artist,plays", *rows]) + "\n"
    return texts


def _filled(text: str, names: dict[str, str]) -> str:
    for key, value in names.items():
        text = text.replace("{" + key + "}", value)
    return text


def _module_of(name: str) -> str:
    """The Python package of that name.

    Raises:
        ExperimentError: it is not a valid name for Python, pip and Flower.
    """
    module = name.replace("-", "_")
    if (
        not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name)
        or len(name) > 32
        or keyword.iskeyword(module)
    ):
        raise ExperimentError(
            f"{name!r} is not a valid name of a package",
            expected=(
                "at most 32 lower-case letters, digits and single hyphens, a letter first, no word"
                " of Python"
            ),
            got=name,
            fix="fedrec new strategy my-idea",
        )
    return module


def _refuse_taken(name: str, module: str, built_in: list[str], target: Path) -> None:
    if name in built_in:
        got = "a built-in of fedrec"
        fix = "choose another name: the built-in would hide it"
    elif importlib.util.find_spec(module) is not None:
        got = f"a package {module!r} that can be imported already"
        fix = "choose another name"
    elif target.exists():
        got = f"{target} exists already"
        fix = "choose another name, or --into another folder"
    else:
        return
    raise ExperimentError(f"the name {name!r} is taken", expected="a new name", got=got, fix=fix)
