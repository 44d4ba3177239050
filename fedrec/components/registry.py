# SPDX-License-Identifier: Apache-2.0
"""Registry of components: classes by name, for every kind, and their settings."""

import functools
import importlib
import importlib.util
import inspect
import json
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from traceback import extract_tb
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from fedrec.config import Config
from fedrec.errors import ExperimentError, unknown

# The settings of a component: type, default, range and description of each.
#
# Everything is read from the component's configuration class, so that help, documentation and error
# messages agree.

_WORDS = {int: "integer", float: "number", bool: "true or false", str: "text"}
_BOUNDS = {
    annotated_types.Ge: (">=", "ge"),
    annotated_types.Gt: (">", "gt"),
    annotated_types.Le: ("<=", "le"),
    annotated_types.Lt: ("<", "lt"),
}


@dataclass(frozen=True)
class Setting:
    """Description of a setting.

    Attributes:
        key: as written in TOML, with the enclosing tables: `evaluation.fine-tune.epochs`.
        type: such as `number`, `list of integer` or the allowed values.
        default: in TOML syntax; `required` if there is none, empty if the key is left out.
        range: such as `>= 0, < 1`; empty without bounds.
        about: its description.
    """

    key: str
    type: str
    default: str
    range: str
    about: str


def settings_of(component: type, *, nested: bool = True) -> list[Setting]:
    """List the settings of a component, or of a configuration class itself.

    With `nested` the keys of nested tables are included if they are fixed.

    For a component without a configuration class, such as Flower's own strategies, these are the
    arguments of its constructor.
    """
    config = component if issubclass(component, Config) else getattr(component, "Config", None)
    if config is not None:
        return list(_of_config(config, nested=nested))
    return [
        Setting(
            name.replace("_", "-"),
            "" if parameter.annotation is parameter.empty else str(parameter.annotation),
            "required" if parameter.default is parameter.empty else _default(parameter.default),
            "",
            "",
        )
        for name, parameter in inspect.signature(component).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        or parameter.kind is parameter.KEYWORD_ONLY
        if not callable(parameter.default)
    ]


def _of_config(config: type[Config], within: str = "", *, nested: bool) -> Iterator[Setting]:
    texts = config.descriptions()
    for name, field in config.model_fields.items():
        key = within + name.replace("_", "-")
        yield Setting(
            key,
            _words_of(field.annotation),
            _default_of(field),
            ", ".join(_bounds(field.metadata)),
            " ".join(texts.get(name, "").split()),
        )
        inner = _nested(field.annotation) if nested else None
        if inner is not None:
            named = "NAME." if get_origin(field.annotation) is dict else ""
            yield from _of_config(inner, f"{key}.{named}", nested=True)


def _words_of(annotation: Any) -> str:
    """Describe a type in words."""
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        bounds = ", ".join(_bounds(arguments[1:]))
        return _words_of(arguments[0]) + (f" {bounds}" if bounds else "")
    if origin is Literal:
        return " or ".join(_default(value) for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words_of(a) for a in arguments if a is not type(None)))
    if origin in (tuple, list, frozenset, set):
        inner = " or ".join(dict.fromkeys(_words_of(a) for a in arguments if a is not Ellipsis))
        return f"list of {inner}" if inner else "list"
    if origin in (dict, Mapping) or annotation is dict:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return "table"
    return _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)).lower())


def _nested(annotation: Any) -> type[Config] | None:
    """Configuration class of a table with fixed keys, or of the component that the table names."""
    for kind in (annotation, *get_args(annotation)):
        config = isinstance(kind, type) and issubclass(kind, Config)
        if config and kind.model_config.get("extra") == "forbid":
            return kind
    return None


def _bounds(metadata: Iterable[Any]) -> Iterator[str]:
    for bound in metadata:
        if isinstance(bound, FieldInfo):
            yield from _bounds(bound.metadata)
        for kind, (sign, attribute) in _BOUNDS.items():
            if isinstance(bound, kind):
                yield f"{sign} {getattr(bound, attribute):g}"
        if isinstance(bound, annotated_types.MinLen):
            yield f"at least {bound.min_length}"
        elif pattern := getattr(bound, "pattern", None):
            yield f"matches {pattern}"


def _default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return _default(value)


def _default(value: Any) -> str:
    """Format a value in TOML syntax; empty for None."""
    if value is None:
        return ""
    if isinstance(value, Config):
        value = value.table()
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key} = {_default(inner)}" for key, inner in value.items())
        return "{ " + inner + " }" if inner else "{}"
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + ", ".join(map(_default, value)) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value, default=str)


