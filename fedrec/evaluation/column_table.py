# SPDX-License-Identifier: Apache-2.0
"""A small table as arrays. Pandas takes 33 MiB and a quarter of a second of each process that
imports it, so a run writes its tables without it."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class ColumnTable:
    """A table whose rows have names.

    Attributes:
        of_rows: what the names of the rows are, such as `client`.
        names: `[rows]`, numbers or texts.
        columns: `[rows]` each, by name.
    """

    of_rows: str
    names: np.ndarray | Sequence[str]
    columns: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, table: pd.DataFrame | ColumnTable | list[dict[str, Any]]) -> ColumnTable:
        """The same table. Rows of a list are numbered; where one lacks a value, or has None, it is
        NaN."""
        if isinstance(table, ColumnTable):
            return table
        if isinstance(table, list):
            names = dict.fromkeys(name for row in table for name in row)
            columns = {name: np.array([_known(row.get(name)) for row in table]) for name in names}
            return cls("", np.arange(len(table)), columns)
        columns = {str(name): table[name].to_numpy() for name in table.columns}
        return cls(str(table.index.name), table.index.to_numpy(), columns)

    @classmethod
    def read_csv(cls, content: bytes, chosen: Sequence[str]) -> ColumnTable:
        """Columns of a table that `csv` wrote, of numbers like the names of its rows.

        Args:
            content: of the file, encoded in UTF-8.
            chosen: the columns; those that the table lacks are left out.

        Raises:
            ValueError, csv.Error: it is no table, or has text in these columns.
        """
        first, _, rows = content.decode().partition("\n")
        header = next(csv.reader([first]), [])
        if not header:
            raise ValueError("a table without columns")
        known = [name for name in chosen if name in header]
        names, *columns = _numbers(rows, [0, *map(header.index, known)])
        return cls(header[0], names.astype(np.int64), dict(zip(known, columns, strict=True)))

    def difference(self, other: ColumnTable, column: str) -> np.ndarray:
        """A column less that of another table, `[rows]` in which both are known. The names of rows
        are numbers."""
        _, own, others = np.intersect1d(self.names, other.names, return_indices=True)
        found = self.columns[column][own] - other.columns[column][others]
        return found[np.isfinite(found)]

    def __len__(self) -> int:
        return len(self.names)

    def after(self, name: str, column: np.ndarray) -> ColumnTable:
        """The table with another column, `[rows]`, before the others."""
        return ColumnTable(self.of_rows, self.names, {name: column, **self.columns})

    def csv(self) -> str:
        """The text that pandas would write."""
        rows = zip(
            _listed(self.names), *(_listed(own) for own in self.columns.values()), strict=True
        )
        return csv_lines([[self.of_rows, *self.columns], *rows])

    def frame(self) -> pd.DataFrame:
        """As a table of pandas."""
        import pandas as pd

        return pd.DataFrame(dict(self.columns), index=pd.Index(self.names, name=self.of_rows))


def joined(first: ColumnTable, second: ColumnTable) -> ColumnTable:
    """The rows of two tables, one after the other; NaN in columns that a table does not have."""
    columns = {
        name: np.concatenate(
            [part.columns.get(name, np.full(len(part), np.nan)) for part in (first, second)]
        )
        for name in dict.fromkeys([*first.columns, *second.columns])
    }
    return ColumnTable(first.of_rows, [*first.names, *second.names], columns)


def csv_lines(rows: Iterable[Sequence[Any]]) -> str:
    """Rows as CSV; nothing is written for None and NaN."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [None if isinstance(one, float) and math.isnan(one) else one for one in row] for row in rows
    )
    return text.getvalue()


def _numbers(rows: str, places: Sequence[int]) -> np.ndarray:
    """The columns at these places, `[places, rows]`; NaN where nothing is written."""
    if not rows:
        return np.empty((len(places), 0))
    return np.loadtxt(
        io.StringIO(rows),
        delimiter=",",
        comments=None,
        quotechar='"',
        usecols=places,
        converters=lambda cell: float(cell or "nan"),
        unpack=True,
        ndmin=2,
    )


def _known(value: Any) -> Any:
    return math.nan if value is None else value


def _listed(values: np.ndarray | Sequence[str]) -> list[Any]:
    return values.tolist() if isinstance(values, np.ndarray) else list(values)
