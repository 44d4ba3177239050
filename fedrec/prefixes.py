# SPDX-License-Identifier: Apache-2.0
"""Several tables in one, told apart by what their names begin with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")


def under(prefix: str, table: Mapping[str, Value]) -> dict[str, Value]:
    """The entries whose names begin with a prefix, in order, by the rest of their names."""
    return {
        name.removeprefix(prefix): value for name, value in table.items() if name.startswith(prefix)
    }
