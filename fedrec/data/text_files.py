# SPDX-License-Identifier: Apache-2.0
"""Text files as they come: packed by gzip or not, in UTF-8 or UTF-16, with lines above the names of
the columns; and other files, which are told what they are and how they become a table."""

from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO

from fedrec.errors import DataError

DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)
"""Errors while a damaged file is unpacked."""
_GZIP = b"\x1f\x8b"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_JSON = re.compile(r"\s*(\[\s*)?\{\s*[\"}]")
_PANDAS = "python -c \"import pandas; pandas.read_{}('FILE').to_parquet('NEW.parquet')\""
_SPREADSHEET = "a spreadsheet or an archive", "export the table as CSV, or unpack the archive"
_OTHERS = {
    b"PK\x03\x04": _SPREADSHEET,
    b"\xd0\xcf\x11\xe0": _SPREADSHEET,
    b"ARROW1": ("an Arrow (Feather) file", _PANDAS.format("feather")),
    b"FEA1": ("a Feather file", _PANDAS.format("feather")),
    b"ORC": ("an ORC file", _PANDAS.format("orc")),
    b"\x89HDF": ("an HDF5 file", _PANDAS.format("hdf")),
    b"\x80": ("a pickle", f"only if you trust its author, {_PANDAS.format('pickle')}"),
    b"SQLite format 3": (
        "an SQLite database",
        "sqlite3 -header -csv FILE 'select * from TABLE' > NEW.csv",
    ),
    b"BZh": ("packed by bzip2", "unpack it: bunzip2 FILE"),
    b"\xfd7zXZ": ("packed by xz", "unpack it: unxz FILE"),
    b"\x28\xb5\x2f\xfd": ("packed by zstd", "unpack it: unzstd FILE"),
}
"""First bytes of other files, their kinds, and what to do with them."""
_HEAD = 4096
_FIRST_ROWS = 50


def _is_packed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_GZIP)) == _GZIP


def encoding_of(path: Path) -> str:
    """`utf-16` where the file says so in its first bytes, else `utf-8-sig`.

    Raises:
        DataError: the file is no text.
    """
    return "utf-16" if _head(path).startswith(_UTF_16) else "utf-8-sig"


def is_json(path: Path) -> bool:
    """Whether a file has JSON objects, one per line or in a list.

    Raises:
        DataError: the file is no text.
    """
    return bool(_JSON.match(_head(path).decode(encoding_of(path), "ignore")))


@contextmanager
def open_text(path: Path, encoding: str, errors: str = "strict") -> Iterator[IO[str]]:
    """A text file, unpacked, with its line ends as they are."""
    opened = gzip.open if _is_packed(path) else open
    with opened(path, "rt", encoding=encoding, errors=errors, newline="") as file:
        yield file


def first_rows(rows: Iterable[list[str]]) -> tuple[int, list[list[str]]]:
    """The number of rows above those of a table, and its first rows, `[rows][values]`.

    Above are empty lines, titles (one value where rows have several), the line `sep=;` of Excel,
    and comments (`#`) of another number of values.
    """
    first = [(above, row) for above, row in enumerate(islice(rows, _FIRST_ROWS)) if row]
    widths = Counter(len(row) for _, row in first)
    usual = max(widths, key=lambda width: (widths[width], width), default=0)
    for index, (above, row) in enumerate(first):
        comment = row[0].startswith("#") and len(row) != usual > 1
        if sum(value.strip() != "" for value in row) >= min(usual, 2) and not comment:
            return above, [row for _, row in first[index:]]
    return 0, []


def what_it_is(path: Path) -> tuple[str, str] | None:
    """The kind of a file that is no text, and what to do with it; None if that is not known."""
    start = _first_bytes(path)
    if start[257:262] == b"ustar":
        return _SPREADSHEET
    return next((kind for first, kind in _OTHERS.items() if start.startswith(first)), None)


def _first_bytes(path: Path) -> bytes:
    with gzip.open(path, "rb") if _is_packed(path) else path.open("rb") as file:
        return file.read(_HEAD)


def _head(path: Path) -> bytes:
    """The first bytes of a text file, unpacked."""
    try:
        head = _first_bytes(path)
    except DAMAGED as error:
        raise DataError(
            f"{path} cannot be unpacked",
            expected="an undamaged gzip file",
            got=str(error),
            fix="get the file again, or save the table as CSV",
        ) from None
    if b"\0" in head and not head.startswith(_UTF_16):
        what, fix = what_it_is(path) or (
            "zero bytes, which text has none of",
            "save the table as CSV in UTF-8",
        )
        raise not_text(f"{path} is no text", what, fix)
    return head


def not_text(problem: str, what: str, fix: str) -> DataError:
    """The error for a file that is no text, but something else."""
    expected = "a table as CSV, Parquet, or JSON with one object per line"
    return DataError(problem, expected=expected, got=what, fix=fix)
