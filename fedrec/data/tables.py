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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Literal, TypeAlias

import numpy as np
import pandas as pd

from fedrec.errors import DataError, did_you_mean

Types: TypeAlias = Mapping[str, type | None]
Columns: TypeAlias = "Mapping[str, pd.Series]"
"""Columns of a table, `[rows]` each, by name."""
_PARQUET = (".parquet", ".pq")
_SHOWN = 200
_NO_NAMES = "; if the first line of a CSV file is a row, set dataset.header = false"
_FIRST_OBJECTS = 1000  # read to determine the columns of JSON


@dataclass(frozen=True)
class TableLayout:
    """Columns to read from a table, and its format if it is text.

    Attributes:
        columns: name -> type: a NumPy integer or float type of all values; `str`; or None: numbers
            if all values are numbers, else text.
        optional: likewise, columns that may be missing.
        settings: name -> the setting that names a column, for errors.
        separator: between two values; `"::"` is allowed. In a user's own table a space is any
            number of spaces.
        names: where the names of the columns come from: the first line; `columns`, which are all of
            them, in order; or their positions, "1", "2" and so on.
        quoted: whether values may be in double quotes.
        gaps: whether values may be missing.
        encoding: of the whole file.
    """

    columns: Types
    optional: Types = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    separator: str = "\t"
    names: Literal["first line", "columns", "positions"] = "columns"
    quoted: bool = False
    gaps: bool = False
    encoding: str = "utf-8-sig"

    @classmethod
    def own(
        cls,
        columns: Types,
        optional: Types | None = None,
        settings: Mapping[str, str] | None = None,
        *,
        separator: str = ",",
        header: bool = True,
    ) -> TableLayout:
        """Create the layout of a user's own table: CSV whose values may be quoted or missing, in
        UTF-8 or UTF-16, optionally gzipped, with empty lines, titles and comments above."""
        names = "first line" if header else "positions"
        return cls(
            columns, optional or {}, settings or {}, separator, names, quoted=True, gaps=True
        )


def column_names(path: Path, layout: TableLayout) -> list[str]:
    """Names of all columns of a table.

    Raises:
        DataError: the file is missing, empty or not readable, or pyarrow is needed and missing.
    """
    _check_readable(path)
    if is_parquet(path):
        return [name for name, _ in parquet_columns(path)]
    if layout.names == "columns":
        return list(layout.columns)
    if layout.gaps and is_json(path):
        return list(_read_json(path, _FIRST_OBJECTS))
    names = next(iter(table_start(path, layout)[1]), [])
    if not names:
        raise DataError(f"{path} is empty", fix="give a table with a line of column names and rows")
    return names if layout.names == "first line" else [str(n + 1) for n in range(len(names))]


def is_parquet(path: Path) -> bool:
    """True if a file is Parquet, by its ending or its content."""
    if path.suffix.lower() in _PARQUET or not path.is_file():
        return path.suffix.lower() in _PARQUET
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def is_text(path: Path) -> bool:
    """True if a user's own table is delimited text, neither Parquet nor JSON.

    Raises:
        DataError: the file is missing, or has another format.
    """
    _check_readable(path)
    return not (is_parquet(path) or is_json(path))


def nested_columns(path: Path) -> list[str]:
    """Names of the columns with lists, structs or maps in a user's own table.

    Raises:
        DataError: the file is damaged, or pyarrow is missing.
    """
    if is_parquet(path):
        return [name for name, nested in parquet_columns(path) if nested]
    if is_text(path):
        return []
    frame = _read_json(path, _FIRST_OBJECTS)
    return [n for n in frame if any(isinstance(value, (list, dict)) for value in frame[n])]


def table_start(path: Path, layout: TableLayout) -> tuple[int, list[list[str]]]:
    """Find the number of rows above a user's own table (0 unless it is a text file), and the first
    rows of the table, `[rows][values]`.

    Raises:
        DataError: the file is not readable.
    """
    try:
        if layout.gaps:
            return first_rows(_rows(path, layout))
        return 0, list(islice(_rows(path, layout), 1))
    except (csv.Error, UnicodeDecodeError, *DAMAGED) as error:
        raise _unreadable(path, error) from None


def parquet_columns(path: Path) -> list[tuple[str, str]]:
    """Name of each column, and its type if it contains lists, structs or maps, otherwise an empty
    text.

    Raises:
        DataError: the file is damaged, or pyarrow is missing.
    """
    with _parquet(path) as file:
        schema = file.schema_arrow
        return [(field.name, str(field.type) if field.type.num_fields else "") for field in schema]


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
    names = column_names(path, layout)
    wanted = _wanted(str(path), layout, names)
    if is_parquet(path):
        frame = _read_parquet(path, list(wanted), rows)
    elif layout.gaps and is_json(path):
        frame = _read_json(path, rows)
    else:
        frame = _read_text(path, layout, names, wanted, rows)
    return columns_of(str(path), frame, layout)


