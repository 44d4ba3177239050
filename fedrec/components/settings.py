# SPDX-License-Identifier: Apache-2.0
"""The settings of a component: type, default, range and description of each.

Everything is read from the component's configuration class, so that help, documentation and error
messages agree.
"""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from fedrec.config import Config

_WORDS = {int: "integer", float: "number", bool: "true or false", str: "text"}
_BOUNDS = {
    annotated_types.Ge: (">=", "ge"),
    annotated_types.Gt: (">", "gt"),
    annotated_types.Le: ("<=", "le"),
    annotated_types.Lt: ("<", "lt"),
}


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        key: as written in TOML, with the enclosing tables: `adaptive-clip.quantile`.
        type: such as `number`, `list of integer` or the allowed values.
        default: in TOML syntax; `required` without one, empty if the key is left out.
        range: such as `>= 0, < 1`; empty without bounds.
        about: its sentence.
    """

    key: str
    type: str
    default: str
    range: str
    about: str

    def table(self) -> dict[str, str]:
        """As JSON values."""
        return {name: getattr(self, name) for name in ("key", "type", "default", "range", "about")}


def settings_of(component: type, *, nested: bool = True) -> list[Setting]:
    """The settings of a component, or of a configuration class itself.

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
            words_of(field.annotation),
            _default_of(field),
            ", ".join(_bounds(field.metadata)),
            " ".join(texts.get(name, "").split()),
        )
        inner = _nested(field.annotation) if nested else None
        if inner is not None:
            named = "NAME." if get_origin(field.annotation) is dict else ""
            yield from _of_config(inner, f"{key}.{named}", nested=True)


def words_of(annotation: Any) -> str:
    """A type in words."""
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        bounds = ", ".join(_bounds(arguments[1:]))
        return words_of(arguments[0]) + (f" {bounds}" if bounds else "")
    if origin is Literal:
        return " or ".join(_default(value) for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(words_of(a) for a in arguments if a is not type(None)))
    if origin in (tuple, list, frozenset, set):
        inner = " or ".join(dict.fromkeys(words_of(a) for a in arguments if a is not Ellipsis))
        return f"list of {inner}" if inner else "list"
    if origin in (dict, Mapping) or annotation is dict:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return "table"
    return _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)).lower())


def _nested(annotation: Any) -> type[Config] | None:
    """The configuration class of a table with fixed keys, or that of the component named in the
    table."""
    for one in (annotation, *get_args(annotation)):
        if (
            isinstance(one, type)
            and issubclass(one, Config)
            and one.model_config.get("extra") == "forbid"
        ):
            return one
    return None


def _bounds(metadata: Iterable[Any]) -> Iterator[str]:
    for one in metadata:
        if isinstance(one, FieldInfo):
            yield from _bounds(one.metadata)
        for kind, (sign, attribute) in _BOUNDS.items():
            if isinstance(one, kind):
                yield f"{sign} {getattr(one, attribute):g}"
        if isinstance(one, annotated_types.MinLen):
            yield f"at least {one.min_length}"
        elif pattern := getattr(one, "pattern", None):
            yield f"matches {pattern}"


def _default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return _default(value)


def _default(value: Any) -> str:
    """A value in TOML syntax; empty for None."""
    if value is None:
        return ""
    if isinstance(value, Config):
        value = value.table()
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key} = {_default(one)}" for key, one in value.items())
        return "{ " + inner + " }" if inner else "{}"
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + ", ".join(map(_default, value)) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value, default=str)