def covers_overrides(cls: type, name: str, others: Sequence[str]) -> bool:
    """True if a subclass that overrides some of the `others` also overrides the method `name`,
    which describes them.

    Otherwise it inherits an outdated description.
    """

    def age(method: str) -> int:
        return next(age for age, owner in enumerate(cls.__mro__) if method in vars(owner))

    return all(age(name) <= age(other) for other in others)


# Classes by name, for every kind of component.
#
# A name is resolved in this order:
#
# 1. `"package.module:Class"`: that class, from anywhere on `sys.path`;
# 2. a built-in: a class with `name = "..."` in its body, in any module of the kind's home, which is
#    a module, or a package with its subpackages;
# 3. an entry point of the group `fedrec.<kind>` that an installed package declares.
#
# A new built-in is a new class with a public `name`; there is no list to edit. A class that only
# inherits a name is not a component. Names are read from the modules' text, without importing them,
# so `name = "..."` must be on its own line. Homes and base classes are strings because this core
# library must not import the packages above it.


@dataclass(frozen=True)
class Kind:
    """Kind of component: the package or module of its built-ins, their base class, and the table
    that names one.

    A component of any kind may have a `name`, which the built-ins have, and a `paper`, the source
    that it implements; `fedrec list` shows both.
    """

    name: str
    home: str
    base: str
    table: str = ""

    @property
    def group(self) -> str:
        """Entry-point group by which installed packages provide components of this kind."""
        return f"fedrec.{self.name}"

    @property
    def key(self) -> str:
        """Name of the kind's table in an experiment."""
        return self.table or self.name


DATASET = Kind("dataset", "fedrec.data.readers", "fedrec.data.reader:Reader")
SPLIT = Kind("split", "fedrec.data.splits", "fedrec.data.splits.rules:Split")
MODEL = Kind("model", "fedrec.models", "fedrec.models.base:Model")
STEP = Kind("step", "clients.steps", "clients.step:Step")
STRATEGY = Kind("strategy", "strategies", "flwr.serverapp.strategy:Strategy")
SAMPLER = Kind("sampler", "server.samplers", "server.samplers:Sampler")
BASELINE = Kind("baseline", "fedrec.baselines", "fedrec.baselines.base:Baseline")
CALLBACK = Kind("callback", "server.callbacks", "server.callbacks:Callback")
PERTURBATION = Kind(
    "perturbation", "fedrec.perturb", "fedrec.data.perturbation:Perturbation", table="perturb"
)
ATTACK = Kind("attack", "simulations.attacks", "simulations.attacks.base:Attack")
MECHANISM = Kind(
    "mechanism",
    "fedrec.privacy.mechanisms",
    "fedrec.privacy.mechanisms:Mechanism",
    table="privacy.mechanism",
)
POISONING = Kind(
    "poisoning",
    "simulations.poisoning",
    "simulations.poisoning:Poisoning",
    table="adversary.attack",
)
COMPRESSION = Kind("compression", "fedrec.compression", "fedrec.compression.codec:Compression")
METRIC = Kind("metric", "fedrec.metrics", "fedrec.metrics.base:Metric")

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


_TOKENS = re.compile(r'"""|^class (\w+)|^    name = "([^"\n]+)"(?=\n|  #)|^[\w@]', re.MULTILINE)


def resolve(kind: Kind, name: str) -> type:
    """Find the class of a name.

    Raises:
        ExperimentError: the name is unknown, or its module cannot be imported, or does not define a
            class of this kind.
    """
    if ":" in name:
        return _from_path(kind, name)
    if name in _builtins(kind):
        return _class_of(kind, name)
    path = place_of(kind, name)
    if path is not None:
        return _from_path(kind, path)
    expected = f"a built-in {kind.name}, an installed plug-in, or 'package.module:Class'"
    raise unknown(kind.name, name, available_names(kind), expected)


def place_of(kind: Kind, name: str) -> str | None:
    """Location of a component in an installed package, as `package.module:Class`; nothing is
    imported."""
    return next(
        (entry.value for entry in entry_points(group=kind.group) if entry.name == name), None
    )


def ours(kind: Kind, component: type) -> bool:
    """True if a class is from the home of its kind and not from a plug-in."""
    return f"{component.__module__}.".startswith(f"{kind.home}.")


