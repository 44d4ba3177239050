# SPDX-License-Identifier: Apache-2.0
"""Columns of a user's own table: the formats of ids, numbers and times, and dense indices of
names."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd

from fedrec.data.interactions import FeatureTable, Interactions
from fedrec.errors import DataError

_DOTTED = re.compile(r"^\s*(\d{1,2})\.(\d{1,2})\.(\d{4})(?=$|[ T])")  # day, month, year
_UNITS = (10**9, 10**6, 10**3)  # nanoseconds of a second, a millisecond and a microsecond
_LARGEST_SECOND = 9 * 10**9  # as nanoseconds it fits into 63 bits
_TIME = "a number or a date, such as 2022-05-26 or 26.05.2022 (others with a time format)"


def typed(column: pd.Series) -> pd.Series:
    """Convert a column of texts to numbers if all of them are numbers."""
    if pd.api.types.is_numeric_dtype(column) or pd.api.types.is_datetime64_any_dtype(column):
        return column
    numbers = pd.Series(pd.to_numeric(column, errors="coerce"), name=column.name)
    return numbers if bool((numbers.notna() | column.isna()).all()) else column


def ids_of(column: pd.Series, path: Path) -> np.ndarray:
    """Ids of users or items, one per row: `int64 [rows]` when all are plain whole numbers, else
    text.

    Raises:
        DataError: an id is missing.
    """
    numbers = isinstance(column.dtype, np.dtype) and column.dtype.kind in "iu"
    if numbers and len(column) and column.min() >= 0 and int(column.max()) < 10**18:
        return column.to_numpy().astype(np.int64, copy=False)
    codes, names = pd.factorize(column)
    _require_all(column, codes >= 0, path, "an id")
    texts = np.array([str(name) for name in names], dtype=object)
    whole = all(name.isdecimal() and len(name) < 19 and str(int(name)) == name for name in texts)
    return (texts.astype(np.int64) if whole else texts)[codes]


def numbers_of(column: pd.Series, path: Path, fix: str = "") -> np.ndarray:
    """Numbers that are finite in 32 bits, `float64 [rows]`, one per row.

    Raises:
        DataError: a value is missing or not a finite number; `fix` is what else to do about it.
    """
    numbers = pd.Series(pd.to_numeric(column, errors="coerce"))
    values = numbers.to_numpy(dtype=np.float64, na_value=np.nan)
    with np.errstate(over="ignore"):
        finite = np.isfinite(values.astype(np.float32))
    _require_all(column, finite, path, "a finite number with a decimal point in each row", fix)
    return values


def times_of(column: pd.Series, path: Path, form: str | None = None) -> np.ndarray:
    """Times, `int64 [rows]`, one per row, in nanoseconds since 1970. Numbers are seconds,
    milliseconds, microseconds or nanoseconds, by the size of the largest. A date is in ISO format
    (2022-05-26) or dotted with the day first (26.05.2022), each with or without a time of day; or
    of the given form, such as `"%d/%m/%Y %H:%M"`. Dates before 1685 or after 2255, which databases
    write for "never", become these limits.

    A column must not contain both: among dates, "1005" might be a year or a number of seconds.

    Raises:
        DataError: a value is missing, is neither a number nor a date, exceeds 64 bits, or numbers
            and dates are mixed.
    """
    if form is not None:
        dates = dates_of(column, form)
        _require_all(column, np.asarray(dates.notna()), path, f"a date in the format {form!r}")
        return _nanoseconds(dates)
    if pd.api.types.is_bool_dtype(column):
        column = column.astype(str)
    numeric = np.zeros(len(column), dtype=bool)
    if not pd.api.types.is_datetime64_any_dtype(column):
        numbers = pd.Series(pd.to_numeric(column, errors="coerce"), name=column.name)
        numeric = np.asarray(numbers.notna())
        if pd.api.types.is_numeric_dtype(column) or (len(numeric) and numeric.all()):
            return _numeric_times(numbers, path)
    dates = dates_of(column)
    _require_all(column, numeric | np.asarray(dates.notna()), path, _TIME)
    _require_all(column, ~numeric, path, "a date, as other rows have dates")
    return _nanoseconds(dates)


def dates_of(column: pd.Series, form: str | None = None) -> pd.Series:
    """Dates in UTC, as accepted by `times_of`; NaT where a value is not a date."""
    if form is not None:
        texts = column.astype(str)
        return pd.Series(pd.to_datetime(texts, utc=True, errors="coerce", format=form))
    if pd.api.types.is_datetime64_any_dtype(column):
        return pd.Series(pd.to_datetime(column, utc=True, errors="coerce"))
    texts = column.astype(str)
    dotted = texts.str.match(_DOTTED)
    if dotted.any():
        column = column.where(~dotted, texts.str.replace(_DOTTED, _day_last, regex=True))
    return pd.Series(pd.to_datetime(column, utc=True, errors="coerce", format="ISO8601"))


def _nanoseconds(dates: pd.Series) -> np.ndarray:
    times = np.asarray(dates.dt.tz_localize(None))
    limits = np.array([-_LARGEST_SECOND, _LARGEST_SECOND], dtype="datetime64[s]")
    return times.clip(*limits).astype("datetime64[ns]").astype(np.int64)


def _day_last(date: re.Match[str]) -> str:
    day, month, year = date.groups()
    return f"{year}-{int(month):02d}-{int(day):02d}"


def _numeric_times(column: pd.Series, path: Path) -> np.ndarray:
    """Numeric times in nanoseconds since 1970; integers bypass float64 (53 bits)."""
    values = np.asarray(column, dtype=np.float64)
    whole = pd.api.types.is_integer_dtype(column)
    fits = np.isfinite(values) & (whole | (np.abs(values) < 2.0**63))
    if whole:
        fits &= np.asarray((column <= np.iinfo(np.int64).max).fillna(False), dtype=bool)
    _require_all(column, fits, path, "a time of at most 63 bits")
    numbers = np.asarray(column if whole else np.floor(values), dtype=np.int64)
    largest = float(np.abs(values).max(initial=0))
    unit = next((unit for unit in _UNITS if largest * unit <= _LARGEST_SECOND * 10**9), 1)
    times = numbers * unit
    return times if whole else times + np.rint((values - numbers) * unit).astype(np.int64)


def _require_all(
    column: pd.Series, good: np.ndarray, path: Path, expected: str, fix: str = ""
) -> None:
    if good.all():
        return
    row = int((~good).argmax())
    value = column.iloc[row]
    raise DataError(
        f"{path}, row {row + 1:,} (line {row + 2:,} of a CSV file with one line of names): wrong"
        f" value in column {column.name!r}, as in {int((~good).sum()):,} of {len(good):,} rows",
        expected=expected,
        got="nothing" if pd.isna(value) else repr(getattr(value, "item", lambda: value)()),
        fix="correct or remove these rows" + fix,
    )


def index_rows(
    name: str,
    *,
    users: np.ndarray | pd.Series,
    items: np.ndarray | pd.Series,
    ratings: np.ndarray | pd.Series | None = None,
    times: np.ndarray | pd.Series | None = None,
) -> Interactions:
    """Create interactions without features from columns `[rows]` with the source's ids; users and
    items are those that occur, ascending.

    Raises:
        DataError: see `Interactions`.
    """
    (user_index, user_ids), (item_index, item_ids) = (
        pd.factorize(np.asarray(ids), sort=True) for ids in (users, items)
    )
    return Interactions(
        name=name,
        users=user_index,
        items=item_index,
        user_ids=_whole(np.asarray(user_ids)),
        item_ids=_whole(np.asarray(item_ids)),
        user_features=FeatureTable(len(user_ids)),
        item_features=FeatureTable(len(item_ids)),
        ratings=None if ratings is None else np.asarray(ratings),
        times=None if times is None else np.asarray(times),
    )


def _whole(ids: np.ndarray) -> np.ndarray:
    """Ids in 64 bits if they are integers."""
    return ids.astype(np.int64) if np.issubdtype(ids.dtype, np.integer) else ids
