# SPDX-License-Identifier: Apache-2.0
"""Strict, fast reading of delimited text: one value per column and line, or an error that names the
line."""

from __future__ import annotations

import csv
import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from fedrec.config import did_you_mean
from fedrec.errors import DataError

_SHOWN = 200


@dataclass(frozen=True)
class Layout:
    """Format of the lines of a file.

    Attributes:
        columns: name -> dtype (a NumPy integer or float type, or `str`). Without a header: all
            columns, in order; with a header: the requested columns, in any order.
        separator: between two values; `"::"` is allowed.
        header: whether the first line names the columns.
        quoted: whether values may stand in double quotes.
        encoding: of the whole file.
    """

    columns: Mapping[str, type]
    separator: str = "\t"
    header: bool = False
    quoted: bool = False
    encoding: str = "utf-8"


def read_delimited(path: Path, layout: Layout) -> dict[str, np.ndarray]:
    """The requested columns of a file, each `[lines]` of its type; text is an object array.

    Raises:
        DataError: a column is missing, or a line has too few or too many values or one that is not
            of its type.
    """
    names = _header(path, layout)
    try:
        with warnings.catch_warnings():
            # a first line with too many values only warns
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = _parsed(path, layout, names)
    except (ValueError, OverflowError, pd.errors.ParserWarning) as error:
        raise _first_fault(path, layout, names, error) from None
    return {
        name: frame[name].to_numpy(dtype=object if kind is str else kind)
        for name, kind in layout.columns.items()
    }


def _parsed(path: Path, layout: Layout, names: list[str]) -> pd.DataFrame:
    # If columns are selected, the parser accepts lines with too many values, so this is done only
    # if it saves memory.
    some = set(names) != set(layout.columns)
    kinds: dict = dict(layout.columns)
    return pd.read_csv(
        _opened(path, layout),
        sep=_single(layout),
        header=0 if layout.header else None,
        names=names,
        usecols=list(layout.columns) if some else None,  # pyright: ignore[reportArgumentType]
        dtype=kinds,
        encoding=layout.encoding,
        na_filter=False,
        index_col=False,
        quoting=csv.QUOTE_MINIMAL if layout.quoted else csv.QUOTE_NONE,
    )


def missing_column(
    path: Path, column: str, present: Sequence[str], *, setting: str | None = None
) -> DataError:
    """The error for a missing column; `setting` is the key that names it."""
    return DataError(
        f"{path} has no column {column!r}",
        expected=f"a column {column!r}" + (f" ({setting})" if setting else ""),
        got="columns " + ", ".join(repr(name) for name in present),
        fix=did_you_mean(column, present),
    )


def _single(layout: Layout) -> str:
    return "\t" if len(layout.separator) > 1 else layout.separator


def _opened(path: Path, layout: Layout) -> Path | io.BytesIO:
    # The fast parser knows separators of one character only; replacing them costs a few hundredths
    # of a second.
    if len(layout.separator) == 1:
        return path
    return io.BytesIO(
        path.read_bytes().replace(layout.separator.encode(), _single(layout).encode())
    )


def _rows(path: Path, layout: Layout) -> Iterator[list[str]]:
    with path.open(encoding=layout.encoding, errors="replace", newline="") as file:
        lines = (line.replace(layout.separator, _single(layout)) for line in file)
        quoting = csv.QUOTE_MINIMAL if layout.quoted else csv.QUOTE_NONE
        yield from csv.reader(lines, delimiter=_single(layout), quoting=quoting)


def _header(path: Path, layout: Layout) -> list[str]:
    if not layout.header:
        return list(layout.columns)
    names = [name.removeprefix("\ufeff") for name in next(_rows(path, layout), [])]
    for column in layout.columns:
        if column not in names:
            raise missing_column(path, column, names)
    return names


def _first_fault(path: Path, layout: Layout, names: list[str], error: Exception) -> DataError:
    """Find the first bad line, slowly: the fast parser does not say which one it was."""
    for number, row in enumerate(_rows(path, layout), start=1):
        if not row or (layout.header and number == 1):
            continue
        expected = _fault(row, layout, names)
        if expected:
            line = layout.separator.join(row)[:_SHOWN]
            return malformed_line(path, number, line, expected)
    return DataError(
        f"{path} cannot be read",
        expected="delimited text",
        got=str(error),
        fix="get the file again",
    )


def _fault(row: list[str], layout: Layout, names: list[str]) -> str | None:
    """The expected format of a row, or None if it is correct."""
    if len(row) != len(names):
        return f"{len(names)} values: {', '.join(names)}"
    for name, text in zip(names, row, strict=True):
        dtype = layout.columns.get(name, str)
        if dtype is not str and not _converts(text, dtype):
            return (
                f"{'a whole number' if np.issubdtype(dtype, np.integer) else 'a number'} as"
                f" {name!r}"
            )
    return None


def _converts(text: str, dtype: type) -> bool:
    try:
        if np.issubdtype(dtype, np.integer):
            limits = np.iinfo(dtype)  # pyright: ignore[reportArgumentType]
            return limits.min <= int(text) <= limits.max
        return math.isfinite(float(text))
    except ValueError:
        return False


def malformed_line(path: Path, number: int, line: str, expected: str) -> DataError:
    """The error for one line that is not in the documented format."""
    return DataError(
        f"{path}, line {number:,}: not in the documented format",
        expected=expected,
        got=repr(line),
        fix="get the file again, or fix this line",
    )
