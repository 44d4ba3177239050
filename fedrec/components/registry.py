# SPDX-License-Identifier: Apache-2.0
"""Name -> class, for every kind of component.

A name is resolved in this order:

1. `"package.module:Class"`: that class, from anywhere on `sys.path`;
2. a built-in: the file of that name in the kind's home package or in a folder below it (`"ml-1m"`
   is `fedrec/data/readers/ml_1m.py`, `"ease"` is `fedrec/baselines/factorisation/ease.py`); a kind
   whose classes have a `name` may have several of them in a file (`"recall"` and `"map"` are in
   `fedrec/metrics/whole_lists.py`);
3. an entry point of the group `fedrec.<kind>` that an installed package declares.

There is no list to edit: a new built-in is a new file. Homes and base classes are named by strings
because this core library must not import the packages above it.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from fedrec.components.contract_check import refuse_unusable
from fedrec.components.errors import line_of, raised_by_code
from fedrec.config import did_you_mean
from fedrec.errors import ExperimentError


@dataclass(frozen=True)
class Kind:
    """One kind of component: where its built-ins live, what they derive from, the table that names
    one, and whether its classes have a `name` of their own."""

    name: str
    home: str
    base: str
    table: str = ""
    named: bool = False

    @property
    def group(self) -> str:
        """Entry-point group through which installed packages add components of this kind."""
        return f"fedrec.{self.name}"

    @property
    def key(self) -> str:
        """Name of its table in an experiment."""
        return self.table or self.name


DATASET = Kind("dataset", "fedrec.data.readers", "fedrec.data.reader:Reader")
SPLIT = Kind("split", "fedrec.data.splits", "fedrec.data.split:Split")
MODEL = Kind("model", "fedrec.models", "fedrec.models.base:Model")
STEP = Kind("step", "clients.steps", "clients.step:Step")
STRATEGY = Kind("strategy", "strategies", "flwr.serverapp.strategy:Strategy")
SAMPLER = Kind("sampler", "server.samplers", "server.samplers.base:Sampler")
BASELINE = Kind("baseline", "fedrec.baselines", "fedrec.baselines.base:Baseline")
CALLBACK = Kind("callback", "server.callbacks", "server.callbacks.base:Callback")
PERTURBATION = Kind(
    "perturbation",
    "fedrec.perturb.members",
    "fedrec.data.perturbation:Perturbation",
    table="perturb",
)
ATTACK = Kind("attack", "simulations.attacks.builtin", "simulations.attacks.base:Attack")
MECHANISM = Kind(
    "mechanism",
    "fedrec.privacy.mechanisms",
    "fedrec.privacy.mechanisms.base:Mechanism",
    table="privacy.mechanism",
)
POISONING = Kind(
    "poisoning",
    "simulations.poisoning.attacks",
    "simulations.poisoning.base:Poisoning",
    table="adversary.attack",
)
COMPRESSION = Kind(
    "compression", "fedrec.compression.members", "fedrec.compression.base:Compression"
)
METRIC = Kind("metric", "fedrec.metrics", "fedrec.metrics.base:Metric", named=True)

KINDS = (
    DATASET,
    SPLIT,
    MODEL,
    STEP,
    STRATEGY,
    SAMPLER,
    PERTURBATION,
    BASELINE,
    CALLBACK,
    ATTACK,
    MECHANISM,
    COMPRESSION,
    POISONING,
    METRIC,
)

_NAME = re.compile(r'^    name = "(.+)"$', re.MULTILINE)
_NOT_COMPONENTS = {  # modules with the shared code of components
    "base",
    "callback_list",
    "dp",
    "examples",
    "histories",
    "similarity",
    "training",
    "triples",
    "user_rows",
    "warp_steps",
}


def resolve(kind: Kind, name: str) -> type:
    """The class with that name.

    Raises:
        ExperimentError: the name is unknown, or its module cannot be imported, or holds no class of
            this kind.
    """
    if ":" in name:
        return _from_path(kind, name)
    if name in _builtins(kind):
        return _class_of(kind, name)
    place = place_of(kind, name)
    if place is not None:
        return _from_path(kind, place)
    raise ExperimentError(
        f"unknown {kind.name} {name!r}",
        expected=f"a built-in {kind.name}, an installed plug-in, or 'package.module:Class'",
        got=repr(name),
        fix=did_you_mean(name, available_names(kind)),
    )


def place_of(kind: Kind, name: str) -> str | None:
    """Location of a component in an installed package, as `package.module:Class`; nothing is
    imported."""
    return next(
        (entry.value for entry in entry_points(group=kind.group) if entry.name == name), None
    )


def ours(kind: Kind, component: type) -> bool:
    """Whether a class is a built-in of its kind and not a plug-in."""
    return component.__module__.startswith(f"{kind.home}.")


def builtin_names(kind: Kind) -> list[str]:
    """Names of the built-ins of a kind, without importing them."""
    return sorted(_builtins(kind))


@functools.lru_cache  # a node asks in every round, and listing the folders takes half a millisecond
def _builtins(kind: Kind) -> dict[str, str]:
    """Name -> dotted module of each built-in, without importing any."""
    spec = importlib.util.find_spec(kind.home)
    folders = spec.submodule_search_locations if spec else None
    return {
        name: module
        for folder in folders or ()
        for module, file in _modules(kind.home, Path(folder))
        for name in (_NAME.findall(file.read_text("utf-8")) if kind.named else _name_of(file))
    }


def _name_of(file: Path) -> list[str]:
    """The name of the component in a file; none where it holds something else."""
    other = file.stem.startswith("_") or file.stem in _NOT_COMPONENTS
    return [] if other else [file.stem.replace("_", "-")]


def _modules(package: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """The modules in a package and its subpackages: dotted name and file."""
    for module in pkgutil.iter_modules([str(folder)]):
        name = f"{package}.{module.name}"
        if not module.ispkg:
            yield name, folder / f"{module.name}.py"
        elif not module.name.startswith("_"):
            yield from _modules(name, folder / module.name)


def available_names(kind: Kind) -> list[str]:
    """Names of built-ins and of installed plug-ins."""
    return sorted({*builtin_names(kind), *(entry.name for entry in entry_points(group=kind.group))})


def available(kind: Kind) -> Iterator[tuple[str, type | ExperimentError]]:
    """Every available component of a kind: its name and its class, or the error that prevents
    loading it."""
    for name in available_names(kind):
        try:
            yield name, resolve(kind, name)
        except ExperimentError as error:
            yield name, error


def _from_path(kind: Kind, path: str) -> type:
    module_name, _, class_name = path.partition(":")
    module = _import(kind, module_name)
    found = getattr(module, class_name, None)
    if not (inspect.isclass(found) and issubclass(found, _base_of(kind))):
        raise ExperimentError(
            f"{path!r} is not a {kind.name}",
            expected=f"a class derived from {kind.base}",
            got="no such name" if found is None else repr(found),
            fix=(
                f"check the spelling, and that {class_name} derives from"
                f" {kind.base.partition(':')[2]}"
            ),
        )
    refuse_unusable(kind.name, found, _base_of(kind))
    return found


@functools.cache  # a run of ten milliseconds a round asks some seventy times
def _class_of(kind: Kind, name: str) -> type:
    """The only public class of a built-in's name that its module defines."""
    module_name = _builtins(kind)[name]
    module = _import(kind, module_name)
    base = _base_of(kind)
    own = [
        value
        for key, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, base) and value.__module__ == module_name
        if not key.startswith("_") and not inspect.isabstract(value)
        if not kind.named or getattr(value, "name", None) == name
    ]
    if len(own) != 1:
        raise ExperimentError(
            f"module {module_name!r} does not define exactly one {kind.name}",
            expected=f"one public class derived from {kind.base}",
            got=", ".join(cls.__name__ for cls in own) or "none",
            fix="one concept, one file: move the others",
        )
    return own[0]