def builtin_names(kind: Kind) -> list[str]:
    """List the names of the built-ins of a kind, without importing them.

    Raises:
        ExperimentError: a name is duplicate.
    """
    return sorted(_builtins(kind))


@functools.lru_cache  # a node asks in every round, and listing the folders takes half a millisecond
def _builtins(kind: Kind) -> dict[str, str]:
    """`package.module:Class` of each built-in, by name, without importing any."""
    paths: dict[str, str] = {}
    for module, file in _modules(kind.home):
        for cls, name in _names_in(file.read_text("utf-8")):
            if name in paths:
                raise ExperimentError(
                    f"duplicate {kind.name} name {name!r}",
                    got=f"{paths[name]} and {module}:{cls}",
                    fix="rename one of them",
                )
            paths[name] = f"{module}:{cls}"
    return paths


def _modules(home: str) -> Iterator[tuple[str, Path]]:
    """Yield dotted name and file of a home's modules: all in a package, or the module itself."""
    spec = importlib.util.find_spec(home)
    folders = spec.submodule_search_locations if spec else None
    if spec and spec.origin and folders is None:
        yield home, Path(spec.origin)
    for folder in map(Path, folders or ()):
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            yield ".".join([home, *parts]).removesuffix(".__init__"), file


def _names_in(source: str) -> Iterator[tuple[str, str]]:
    """Yield the classes of a module with `name = "..."` in their body, and these names."""
    cls = ""
    in_text = False
    for token in _TOKENS.finditer(source):
        if token[0] == '"""':
            in_text = not in_text
        elif not in_text and not token[2]:
            cls = token[1] or ""
        elif not in_text and cls:
            yield cls, token[2]


def available_names(kind: Kind) -> list[str]:
    """Names of built-ins and of installed plug-ins."""
    return sorted({*builtin_names(kind), *(entry.name for entry in entry_points(group=kind.group))})


def available(kind: Kind) -> Iterator[tuple[str, type | ExperimentError]]:
    """Yield the name of each available component of a kind, and its class or the error that
    prevents loading it."""
    for name in available_names(kind):
        try:
            yield name, resolve(kind, name)
        except ExperimentError as error:
            yield name, error


def _from_path(kind: Kind, path: str) -> type:
    module_name, _, class_name = path.partition(":")
    module = _import(kind, module_name)
    component = getattr(module, class_name, None)
    base = _base_of(kind)
    if not (inspect.isclass(component) and issubclass(component, base)):
        raise ExperimentError(
            f"{path!r} is not a {kind.name}",
            expected=f"a class derived from {kind.base}",
            got="no such name" if component is None else repr(component),
            fix=f"check the spelling, and that {class_name} derives from {base.__name__}",
        )
    if inspect.isabstract(component):
        raise ExperimentError(
            f"{path} is an abstract {kind.name}",
            got=f"no {', '.join(sorted(component.__abstractmethods__))}",  # type: ignore[attr-defined]
            fix="implement them, or name another class",
        )
    return component


@functools.cache  # a run of ten milliseconds a round asks some seventy times
def _class_of(kind: Kind, name: str) -> type:
    """Return the class of a built-in."""
    return _from_path(kind, _builtins(kind)[name])


def _base_of(kind: Kind) -> type:
    module_name, _, class_name = kind.base.partition(":")
    return getattr(importlib.import_module(module_name), class_name)


def _import(kind: Kind, module_name: str):
    try:
        return importlib.import_module(module_name)
    # a plug-in may fail in any way; the rest of fedrec works
    except (Exception, SystemExit) as error:
        line = line_of(error)
        beyond = line and not line.startswith((__file__, importlib.__file__))
        fix = f"python -c 'import {module_name}' shows the whole traceback"
        if isinstance(error, ModuleNotFoundError) and _lies_here(module_name):
            fix = "it is in this folder, which Python does not search: PYTHONPATH=. fedrec ..."
        raise ExperimentError(
            f"cannot import {module_name!r} for a {kind.name}" + (f" ({line})" if beyond else ""),
            got=f"{type(error).__name__}: {error}",
            fix=fix,
        ) from error


def line_of(error: BaseException) -> str:
    """File and line where an exception was raised; empty without a traceback."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = [
        frame
        for frame in extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen")
    ]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def _lies_here(module_name: str) -> bool:
    """True if a module's file or package is in the working directory."""
    top = module_name.partition(".")[0]
    return Path(f"{top}.py").is_file() or Path(top).is_dir()
