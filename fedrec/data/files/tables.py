# SPDX-License-Identifier: Apache-2.0
"""Columns of CSV and Parquet files, and the accepted formats of ids, numbers and times."""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fedrec.data.files.delimited import missing_column
from fedrec.data.files.parquet import PARQUET, parquet_columns, read_parquet
from fedrec.errors import DataError

_DOTTED = re.compile(r"^\s*(\d{1,2})\.(\d{1,2})\.(\d{4})(?=$|[ T])")  # day, month, year
_TIME = "a number or a date, such as 2022-05-26 or 26.05.2022"


def table_columns(path: Path, *, separator: str, header: bool = True) -> list[str]:
    """Names of the columns of a table.

    Args:
        path: a `.parquet` file, or any other for CSV.
        separator: of a CSV file.
        header: whether the first line of a CSV file has the names. Otherwise the columns are named
            by their positions: "1", "2", and so on.

    Raises:
        DataError: the file is empty or not readable, or pyarrow is needed and missing.
    """
    if path.suffix in PARQUET:
        return parquet_columns(path)
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            names = next(csv.reader(file, delimiter=separator), [])
        except (csv.Error, UnicodeDecodeError) as error:
            raise _unreadable(path, error) from None
    if not names:
        raise DataError(
            f"{path} is empty", expected="a first line with the names of the columns", got="nothing"
        )
    return names if header else [str(place) for place in range(1, len(names) + 1)]


def read_columns(
    path: Path,
    columns: Mapping[str, str],
    *,
    separator: str,
    inferred: Sequence[str] = (),
    header: bool = True,
) -> dict[str, pd.Series]:
    """The requested columns of a table; empty values are missing values.

    Args:
        path: a `.parquet` file, or any other for CSV.
        columns: name -> the setting that names it, for error messages.
        separator: of a CSV file.
        inferred: columns of a CSV file that may be numbers; the others are text, so that "007" is
            not 7.
        header: whether the first line of a CSV file has the names (`table_columns`).

    Raises:
        DataError: a column is missing, given twice or has nested values, the file has no rows or is
            malformed, or pyarrow is missing.
    """
    present = table_columns(path, separator=separator, header=header)
    for column, setting in columns.items():
        if column not in present:
            raise missing_column(path, column, present, setting=setting)
        if present.count(column) > 1:
            raise DataError(
                f"{path} has two columns {column!r}",
                expected="distinct names",
                got=", ".join(present),
            )
    if path.suffix in PARQUET:
        frame = read_parquet(path, list(columns))
    else:
        text = [column for column in columns if column not in inferred]
        frame = _read_csv(
            path,
            separator,
            text,
            list(columns) if set(columns) != set(present) else None,
            None if header else present,
        )
    if frame.empty:
        raise DataError(f"{path} has no rows", expected="at least one row", got="none")
    return {column: pd.Series(frame[column]) for column in columns}


def _read_csv(
    path: Path,
    separator: str,
    text: list[str],
    some: list[str] | None,
    names: list[str] | None,
) -> pd.DataFrame:
    """Read a CSV file; `names` are the column names of a file without a header."""
    kinds: dict = dict.fromkeys(text, str)
    try:
        with warnings.catch_warnings():
            # a first line with too many values only warns
            warnings.simplefilter("error", pd.errors.ParserWarning)
            return pd.read_csv(
                path,
                sep=separator,
                header=0 if names is None else None,
                names=names,
                usecols=some,  # pyright: ignore[reportArgumentType]
                dtype=kinds,
                encoding="utf-8-sig",
                keep_default_na=False,
                na_values=[""],
                index_col=False,
                low_memory=False,
            )
    except (ValueError, pd.errors.ParserWarning) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> DataError:
    coded = isinstance(error, UnicodeDecodeError)
    return DataError(
        f"{path} cannot be read as a table",
        expected="one value per column and line",
        got=str(error).removeprefix("Error tokenizing data. C error: ").strip(),
        fix="save it as UTF-8, such as by: iconv -f LATIN1 -t UTF-8 FILE > NEW-FILE"
        if coded
        else "check the separator (dataset.separator) and the named line",
    )