def file_of(kind: Kind, name: str) -> str:
    """The file of a component, without importing it; empty if it cannot be determined."""
    path = name if ":" in name else place_of(kind, name) or ""
    module_name = path.partition(":")[0] or _builtins(kind).get(name, "")
    if not module_name:
        return ""
    try:
        spec = importlib.util.find_spec(module_name)
    except Exception:  # a package above it may fail in any way when it is imported
        return ""
    return (spec.origin or "") if spec else ""


def described(kind: Kind, name: str) -> str:
    """Docstring of a component, from its file, so that listing names imports nothing; where it
    cannot be read from there, of the class itself.

    Raises:
        ExperimentError: see `resolve`.
    """
    wanted = (name if ":" in name else place_of(kind, name) or "").partition(":")[2]
    try:
        parsed = ast.parse(Path(file_of(kind, name)).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        parsed = ast.Module([], [])
    classes = [one for one in parsed.body if isinstance(one, ast.ClassDef)]
    public = [one for one in classes if one.name == wanted or not (wanted or one.name[0] == "_")]
    about = ast.get_docstring(public[-1]) if public else None  # below its configuration class
    return about or inspect.getdoc(resolve(kind, name)) or ""


def _base_of(kind: Kind) -> type:
    module_name, _, class_name = kind.base.partition(":")
    return getattr(importlib.import_module(module_name), class_name)


def _import(kind: Kind, module_name: str):
    try:
        return importlib.import_module(module_name)
    # a plug-in may fail in any way; the rest of fedrec works
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) and not raised_by_code(error):
            raise
        place = line_of(error)
        beyond = place and not place.startswith((__file__, importlib.__file__))
        fix = f"python -c 'import {module_name}' shows the whole traceback"
        if isinstance(error, ModuleNotFoundError) and _lies_here(module_name):
            fix = "it is in this folder, where Python does not look: PYTHONPATH=. fedrec ..."
        raise ExperimentError(
            f"cannot import {module_name!r} for a {kind.name}" + (f" ({place})" if beyond else ""),
            expected="an importable module",
            got=f"{type(error).__name__}: {error}",
            fix=fix,
        ) from error


def _lies_here(module_name: str) -> bool:
    """Whether a module's file or package is in the working directory."""
    top = module_name.partition(".")[0]
    return Path(f"{top}.py").is_file() or Path(top).is_dir()
