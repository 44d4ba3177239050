# SPDX-License-Identifier: Apache-2.0
"""One digest of values and arrays, for names of cached results."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

_PLAIN = (str, int, float, bool, type(None), np.generic)


def content_digest(*values: Any) -> str:
    """Hexadecimal digest of arrays, numbers, words, settings, and data classes, mappings and
    sequences of them.

    Raises:
        TypeError: a value is of another kind, which may not show what it depends on.
    """
    found = hashlib.sha256()
    _add(found, values)
    return found.hexdigest()


def source_digest(folder: Path) -> str:
    """Hexadecimal digest of all Python files below a folder."""
    found = hashlib.sha256()
    for source in sorted(folder.rglob("*.py")):
        found.update(f"{source.relative_to(folder)}\0".encode() + source.read_bytes())
    return found.hexdigest()


def _add(found: Any, value: Any) -> None:
    found.update(f"{type(value).__qualname__}(".encode())
    if isinstance(value, np.ndarray):
        found.update(f"{value.dtype.str}{value.shape}".encode())
        plain = value.dtype.hasobject
        found.update(repr(value.tolist()).encode() if plain else np.ascontiguousarray(value).data)
    elif isinstance(value, _PLAIN) or _are_words(value):
        found.update(repr(value).encode())
    else:
        for part in _parts(value):
            _add(found, part)
    found.update(b")")


def _are_words(value: Any) -> bool:
    """Whether it is a sequence of words, of which there may be millions."""
    return isinstance(value, (list, tuple)) and all(type(part) is str for part in value)


def _parts(value: Any) -> list[Any]:
    """What a value consists of."""
    if isinstance(value, BaseModel):
        return _parts(value.model_dump(mode="json"))
    if isinstance(value, Mapping):
        return [part for key in sorted(value) for part in (key, value[key])]
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, (list, tuple)):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no digest")