def ids_of(column: pd.Series, path: Path) -> np.ndarray:
    """Ids of users or items, one per row: `int64 [rows]` when all are plain whole numbers, else
    text.

    Raises:
        DataError: an id is missing.
    """
    codes, names = pd.factorize(column)
    _require_all(column, codes >= 0, path, "an id")
    texts = np.array([str(name) for name in names], dtype=object)
    whole = all(name.isdecimal() and str(int(name)) == name and len(name) < 19 for name in texts)
    return (texts.astype(np.int64) if whole else texts)[codes]


def numbers_of(column: pd.Series, path: Path) -> np.ndarray:
    """Finite numbers, `float32 [rows]`, one per row.

    Raises:
        DataError: a value is missing or not a finite number.
    """
    numbers = pd.to_numeric(column, errors="coerce")
    with np.errstate(over="ignore"):
        values = pd.Series(numbers).to_numpy(dtype=np.float64, na_value=np.nan).astype(np.float32)
    _require_all(column, np.isfinite(values), path, "a finite number")
    return values


def times_of(column: pd.Series, path: Path) -> np.ndarray:
    """Times, `int64 [rows]`, one per row: numbers unchanged, dates as seconds since 1970. A date
    is in ISO format (2022-05-26) or dotted with the day first (26.05.2022), each with or without a
    time of day.

    A column must not contain both: among dates, "1005" might be a year or a number of seconds.

    Raises:
        DataError: a value is missing, is neither a number nor a date, is of the other kind, or
            exceeds 64 bits.
    """
    if pd.api.types.is_bool_dtype(column):
        _require_all(column, np.zeros(len(column), dtype=bool), path, _TIME)
    if pd.api.types.is_numeric_dtype(column):
        return _numeric_times(column, path)
    numeric = np.zeros(len(column), dtype=bool)
    if not pd.api.types.is_datetime64_any_dtype(column):
        numbers = pd.Series(pd.to_numeric(column, errors="coerce"), name=column.name)
        numeric = np.asarray(numbers.notna())
        if len(numeric) and numeric.all():
            return _numeric_times(numbers, path)
    dates = dates_of(column)
    _require_all(column, numeric | np.asarray(dates.notna()), path, _TIME)
    _require_all(column, ~numeric, path, "a date, as other rows have dates")
    return np.asarray(dates.dt.tz_localize(None), dtype="datetime64[s]").astype(np.int64)


def dates_of(column: pd.Series) -> pd.Series:
    """Dates in UTC, as accepted by `times_of`; missing where a value is none."""
    if pd.api.types.is_datetime64_any_dtype(column):
        return pd.Series(pd.to_datetime(column, utc=True, errors="coerce"))
    texts = column.astype(str)
    dotted = texts.str.match(_DOTTED)
    if dotted.any():
        column = column.where(~dotted, texts.str.replace(_DOTTED, _day_last, regex=True))
    return pd.Series(pd.to_datetime(column, utc=True, errors="coerce", format="ISO8601"))


def _day_last(found: re.Match[str]) -> str:
    day, month, year = found.groups()
    return f"{year}-{int(month):02d}-{int(day):02d}"


def _numeric_times(column: pd.Series, path: Path) -> np.ndarray:
    """Whole numbers do not pass through float64, which holds only 53 bits of them."""
    values = np.asarray(column, dtype=np.float64)
    whole = pd.api.types.is_integer_dtype(column)
    fits = np.isfinite(values) & (whole | (np.abs(values) < 2.0**63))
    if whole:
        fits &= np.asarray((column <= np.iinfo(np.int64).max).fillna(False), dtype=bool)
    _require_all(column, fits, path, "a time of at most 63 bits")
    return np.asarray(column if whole else values, dtype=np.int64)


def _require_all(column: pd.Series, good: np.ndarray, path: Path, expected: str) -> None:
    if good.all():
        return
    row = int((~good).argmax())
    value = column.iloc[row]
    raise DataError(
        f"{path}, row {row + 1:,} (line {row + 2:,} of a CSV file): wrong value in column"
        f" {column.name!r}",
        expected=expected,
        got="nothing" if pd.isna(value) else repr(getattr(value, "item", lambda: value)()),
        fix="correct that row, or leave it out",
    )
