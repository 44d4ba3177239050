# SPDX-License-Identifier: Apache-2.0
"""Reader of all tables: delimited text, Parquet and JSON. Text is parsed fast; errors name the
first malformed line."""

from __future__ import annotations

import csv
import gzip
import io
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

import numpy as np
import pandas as pd

from fedrec.errors import DataError, did_you_mean

Types: TypeAlias = Mapping[str, type | None]
Columns: TypeAlias = "Mapping[str, pd.Series]"
"""Columns of a table, `[rows]` each, by name."""
_PARQUET = (".parquet", ".pq")
_GZIP = b"\x1f\x8b"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_JSON = re.compile(r"\s*(\[\s*)?\{\s*[\"}]")
_OTHERS = {
    b"PK\x03\x04": "a spreadsheet or an archive",
    b"\xd0\xcf\x11\xe0": "a spreadsheet or an archive",
    b"ARROW1": "an Arrow (Feather) file",
    b"FEA1": "a Feather file",
    b"ORC": "an ORC file",
    b"\x89HDF": "an HDF5 file",
    b"\x80": "a pickle",
    b"SQLite format 3": "an SQLite database",
    b"BZh": "packed by bzip2",
    b"\xfd7zXZ": "packed by xz",
    b"\x28\xb5\x2f\xfd": "packed by zstd",
}
"""First bytes of other files, and their kinds."""
_DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)
"""Errors while a damaged file is unpacked."""
_SHOWN = 200
_OTHER_NAMES = {
    "first line": "; if the first line of a CSV file is a row, set dataset.header = false",
    "positions": "; the first line is a row, so name columns by position (--user 1 --item 2), or if"
    " it has names, set dataset.header = true (--header)",
}
_HEAD = 4096
_FIRST_ROWS = 50
_FIRST_OBJECTS = 1000  # read to determine the columns of JSON


@dataclass(frozen=True)
class TableLayout:
    """Columns to read from a table, and its format if it is text.

    Attributes:
        columns: name -> type: a NumPy integer or float type of all values; `str`; or None: numbers
            if all values are numbers, else text.
        settings: name -> the setting that names a column, for errors.
        separator: between two values; `"::"` is allowed. In a user's own table a space is any
            number of spaces.
        names: where the names of the columns come from: the first line; `columns`, which are all of
            them, in order; or their positions, "1", "2" and so on.
        gaps: whether values may be missing, and in double quotes, as in a user's own table.
        encoding: of the whole file; None: UTF-8 or UTF-16, by its first bytes.
    """

    columns: Types
    settings: Mapping[str, str] = field(default_factory=dict)
    separator: str = "\t"
    names: Literal["first line", "columns", "positions"] = "columns"
    gaps: bool = False
    encoding: str | None = "utf-8-sig"


@dataclass(frozen=True)
class OwnLayout(TableLayout):
    """Layout of a user's own table: CSV whose values may be quoted or missing, in UTF-8 or UTF-16,
    optionally gzipped, with empty lines, titles and comments above."""

    separator: str = ","
    names: Literal["first line", "columns", "positions"] = "first line"
    gaps: bool = True
    encoding: str | None = None


@dataclass(frozen=True)
class _TableStart:
    """Format and columns of a table, by its schema or its first rows.

    Attributes:
        kind: format of the file.
        names: names of all columns.
        nested: types of the columns with lists, structs or maps, by name.
        above: number of rows above a table of text.
    """

    kind: Literal["parquet", "json", "text"]
    names: list[str]
    nested: Mapping[str, str] = field(default_factory=dict)
    above: int = 0


def format_of(path: Path, maybe_json: bool = True) -> Literal["parquet", "json", "text"]:
    """Format of a table, by the ending or the content of its file; a user's own may be JSON.

    Raises:
        DataError: the file is missing, or has another format.
    """
    if not path.is_file():
        other = "a pipe or a device, which can be read once only" if path.exists() else "nothing"
        raise DataError(
            f"table {path} not found",
            expected="a CSV, Parquet or JSON file",
            got="a folder" if path.is_dir() else other,
            fix="give the path of the file itself",
        )
    with path.open("rb") as file:
        if path.suffix.lower() in _PARQUET or file.read(4) == b"PAR1":
            return "parquet"
    text = _head(path).decode(_encoding(path), "ignore") if maybe_json else ""
    return "json" if _JSON.match(text) else "text"


