# SPDX-License-Identifier: Apache-2.0
"""Several dictionaries of named arrays in one, distinguished by prefixes of the names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")


def together(tables: Mapping[str, Mapping[str, Value]]) -> dict[str, Value]:
    """Merge several dictionaries, each under its prefix, in order; `under` extracts one."""
    return {
        f"{prefix}{name}": value
        for prefix, table in tables.items()
        for name, value in table.items()
    }


def under(prefix: str, table: Mapping[str, Value]) -> dict[str, Value]:
    """The entries whose names begin with a prefix, in order, by the rest of their names."""
    return {
        name.removeprefix(prefix): value for name, value in table.items() if name.startswith(prefix)
    }
