# SPDX-License-Identifier: Apache-2.0
"""What the first lines of a text table tell: its separator, and whether it has a line of names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from fedrec.data.files.tables import TableLayout, column_names, read_table, table_start
from fedrec.errors import DataError

SEPARATORS = (",", "\t", ";", "|", "::", " ")
DATE = r"\d{4}-\d{2}|\d{1,2}\.\d{1,2}\.\d{4}"
_VALUE = rf"\s*(?:-?\d+(?:\.\d+)?(?:e[+-]?\d+)?\s*|(?:{DATE}).*)"
_FIRST_ROWS = 1000


def separator_of(path: Path) -> str:
    """What separates the first row into most values, and most of the next rows into as many; spaces
    only if nothing else does.

    Raises:
        DataError: the file is not readable.
    """

    def fit(separator: str) -> tuple[bool, bool, int, int]:
        above, rows = table_start(path, TableLayout.own({}, separator=separator))
        width = len(rows[0]) if rows else 0
        alike = 2 * sum(len(row) == width for row in rows) > len(rows)
        return width > 1 and separator != " ", alike, width, -above

    return max(SEPARATORS, key=fit)


def first_line_is_row(path: Path, layout: TableLayout) -> bool:
    """Whether the first line of a user's own table has values. Then all of them are numbers or
    dates; or a number or a date stands above such values, or a text above itself, and no text above
    numbers or dates.
    """
    first = column_names(path, layout)
    names = [str(place + 1) for place in range(len(first))]
    bare = replace(layout, names="places", columns=dict.fromkeys(names, str))
    try:
        verdict = _verdict(first, read_table(path, bare, rows=_FIRST_ROWS))
        # an id may recur in the last line
        return bool(_verdict(first, read_table(path, bare)) if verdict is None else verdict)
    except DataError:  # of a line that has other values than the first
        return False


def _verdict(first: list[str], columns) -> bool | None:
    """Whether the first line is a row by the lines below it; None if these do not tell."""
    if all(are_values(np.array(first))):
        return True
    recurs = False
    for value, column in zip(first, columns.values(), strict=True):
        below = column.iloc[1:].dropna().astype(str)
        if below.empty:
            continue
        if are_values(below).all():
            if value and not are_values(np.array([value]))[0]:
                return False
            recurs = recurs or bool(value)
        else:
            recurs = recurs or bool((below == value).any())
    return True if recurs else None


def are_values(texts) -> np.ndarray:
    """Which texts are numbers or dates, `bool [texts]`."""
    return np.asarray(pd.Series(texts, dtype=str).str.fullmatch(_VALUE, case=False), dtype=bool)