def table_start(path: Path, layout: TableLayout) -> _TableStart:
    """Columns of a table, by its schema or its first rows.

    Raises:
        DataError: the file is missing, empty or not readable, or pyarrow is needed and missing.
    """
    kind = format_of(path, layout.gaps)
    if kind == "parquet":
        with _parquet(path) as file:
            types = [(column.name, column.type) for column in file.schema_arrow]
        nested = {name: str(of_values) for name, of_values in types if of_values.num_fields}
        return _TableStart(kind, [name for name, _ in types], nested)
    if kind == "json":
        frame = _read_json(path, _FIRST_OBJECTS)
        nested = [name for name in frame if {list, dict} & {*frame[name].map(type)}]
        return _TableStart(kind, list(frame), dict.fromkeys(nested, "lists or objects"))
    if layout.names == "columns":
        return _TableStart(kind, list(layout.columns))
    above, rows = first_rows(path, layout)
    names = next(iter(rows), [])
    if not names:
        raise DataError(f"{path} is empty", fix="give a table with a line of column names and rows")
    if layout.names == "positions":
        names = [str(number) for number in range(1, len(names) + 1)]
    return _TableStart(kind, names, above=above)


def first_rows(path: Path, layout: TableLayout) -> tuple[int, list[list[str]]]:
    """Number of rows above a table of text, and the first rows of the table, `[rows][values]`,
    with its names.

    Rows above a user's own table are empty lines, titles (one value, unlike the table), the line
    `sep=;` of Excel, and comments (`#`) with another number of values.

    Raises:
        DataError: the file is not readable.
    """
    try:
        rows = list(islice(_rows(path, layout), _FIRST_ROWS if layout.gaps else 1))
    except (csv.Error, UnicodeDecodeError, *_DAMAGED) as error:
        raise _unreadable(path, error) from None
    if not layout.gaps:
        return 0, rows
    first = [(above, row) for above, row in enumerate(rows) if row]
    widths = Counter(len(row) for _, row in first)
    usual = max(widths, key=lambda width: (widths[width], width), default=0)
    for index, (above, row) in enumerate(first):
        comment = row[0].startswith("#") and len(row) != usual > 1
        if sum(value.strip() != "" for value in row) >= min(usual, 2) and not comment:
            return above, [row for _, row in first[index:]]
    return 0, []


def read_table(path: Path, layout: TableLayout, rows: int | None = None) -> Columns:
    """Read the columns of a layout, and no others from a Parquet file; text is of type object.

    Args:
        path: a file of Parquet, of delimited text, or of JSON objects in a user's own table.
        layout: the columns, and the format of text.
        rows: number of first rows to read; None: all.

    Raises:
        DataError: the file is missing, a column is missing, duplicate or has nested values, a line
            has too few or too many values or one of another type, a table with gaps has no rows,
            or pyarrow is missing.
    """
    start = table_start(path, layout)
    _check_columns(str(path), layout, start.names)
    for name in start.nested.keys() & layout.columns.keys():
        raise DataError(
            f"{path}, column {name!r} contains lists, structs or maps",
            expected="one value per row, such as a number or a text",
            got=start.nested[name],
            fix="write one row per value, or use another column",
        )
    if start.kind == "parquet":
        frame = _read_parquet(path, list(layout.columns), rows)
    elif start.kind == "json":
        frame = _read_json(path, rows)
    else:
        frame = _read_text(path, layout, start, rows)
    return columns_of(str(path), frame, layout)


def columns_of(table: str, frame: pd.DataFrame | Columns, layout: TableLayout) -> Columns:
    """Select the columns of a layout from a table in memory.

    Raises:
        DataError: a column is missing or duplicate, or a table with gaps has no rows.
    """
    _check_columns(table, layout, list(frame))
    columns = {name: pd.Series(frame[name]) for name in layout.columns}
    if layout.gaps and not all(map(len, columns.values())):
        raise DataError(f"{table} has no rows", fix="give a table with at least one row")
    return columns


def _check_columns(table: str, layout: TableLayout, present: Sequence[str]) -> None:
    """Check that a table has each column of a layout once.

    Raises:
        DataError: a column is missing or duplicate.
    """
    for column in layout.columns:
        if column not in present:
            setting = layout.settings.get(column)
            raise DataError(
                f"{table} has no column {column!r}",
                expected=f"a column {column!r}" + (f" ({setting})" if setting else ""),
                got="columns " + ", ".join(repr(name) for name in present),
                fix=did_you_mean(column, present)
                + (_OTHER_NAMES.get(layout.names, "") if layout.gaps else ""),
            )
        if present.count(column) > 1:
            raise DataError(f"{table}: duplicate column {column!r}", fix="rename one of them")


