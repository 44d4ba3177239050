# SPDX-License-Identifier: Apache-2.0
"""Several dictionaries in one, distinguished by prefixes of the names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

Value = TypeVar("Value")


def add_prefix(tables: Mapping[str, Mapping[str, Value]]) -> dict[str, Value]:
    """Merge several dictionaries, each under its prefix, in order; `under` extracts one."""
    return {
        f"{prefix}{name}": value
        for prefix, table in tables.items()
        for name, value in table.items()
    }


def strip_prefix(prefix: str, table: Mapping[str, Value]) -> dict[str, Value]:
    """The entries whose names begin with a prefix, in order, by the rest of their names."""
    return {
        name.removeprefix(prefix): value for name, value in table.items() if name.startswith(prefix)
    }


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested dictionaries by their full keys, such as `strategy.server-lr`."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
