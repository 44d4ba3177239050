# SPDX-License-Identifier: Apache-2.0
"""Base class of all configurations: frozen, strict, kebab-case in TOML, one docstring per field."""

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Self, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedrec.errors import ExperimentError, did_you_mean

Width: TypeAlias = Annotated[int, Field(ge=1, le=2**16)]
"""Width of a layer or an embedding, limited to avoid running out of memory."""
_LARGEST = 2**63 - 1  # largest integer of numpy and torch
_DEEPEST = 50  # tables within tables


@lru_cache(maxsize=4096)  # the same names are asked for in every block of clients
def fits(name: str, patterns: tuple[str, ...]) -> bool:
    """True if the name of a parameter matches one of some patterns, such as `layer*`."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _kebab(name: str) -> str:
    return name.replace("_", "-")


class Config(BaseModel):
    """Base class of a component's settings, defined above the component in its file.

    Fields are written `snake_case` in Python and `kebab-case` in TOML. Unknown keys are refused.
    The docstring below a field (meaning, unit, range) is shown by `fedrec list` and by error
    messages, see `descriptions`.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=_kebab,
        populate_by_name=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    @classmethod
    def parse(cls, settings: Mapping[str, Any], *, at: str = "") -> Self:
        """Validate `settings`; `at` is the full key of the table they came from.

        Raises:
            ExperimentError: a key is unknown or a value is wrong; the error names the first fault
                with its full key.
        """
        _refuse_unreadable(settings, at)
        try:
            # As JSON, because there pydantic's strict mode accepts a list as a tuple and a string
            # as a path, but not "3", true or 3.0 as an integer.
            return cls.model_validate_json(json.dumps(dict(settings), default=str), strict=True)
        except ValidationError as error:
            raise _explain(cls, error, at) from None

    def table(self) -> dict[str, Any]:
        """Return the settings as a TOML table (kebab-case keys, no empty values)."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    def seeded(self, seed: int) -> Self:
        """Derive seeds that are not set from the experiment's seed."""
        return self

    def files(self) -> Iterator[str]:
        """Yield the files and folders named in the settings, including nested tables."""
        for name in type(self).model_fields:
            yield from _files(getattr(self, name))

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """Docstrings of the fields, by name."""
        texts = {name: field.description for name, field in cls.model_fields.items()}
        return {name: text for name, text in texts.items() if text}


def _files(value: Any) -> Iterator[str]:
    if isinstance(value, Config):
        yield from value.files()
    elif isinstance(value, Path):
        yield str(value)
    elif isinstance(value, Mapping):
        yield from _files(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from _files(inner)


def _refuse_unreadable(value: Any, key: str, depth: int = 0) -> None:
    """Check that tables and lists are not nested too deeply, and that integers fit into 64 bits."""
    if depth > _DEEPEST:
        raise ExperimentError(
            f"{key[:100]!r}... is nested too deeply",
            expected=f"at most {_DEEPEST} levels of tables or lists",
            fix="check the brackets",
        )
    if isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
        raise ExperimentError(
            f"wrong value for {key!r}",
            expected="a whole number below 2^63",
            got=_shown(value),
            fix="use a smaller number, or a text in quotes",
        )
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _refuse_unreadable(inner, f"{key}.{name}" if key else str(name), depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            _refuse_unreadable(inner, key, depth + 1)


def _explain(cls: type[Config], error: ValidationError, at: str) -> ExperimentError:
    fault = error.errors(include_url=False)[0]
    path = [str(part) for part in fault["loc"]]
    key = ".".join([*([at] if at else []), *path]) or at
    others = error.error_count() - 1
    more = f" (and {others} more error{'s' if others > 1 else ''})" if others else ""
    if fault["type"] == "extra_forbidden":
        return ExperimentError(
            f"unknown key {key!r}{more}",
            got=f"{path[-1]} = {fault['input']!r}"[:200],
            fix=did_you_mean(path[-1], map(_kebab, _innermost(cls, path)[0].model_fields)),
        )
    if fault["type"] == "missing":
        return ExperimentError(
            f"missing key {key!r}{more}", expected=f"a value for {key!r}", fix=f"set {key} = ..."
        )
    expected = fault["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    problem = f"wrong value for {key!r}{more}" if key else f"inconsistent settings{more}"
    return ExperimentError(
        problem, expected=expected, got=_shown(fault["input"]), fix=_meaning(cls, path)
    )


def _innermost(cls: type[Config], path: list[str]) -> tuple[type[Config], list[str]]:
    """Configuration class of the innermost table on a path of keys, and the remaining keys."""
    while len(path) > 1:
        field = cls.model_fields.get(path[0].replace("-", "_"))
        nested = _config_in(field.annotation) if field else None
        if nested is None:
            break
        cls = nested
        path = path[1:]
    return cls, path


def _config_in(annotation: object) -> type[Config] | None:
    """Configuration class of a field, even an optional one (`Config | None`)."""
    for kind in (annotation, *(get_args(annotation) if isinstance(annotation, UnionType) else ())):
        if isinstance(kind, type) and issubclass(kind, Config):
            return kind
    return None


def _meaning(cls: type[Config], path: list[str]) -> str | None:
    """Description of the setting at a path of keys; None if unknown."""
    cls, inner = _innermost(cls, path)
    text = cls.descriptions().get(inner[0].replace("-", "_")) if inner else None
    return f"{inner[0]}: {' '.join(text.split())}" if text else None


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 200 else text[:200] + '...'} ({type(value).__name__})"