def _read_parquet(path: Path, columns: Sequence[str], rows: int | None) -> pd.DataFrame:
    """Read columns with one value per row. Bytes are read as UTF-8, invalid ones as `\\x80`."""
    with _parquet(path) as file:
        if rows is not None and file.metadata.num_rows > rows:
            table = next(file.iter_batches(batch_size=rows, columns=columns))
        else:
            table = file.read(columns=columns)
        # the metadata of pandas does not affect the values, and may be damaged
        frame = table.to_pandas(ignore_metadata=True)
    for name in frame.columns:
        if pd.api.types.infer_dtype(frame[name], skipna=True) == "bytes":
            frame[name] = frame[name].str.decode("utf-8", errors="backslashreplace")
    return frame


@contextmanager
def _parquet(path: Path):
    """Open a Parquet file; errors while it is read name the file."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"{path.name} is a Parquet file, and reading Parquet needs pyarrow",
            fix="pip install 'fedrec[parquet]', or save the table as CSV",
        ) from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, OSError, ValueError, RecursionError) as error:
        fix = "write or copy the file again, or save the table as CSV"
        raise _no_table(path, "an undamaged Parquet file", error, fix) from None


def _read_json(path: Path, rows: int | None) -> pd.DataFrame:
    """Read objects as rows, one per line or all in a list, without converting texts."""
    try:
        with _open_text(path, None) as file:
            lines = file.read(1_000).lstrip().startswith("{")
            file.seek(0)
            return pd.read_json(
                file,
                orient="records",
                lines=lines,
                nrows=rows if lines else None,
                dtype=False,  # pyright: ignore[reportArgumentType]
                precise_float=True,
            )
    except (ValueError, OverflowError, *_DAMAGED) as error:
        expected = "JSON with one object per line, or a list of objects"
        fix = "write one object per row, or save the table as CSV"
        raise _no_table(path, expected, error, fix) from None


def _read_text(
    path: Path, layout: TableLayout, start: _TableStart, rows: int | None
) -> pd.DataFrame:
    names = start.names
    kinds: dict = {n: object if kind is str else kind for n, kind in layout.columns.items() if kind}
    # The parser rejects duplicate names; these columns are not read.
    unique = [
        f"{name} ({index})" if names.count(name) > 1 else name for index, name in enumerate(names)
    ]
    try:
        with warnings.catch_warnings(), _open_text(path, layout.encoding) as file:
            # a first line with too many values only causes a warning
            warnings.simplefilter("error", pd.errors.ParserWarning)
            # The fast parser supports separators of one character only.
            single = len(layout.separator) == 1
            text = file if single else io.StringIO(file.read().replace(layout.separator, "\t"))
            return pd.read_csv(
                text,
                **_dialect(layout, spaces=r"\s+"),
                skiprows=start.above,
                header=0 if layout.names == "first line" else None,
                names=unique,
                # lines with too many values are accepted if columns are selected
                usecols=list(layout.columns) if {*names} != {*layout.columns} else None,  # pyright: ignore[reportArgumentType]
                dtype=kinds,
                keep_default_na=False,
                na_values=[""] if layout.gaps else None,
                na_filter=layout.gaps,
                index_col=False,
                low_memory=False,
                nrows=rows,
            )
    except (UnicodeDecodeError, *_DAMAGED) as error:
        raise _unreadable(path, error) from None
    except (ValueError, OverflowError, pd.errors.ParserWarning) as error:
        raise _first_fault(path, layout, start, error) from None


def _dialect(layout: TableLayout, spaces: str = " ") -> dict[str, Any]:
    """How parsers divide a line; `spaces` is their separator for any number of spaces."""
    separator = "\t" if len(layout.separator) > 1 else layout.separator
    return {
        "delimiter": spaces if layout.gaps and separator == " " else separator,
        "quoting": csv.QUOTE_MINIMAL if layout.gaps else csv.QUOTE_NONE,
        "skipinitialspace": layout.gaps,
    }


def _rows(path: Path, layout: TableLayout, errors: str = "strict") -> Iterator[list[str]]:
    dialect = _dialect(layout)
    spaces = layout.gaps and layout.separator == " "
    with _open_text(path, layout.encoding, errors) as file:
        yield from csv.reader(
            (
                line.strip() if spaces else line.replace(layout.separator, dialect["delimiter"])
                for line in file
            ),
            **dialect,
        )


def _first_fault(
    path: Path, layout: TableLayout, start: _TableStart, error: Exception
) -> DataError:
    """Find the first malformed line, slowly, as the fast parser does not report it."""
    above = start.above + (layout.names == "first line")
    with suppress(csv.Error):  # a value of more than 128 KiB, as after an open quote
        for number, row in enumerate(_rows(path, layout, "replace"), start=1):
            expected = _fault(row, layout, start.names) if row and number > above else ""
            if expected:
                return malformed_line(path, number, layout.separator.join(row), expected)
    return _unreadable(path, error)


def _fault(row: list[str], layout: TableLayout, names: list[str]) -> str:
    """Describe the expected format of a malformed row; empty if the row is correct."""
    if len(row) > len(names) or (len(row) < len(names) and not layout.gaps):
        return f"{len(names)} values: {', '.join(names)}"
    for name, text in zip(names, row, strict=False):
        kind = layout.columns.get(name) or str
        try:
            fits = kind is str or np.isfinite(kind(text))
        except (ValueError, OverflowError):
            fits = False
        if not fits:
            whole = np.issubdtype(kind, np.integer)
            return f"{'a whole number' if whole else 'a number'} as {name!r}"
    return ""


def malformed_line(path: Path, number: int, line: str, expected: str) -> DataError:
    """Create the error for a malformed line."""
    return DataError(
        f"{path}, line {number:,}: not in the expected format",
        expected=expected,
        got=repr(line[:_SHOWN]),
        fix="get the file again, or fix this line",
    )


def _no_table(path: Path, expected: str, error: Exception, fix: str) -> DataError:
    got = str(error).removeprefix("Error tokenizing data. C error: ").strip()
    return DataError(f"{path} cannot be read as a table", expected=expected, got=got, fix=fix)


def _unreadable(path: Path, error: Exception) -> DataError:
    """Create the error for a file that is not text, or cannot be split into lines."""
    if isinstance(error, UnicodeDecodeError):
        iconv = "save it as UTF-8: iconv -f LATIN1 -t UTF-8 FILE > NEW-FILE"
        return _not_text(f"{path} is not text in UTF-8 or UTF-16", path, str(error), iconv)
    fix = "check the separator and the quotes, or get the file again"
    return _no_table(path, "one value per column and line", error, fix)


def _not_text(problem: str, path: Path, otherwise: str, fix: str) -> DataError:
    """Create the error for a file that is not text: its kind, or `otherwise` and `fix` if the kind
    is unknown."""
    start = _first_bytes(path)
    kind = next((kind for first, kind in _OTHERS.items() if start.startswith(first)), None)
    if start[257:262] == b"ustar":
        kind = "an archive"
    return DataError(
        problem,
        expected="a table as CSV, Parquet, or JSON with one object per line",
        got=kind or otherwise,
        fix="export the table as CSV or Parquet, or unpack the file" if kind else fix,
    )


# Text files, gzipped or not, in UTF-8 or UTF-16.


def _open_text(path: Path, encoding: str | None, errors: str = "strict") -> IO[str]:
    """Open a text file, unpacked, without converting line ends."""
    encoding = encoding or _encoding(path)
    return _opener(path)(path, "rt", encoding=encoding, errors=errors, newline="")


def _opener(path: Path):
    with path.open("rb") as file:
        return gzip.open if file.read(len(_GZIP)) == _GZIP else open


def _encoding(path: Path) -> str:
    """Detect the encoding of a user's own table: `utf-16` by the first bytes, else `utf-8-sig`."""
    return "utf-16" if _head(path).startswith(_UTF_16) else "utf-8-sig"


def _first_bytes(path: Path) -> bytes:
    with _opener(path)(path, "rb") as file:
        return file.read(_HEAD)


def _head(path: Path) -> bytes:
    """Read the first bytes of a text file, unpacked.

    Raises:
        DataError: the file is not text.
    """
    try:
        head = _first_bytes(path)
    except _DAMAGED as error:
        fix = "get the file again, or save the table as CSV"
        raise _no_table(path, "an undamaged gzip file", error, fix) from None
    if b"\0" in head and not head.startswith(_UTF_16):
        zeros = "zero bytes, which text does not contain"
        raise _not_text(f"{path} is not text", path, zeros, "save the table as CSV in UTF-8")
    return head
