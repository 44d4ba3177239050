# SPDX-License-Identifier: Apache-2.0
"""A growing table as CSV text: byte for byte the output of pandas, but earlier rows are cached as
text.

A run writes its rounds after each round. Formatting all of them each time costs time that grows
with the square of the number of rounds: of a run of 1,880 quick rounds it was a quarter. Pandas,
which takes 33 MiB, is imported only for columns of mixed types, which no round of ours has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedrec.evaluation.column_table import csv_lines


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
        added = rows[known:]
        if grown and all(self._fits(row) for row in added):
            self._parts.append(csv_lines(self._values(row) for row in added))
        else:
            names = dict.fromkeys(name for row in rows for name in row)
            self._kinds = {name: _kind([row.get(name) for row in rows]) for name in names}
            self._parts = [self._whole(rows)]
        self._rows = list(rows)
        return "".join(self._parts)

    def _whole(self, rows: Sequence[Mapping[str, Any]]) -> str:
        if None in self._kinds.values():
            import pandas as pd

            return pd.DataFrame(list(rows)).to_csv(index=False)
        return csv_lines([list(self._kinds), *(self._values(row) for row in rows)])

    def _values(self, row: Mapping[str, Any]) -> list[Any]:
        """The values of a row in the order of the columns."""
        return [row.get(name) for name in self._kinds]

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
