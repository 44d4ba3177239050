# SPDX-License-Identifier: Apache-2.0
"""A growing table as CSV text: byte for byte the output of pandas, but earlier rows are cached as
text.

A run writes its rounds after each round. Formatting all of them each time costs time that grows
with the square of the number of rounds: of a run of 1,880 quick rounds it was a quarter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd


class IncrementalCsv:
    """The text of one table."""

    def __init__(self) -> None:
        self._rows: list[Mapping[str, Any]] = []
        self._kinds: dict[str, type | None] = {}
        self._parts: list[str] = []

    def text(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """The whole table: header and all rows, as `pandas.DataFrame(rows).to_csv(index=False)`.

        Rows are formatted again unless they begin with the rows of the last call and the new ones
        do not change the type of a column.
        """
        known = len(self._rows)
        grown = 0 < known <= len(rows) and all(
            old is row for old, row in zip(self._rows, rows, strict=False)
        )
        added = list(rows[known:])
        if grown and all(self._fits(row) for row in added):
            if added:
                frame = pd.DataFrame(added, columns=list(self._kinds))
                self._parts.append(frame.to_csv(index=False, header=False))
        else:
            frame = pd.DataFrame(list(rows))
            self._kinds = {
                str(name): _kind([row.get(name) for row in rows]) for name in frame.columns
            }
            self._parts = [frame.to_csv(index=False)]
        self._rows = list(rows)
        return "".join(self._parts)

    def _fits(self, row: Mapping[str, Any]) -> bool:
        """Whether pandas would format earlier rows the same with this row appended."""
        known = all(name in self._kinds for name in row)
        return known and all(
            kind is not None and _is(row.get(name), kind) for name, kind in self._kinds.items()
        )


def _kind(values: Sequence[Any]) -> type | None:
    """The common type of a column's values; None if it is mixed or not supported."""
    return next(
        (kind for kind in (float, int, str) if all(_is(value, kind) for value in values)), None
    )


def _is(value: Any, kind: type) -> bool:
    return type(value) is kind or (kind is float and value is None)
