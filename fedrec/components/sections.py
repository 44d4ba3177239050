# SPDX-License-Identifier: Apache-2.0
"""Sections of an experiment (tables that name a component), overrides of single keys, and errors
that name a faulty component."""

import inspect
import logging
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, TypeAlias

import numpy as np
from pydantic import BeforeValidator, ConfigDict

from fedrec.components import registry
from fedrec.components.registry import line_of
from fedrec.config import Config, did_you_mean
from fedrec.errors import ComponentError, ExperimentError, FedrecError


class Section(Config):
    """Table with the name and settings of a component, such as `[model]`."""

    model_config = ConfigDict(extra="allow")

    name: str
    """Built-in name, installed plug-in, or `package.module:Class`."""

    @property
    def options(self) -> dict[str, Any]:
        """Settings of the component, without its name."""
        return dict(self.model_extra or {})


def _by_name(value: Any) -> Any:
    """Convert a name to a section without settings."""
    return {"name": value} if isinstance(value, str) else value


Named: TypeAlias = Annotated[Section, BeforeValidator(_by_name)]
"""A section, or the name of a component without settings."""


def component_settings(
    kind: registry.Kind, section: Section, *, at: str | None = None, seed: int | None = None
) -> Any:
    """Check a section against its component.

    Args:
        kind: of the component.
        section: its name and settings.
        at: full key of the section, for errors.
        seed: of the experiment, for components whose seed is not set (`Config.seeded`); None: they
            remain unset.

    Returns:
        The component's `Config`, or plain keyword arguments when its class has none (Flower's own
        strategies).

    Raises:
        ExperimentError: the component is unknown, or a setting is unknown or wrong.
    """
    at = at or kind.key
    cls = registry.resolve(kind, section.name)
    config_class = getattr(cls, "Config", None)
    if config_class is not None:
        return _with_nested(config_class.parse(section.options, at=at), at, seed)
    parameters = {
        name.replace("_", "-"): parameter
        for name, parameter in inspect.signature(cls).parameters.items()
    }
    arguments = {key.replace("_", "-"): value for key, value in section.options.items()}
    for key in arguments:
        if key not in parameters:
            fix = did_you_mean(key, [*parameters])
            raise ExperimentError(f"unknown key '{at}.{key}'", got=key, fix=fix)
    for key, parameter in parameters.items():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not variadic and key not in arguments:
            fix = f"set it, as {section.name} has no default"
            raise ExperimentError(f"missing key '{at}.{key}'", fix=fix)
    return {key.replace("-", "_"): value for key, value in arguments.items()}


def component_of(
    kind: registry.Kind, section: Section, *arguments: Any, at: str | None = None
) -> Any:
    """Create the component of a section, from its settings and further arguments; `at` is the full
    key of the section, for errors.

    Raises:
        ExperimentError: the component is unknown, or a setting is unknown or wrong.
        ComponentError: the constructor failed.
    """
    cls = registry.resolve(kind, section.name)
    settings = component_settings(kind, section, at=at)
    with component_errors(kind.name, cls, "when it was made"):
        return cls(settings, *arguments)


def fields_of(settings: Config) -> Iterator[tuple[str, registry.Kind | None, Any]]:
    """Yield the name and the value of each field, and the kind of component that it names, if any.

    A field that holds a section is annotated with the kind:
    `inner: Annotated[Section, registry.STRATEGY]`.
    """
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        kinds = (kind for kind in field.metadata if isinstance(kind, registry.Kind))
        yield name, next(kinds, None) if isinstance(value, Section) else None, value


def sections_within(settings: Any) -> Iterator[tuple[str, registry.Kind, Section]]:
    """Yield the sections within a component's settings, each with its key and kind."""
    for name, kind, value in fields_of(settings) if isinstance(settings, Config) else ():
        key = name.replace("_", "-")
        if kind is not None:
            yield key, kind, value
        elif not isinstance(value, Section):
            for inner, inner_kind, section in sections_within(value):
                yield f"{key}.{inner}", inner_kind, section


def nested_sections(settings: Any) -> Iterator[tuple[str, registry.Kind, Section]]:
    """Yield the sections at any depth of a component's settings, each with its key and kind."""
    for key, kind, section in sections_within(settings):
        yield key, kind, section
        for path, inner_kind, inner in nested_sections(component_settings(kind, section)):
            yield f"{key}.{path}", inner_kind, inner


def _with_nested(settings: Config, at: str, seed: int | None) -> Config:
    """Check the sections within settings by their components, and fill in defaults."""
    settings = settings if seed is None else settings.seeded(seed)
    changes: dict[str, Any] = {}
    for name, kind, value in fields_of(settings):
        key = f"{at}.{name.replace('_', '-')}"
        if kind is not None:
            changes[name] = resolved_section(kind, value, at=key, seed=seed)
        elif isinstance(value, Config):
            changes[name] = _with_nested(value, key, seed)
    return settings.model_copy(update=changes) if changes else settings


def resolved_section(
    kind: registry.Kind, section: Section, *, at: str | None = None, seed: int | None = None
) -> Section:
    """Return the section with every default filled in; see `component_settings` for arguments and
    errors."""
    settings = component_settings(kind, section, at=at, seed=seed)
    table = settings.table() if isinstance(settings, Config) else settings
    return Section.model_validate({"name": section.name, **table})