def columns_of(table: str, frame: pd.DataFrame | Columns, layout: TableLayout) -> Columns:
    """Select the columns of a layout from a table in memory.

    Raises:
        DataError: a column is missing or duplicate, or a table with gaps has no rows.
    """
    columns = {name: pd.Series(frame[name]) for name in _wanted(table, layout, list(frame))}
    if layout.gaps and not all(map(len, columns.values())):
        raise DataError(f"{table} has no rows", fix="give a table with at least one row")
    return columns


def _wanted(table: str, layout: TableLayout, present: Sequence[str]) -> dict[str, type | None]:
    """Select the columns of a layout that a table has, with their types.

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
                + (_NO_NAMES if layout.gaps and layout.names == "first line" else ""),
            )
    optional = {name: kind for name, kind in layout.optional.items() if name in present}
    for column in (wanted := {**layout.columns, **optional}):
        if present.count(column) > 1:
            raise DataError(f"{table}: duplicate column {column!r}", fix="rename one of them")
    return wanted


def _read_parquet(path: Path, columns: Sequence[str], rows: int | None) -> pd.DataFrame:
    """Read columns with one value per row. Bytes are read as UTF-8 text, invalid ones as `\\x80`.

    Raises:
        DataError: a column has nested values, the file is damaged, or pyarrow is missing.
    """
    for name, nested in parquet_columns(path):
        if nested and name in columns:
            raise DataError(
                f"{path}, column {name!r} contains lists, structs or maps",
                expected="one value per row, such as a number or a text",
                got=nested,
                fix="write one row per value, or use another column",
            )
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
    """Read objects as rows, one per line or all in a list, without converting texts.

    Raises:
        DataError: the file is damaged, or has another format.
    """
    try:
        with open_text(path, encoding_of(path)) as file:
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
    except (ValueError, OverflowError, *DAMAGED) as error:
        expected = "JSON with one object per line, or a list of objects"
        fix = "write one object per row, or save the table as CSV"
        raise _no_table(path, expected, error, fix) from None


def _read_text(
    path: Path, layout: TableLayout, names: list[str], wanted: Types, rows: int | None
) -> pd.DataFrame:
    kinds: dict = {
        name: object if kind is str else kind for name, kind in wanted.items() if kind is not None
    }
    # The parser rejects duplicate names; these columns are not read.
    unique = [
        f"{name} ({index})" if names.count(name) > 1 else name for index, name in enumerate(names)
    ]
    above = table_start(path, layout)[0] if layout.gaps else 0
    # The parser accepts lines with too many values if columns are selected, so select them only to
    # save memory.
    some = list(wanted) if set(names) != set(wanted) else None
    try:
        with warnings.catch_warnings(), open_text(path, _encoding(path, layout)) as file:
            # a first line with too many values only causes a warning
            warnings.simplefilter("error", pd.errors.ParserWarning)
            # The fast parser supports separators of one character only.
            single = len(layout.separator) == 1
            text = file if single else io.StringIO(file.read().replace(layout.separator, "\t"))
            return pd.read_csv(
                text,
                sep=r"\s+" if layout.gaps and layout.separator == " " else _single(layout),
                skipinitialspace=layout.gaps,
                skiprows=above,
                header=0 if layout.names == "first line" else None,
                names=unique,
                usecols=some,  # pyright: ignore[reportArgumentType]
                dtype=kinds,
                keep_default_na=False,
                na_values=[""] if layout.gaps else None,
                na_filter=layout.gaps,
                index_col=False,
                low_memory=False,
                quoting=_quoting(layout),
                nrows=rows,
            )
    except (UnicodeDecodeError, *DAMAGED) as error:
        raise _unreadable(path, error) from None
    except (ValueError, OverflowError, pd.errors.ParserWarning) as error:
        raise _first_fault(path, layout, names, error) from None


def _check_readable(path: Path) -> None:
    if not path.is_file():
        other = "a pipe or a device, which can be read once only" if path.exists() else "nothing"
        raise DataError(
            f"table {path} not found",
            expected="a CSV, Parquet or JSON file",
            got="a folder" if path.is_dir() else other,
            fix="give the path of the file itself",
        )


def _single(layout: TableLayout) -> str:
    return "\t" if len(layout.separator) > 1 else layout.separator


def _quoting(layout: TableLayout) -> Literal[0, 3]:
    return csv.QUOTE_MINIMAL if layout.quoted else csv.QUOTE_NONE


def _encoding(path: Path, layout: TableLayout) -> str:
    return encoding_of(path) if layout.gaps else layout.encoding


def _rows(path: Path, layout: TableLayout, errors: str = "strict") -> Iterator[list[str]]:
    with open_text(path, _encoding(path, layout), errors) as file:
        lines = (line.replace(layout.separator, _single(layout)) for line in file)
        if layout.gaps and layout.separator == " ":
            lines = (line.strip() for line in file)
        yield from csv.reader(
            lines,
            delimiter=_single(layout),
            quoting=_quoting(layout),
            skipinitialspace=layout.gaps,
        )


def _first_fault(path: Path, layout: TableLayout, names: list[str], error: Exception) -> DataError:
    """Find the first malformed line, slowly, as the fast parser does not report it."""
    above = table_start(path, layout)[0] + (layout.names == "first line")
    with suppress(csv.Error):  # a value of more than 128 KiB, as after an open quote
        for number, row in enumerate(_rows(path, layout, "replace"), start=1):
            expected = _fault(row, layout, names) if row and number > above else ""
            if expected:
                line = layout.separator.join(row)[:_SHOWN]
                return malformed_line(path, number, line, expected)
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


def _unreadable(path: Path, error: Exception) -> DataError:
    """Create the error for a file that is not text, or cannot be split into lines."""
    if isinstance(error, UnicodeDecodeError):
        iconv = "save it as UTF-8: iconv -f LATIN1 -t UTF-8 FILE > NEW-FILE"
        return _not_text(f"{path} is not text in UTF-8 or UTF-16", path, str(error), iconv)
    fix = "check the separator and the quotes, or get the file again"
    return _no_table(path, "one value per column and line", error, fix)


def _no_table(path: Path, expected: str, error: Exception, fix: str) -> DataError:
    got = str(error).removeprefix("Error tokenizing data. C error: ").strip()
    return DataError(f"{path} cannot be read as a table", expected=expected, got=got, fix=fix)


def malformed_line(path: Path, number: int, line: str, expected: str) -> DataError:
    """Create the error for a malformed line."""
    return DataError(
        f"{path}, line {number:,}: not in the expected format",
        expected=expected,
        got=repr(line),
        fix="get the file again, or fix this line",
    )


# Text files: gzipped or not, in UTF-8 or UTF-16, with lines above the column names; and recognition
# of other kinds of files for errors.

DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)
"""Errors while a damaged file is unpacked."""
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
_EXPORT = "export the table as CSV or Parquet, or unpack the file"
_HEAD = 4096
_FIRST_ROWS = 50


def _is_packed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_GZIP)) == _GZIP


def encoding_of(path: Path) -> str:
    """Detect the encoding: `utf-16` by the first bytes, else `utf-8-sig`.

    Raises:
        DataError: the file is not text.
    """
    return "utf-16" if _head(path).startswith(_UTF_16) else "utf-8-sig"


def is_json(path: Path) -> bool:
    """True if a file has JSON objects, one per line or in a list.

    Raises:
        DataError: the file is not text.
    """
    return bool(_JSON.match(_head(path).decode(encoding_of(path), "ignore")))


@contextmanager
def open_text(path: Path, encoding: str, errors: str = "strict") -> Iterator[IO[str]]:
    """Open a text file, unpacked, without converting line ends."""
    opened = gzip.open if _is_packed(path) else open
    with opened(path, "rt", encoding=encoding, errors=errors, newline="") as file:
        yield file


def first_rows(rows: Iterable[list[str]]) -> tuple[int, list[list[str]]]:
    """Find the number of rows above a table, and its first rows, `[rows][values]`.

    Rows above are empty lines, titles (one value, unlike the table), the line `sep=;` of Excel, and
    comments (`#`) with another number of values.
    """
    first = [(above, row) for above, row in enumerate(islice(rows, _FIRST_ROWS)) if row]
    widths = Counter(len(row) for _, row in first)
    usual = max(widths, key=lambda width: (widths[width], width), default=0)
    for index, (above, row) in enumerate(first):
        comment = row[0].startswith("#") and len(row) != usual > 1
        if sum(value.strip() != "" for value in row) >= min(usual, 2) and not comment:
            return above, [row for _, row in first[index:]]
    return 0, []


def _first_bytes(path: Path) -> bytes:
    with gzip.open(path, "rb") if _is_packed(path) else path.open("rb") as file:
        return file.read(_HEAD)


def _head(path: Path) -> bytes:
    """Read the first bytes of a text file, unpacked."""
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
        zeros = "zero bytes, which text does not contain"
        raise _not_text(f"{path} is not text", path, zeros, "save the table as CSV in UTF-8")
    return head


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
        fix=_EXPORT if kind else fix,
    )