# Overrides of single keys of an experiment, as in `--set key=value`.

log = logging.getLogger("fedrec")
_DEEPEST = 50  # parts of a key


def override(table: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return a table with one key changed.

    Args:
        table: nested tables.
        text: such as `"strategy.server-lr=0.5"`; the value in TOML syntax, a bare word is a string.
            A new component name, such as `"strategy.name=fedavg"`, removes the settings of the
            previous component; engines share their settings.

    Raises:
        ExperimentError: the text has another format, or a part of the key is not a table.
    """
    key, equals, written = text.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path) or len(path) > _DEEPEST:
        problem = f"invalid override {text[:200]!r}"
        raise ExperimentError(problem, expected="key=value", fix="--set strategy.server-lr=0.5")
    try:
        full = re.sub(r"^(\s*[+-]?)\.(?=\d)", r"\g<1>0.", written)  # TOML rejects .5
        value = tomllib.loads(f"value = {full}")["value"]
    except (ValueError, RecursionError):  # TOML's errors, and numbers of thousands of digits
        value = written.strip()  # a bare word, as on a command line
    chosen = table.get(path[0])
    if (
        path[1:] == ["name"]
        and path[0] != "engine"
        and isinstance(chosen, Mapping)
        and chosen.get("name") != value
    ):
        dropped = ", ".join(sorted(set(chosen) - {"name"}))  # settings belong to their component
        if dropped:
            log.warning(
                "%s = %r removes the settings of %r: %s",
                *(key.strip(), value, chosen.get("name"), dropped),
            )
        return {**table, path[0]: {"name": value}}
    return _with(table, path, value, text)


def _with(table: Mapping[str, Any], path: list[str], value: Any, text: str) -> dict[str, Any]:
    head, *rest = path
    if not rest:
        return {**table, head: value}
    inner = table.get(head, {})
    if not isinstance(inner, Mapping):
        raise ExperimentError(
            f"cannot apply the override {text!r}: {head!r} is not a table",
            got=repr(inner),
            fix="check the key",
        )
    return {**table, head: _with(inner, rest, value, text)}


# Errors that name the faulty component: its class, its file and the failure.
#
# A plug-in is third-party code and may fail in any way. Callers state what it was doing, so that a
# failure becomes an error with a name, a file and a reason instead of a traceback through fedrec.


def file_of(component: object) -> str:
    """File that defines a component (a class or an object); empty if there is none."""
    cls = component if inspect.isclass(component) else type(component)
    try:
        return inspect.getfile(cls)
    except (TypeError, OSError):
        return ""


def named(kind: str, component: object) -> str:
    """Description of a component: its kind, its class and its file."""
    cls = component if inspect.isclass(component) else type(component)
    file = file_of(cls)
    return f"{kind} {cls.__name__!r}" + (f" ({file})" if file else "")


@contextmanager
def component_errors(kind: str, component: object, doing: str) -> Iterator[None]:
    """Convert exceptions in the block into errors that name the component.

    Args:
        kind: its kind, such as `"strategy"`.
        component: the component or its class.
        doing: the context, such as `"in round 3"`.

    Raises:
        ComponentError: an exception other than a `FedrecError` was raised.
    """
    try:
        yield
    except FedrecError:
        raise
    except Exception as error:
        line = line_of(error)
        raise ComponentError(
            f"{named(kind, component)} failed {doing}",
            got=f"{type(error).__name__}: {error}"
            + (f" ({line})" if line and line[:1] != "<" else ""),
            fix="fix that file; fedrec --debug shows the whole traceback",
        ) from error


def refuse_wrong(kind: str, component: object, doing: str, *, expected: str, got: str) -> None:
    """Raise an error about a component's wrong result.

    Raises:
        ComponentError: always.
    """
    raise ComponentError(
        f"{named(kind, component)} returned an invalid result {doing}",
        expected=expected,
        got=got,
        fix="fix that file; the contract tests of fedrec.testing find such faults",
    )


def refuse_other_arrays(
    kind: str, component: object, doing: str, arrays: Any, expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that named arrays (or tensors) have the expected names and shapes.

    Raises:
        ComponentError: names or shapes differ.
    """
    if not isinstance(arrays, Mapping):
        got = type(arrays).__name__
        refuse_wrong(kind, component, doing, expected=f"arrays by name: {dict(expected)}", got=got)
        return
    shapes = {str(n): tuple(getattr(v, "shape", ())) for n, v in arrays.items()}
    wrong = [n for n in {**expected, **shapes} if shapes.get(n) != expected.get(n)]
    if wrong:
        right, got = ({n: t[n] for n in wrong if n in t} for t in (expected, shapes))
        got = f"{got or 'no arrays with these names'}"
        refuse_wrong(kind, component, doing, expected=f"the shapes {right}", got=got)


def finite(values: Any) -> bool:
    """True if all values of an array or tensor are finite."""
    with np.errstate(all="ignore"):
        # any NaN or infinity makes the sum non-finite; a sum can also overflow
        total = float(values.sum())
    return bool(np.isfinite(total)) or bool(np.isfinite(np.asarray(values)).all())
