# SPDX-License-Identifier: Apache-2.0
"""A user's own table with one interaction per row: CSV (any separator), Parquet or JSON objects.

Ids may be text or numbers; a column of ids that are all plain whole numbers is sorted as numbers,
any other as text. A time may be a number (of seconds, milliseconds, microseconds or nanoseconds
since 1970, or any other that orders rows) or a date (ISO, or such as 26.05.2022; in UTC where no
zone is given). Interactions have times in nanoseconds, so that fractions of seconds count."""

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pandas as pd
from pydantic import Field

from fedrec.data.interactions import (
    Feature,
    FeatureNames,
    FeatureTable,
    Interactions,
    index_rows,
    labelled,
)
from fedrec.data.reader import Reader, ReaderConfig
from fedrec.data.tables import Columns, OwnLayout, columns_of, read_table, table_start
from fedrec.errors import DataError, did_you_mean
from fedrec.runtime.ragged import distinct

# Columns: the formats of ids, numbers and times.

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


# The reader of the table.

log = logging.getLogger("fedrec.data")

ROLES = ("user", "item", "rating", "time")
OTHER = "other"
"""Category of users with an undeclared value."""


class TableConfig(ReaderConfig):
    """Settings of a table: `path` is the file."""

    user: str = "user"
    """Name of the column of user ids."""
    item: str = "item"
    """Name of the column of item ids."""
    rating: str | None = None
    """Name of the column of ratings, numbers; none when left out."""
    time: str | None = None
    """Name of the column of times, numbers or dates (2022-05-26, 26.05.2022); none when
    left out."""
    time_format: str | None = None
    """Format of the dates in the column of times, as for `strptime`, such as "%m/%d/%Y %H:%M"; not
    needed for ISO dates, dotted dates with the day first, and numbers."""
    separator: str = Field(",", pattern="^(.|::)$")
    """Separator of the values in a CSV file: a character, such as "," or "\\t", or "::"; " " is any
    number of spaces."""
    header: bool = True
    """Whether the first line of a CSV file has the names of the columns; otherwise they are named
    by their positions, "1", "2" and so on."""
    user_features: tuple[str, ...] = ()
    """Names of columns that are constant per user, or files of additional tables with the user
    column and one row per user."""
    user_categories: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Categories of users' features, by column, such as `{city = ["Bonn", "Ulm"]}`; any other
    value becomes "other". By default they are collected from the rows, which reveals that some user
    has each; private runs reject models that use such features."""
    item_features: tuple[str, ...] = ()
    """Names of columns that are constant per item, or files of additional tables with the item
    column and one row per item. As in those of users, a value may be a list (books|food, or with
    semicolons), and more than 20 different prices or other amounts are put in bands (10 to 20)."""
    item_texts: tuple[str, ...] = ()
    """Names of columns of these tables that hold a text, such as a title, instead of a category."""

    @property
    def names(self) -> Literal["first line", "positions"]:
        """Where the names of the columns come from."""
        return "first line" if self.header else "positions"

    @property
    def columns(self) -> dict[str, str]:
        """Name of the column of each role that there is."""
        return {role: name for role in ROLES if (name := getattr(self, role)) is not None}


class Table(Reader):
    """Reads the file named by `path`."""

    name = "table"
    Config: ClassVar[type[ReaderConfig]] = TableConfig
    config: TableConfig
    title = "your own CSV, Parquet or JSON file"

    def read(self) -> Interactions:
        rows = self.interactions(read_table(self._path, self._layout()))
        if repeated := repeated_rows(rows):
            log.warning("%s: %s", self._path, repeated)
        return rows

    def interactions(self, columns: Columns) -> Interactions:
        """Convert columns to interactions.

        Args:
            columns: all that the settings name; ids as text, or as numbers of a Parquet file.

        Raises:
            DataError: a column is missing, a value is missing or wrong, or a feature is not
                constant.
        """
        config = self.config
        frame = columns_of(str(self._path), columns, self._layout())
        rows = indexed(self.name, frame, config, self._path)
        of_items = (*config.item_features, *(name for name in config.item_texts if name in frame))
        users = self._features(frame, config.user, config.user_features, rows.users, rows.user_ids)
        items = self._features(frame, config.item, of_items, rows.items, rows.item_ids)
        names = [feature.name for feature in users]
        for name in config.user_categories:
            if name not in names:
                raise DataError(
                    f"categories are declared for an unknown user feature {name!r}",
                    fix=did_you_mean(name, names) + " (see dataset.user-features)",
                )
        declared = config.user_categories
        users = [f.among(declared[f.name], OTHER) if f.name in declared else f for f in users]
        texts = tuple(feature for feature in items if feature.name in config.item_texts)
        categories = tuple(feature for feature in items if feature.name not in config.item_texts)
        return replace(
            rows,
            user_features=FeatureTable(rows.num_users, tuple(users)),
            item_features=FeatureTable(rows.num_items, categories, texts),
        )

    def feature_names(self) -> FeatureNames:
        """Names of the features: configured columns, and columns of additional tables."""
        config = self.config
        return FeatureNames(config.user_features, config.item_features, config.item_texts)

    def undeclared_categories(self) -> tuple[str, ...]:
        """Names of users' features without `user-categories`."""
        columns = self._columns(self.config.user_features)
        declared = (self.config.user, *self.config.user_categories)
        return tuple(column for column in columns if column not in declared)

    def files(self) -> list[Path]:
        path = self.config.path
        extras = self._extras.values() if path is not None and path.is_file() else ()
        return [*super().files(), *extras]

    @property
    def _path(self) -> Path:
        if self.config.path is None:
            raise DataError("dataset.path is missing", fix="set dataset.path to your table")
        return self.folder()

    def _layout(self) -> OwnLayout:
        """The layout of the main table, without texts of additional ones."""
        config = self.config
        settings: dict[str, str] = {}
        for role, name in config.columns.items():
            if name in settings:
                raise DataError(
                    f"column {name!r} has two roles: {settings[name]} and dataset.{role}",
                    fix="use different columns for users, items, ratings and times",
                )
            settings[name] = f"dataset.{role}"
        elsewhere = self._columns(config.item_features)
        texts = [n for n in config.item_texts if n in config.item_features or n not in elsewhere]
        features = {
            "user-features": config.user_features,
            "item-features": config.item_features,
            "item-texts": texts,
        }
        for key, names in features.items():
            settings |= {name: f"dataset.{key}" for name in names if name not in self._extras}
        numbers = (config.rating, config.time)
        columns = {name: None if name in numbers else str for name in settings}
        return OwnLayout(columns, settings, config.separator, config.names)

    @property
    def _extras(self) -> dict[str, Path]:
        """Files of additional tables, by the names of the settings; relative paths start at the
        table's folder."""
        names = (*self.config.user_features, *self.config.item_features)
        paths = {name: self._path.parent / name for name in names}
        return {name: path for name, path in paths.items() if path.is_file()}

    def _columns(self, names: Sequence[str]) -> list[str]:
        """Names of columns, in place of a name of an additional table those of its columns."""
        layout = OwnLayout({}, separator=self.config.separator)
        extras = self._extras
        columns = (table_start(extras[n], layout).names if n in extras else [n] for n in names)
        return [column for some in columns for column in some]

    def _features(
        self, frame: Columns, key: str, names: Sequence[str], owner: np.ndarray, ids: np.ndarray
    ) -> list[Feature]:
        """Features of users or items from columns of the main table and from additional ones."""
        features: list[Feature] = []
        for name in names:
            path = self._extras.get(name)
            if path is None:
                features.append(self._feature(name, frame[name], owner, ids))
                continue
            columns = dict.fromkeys([key, *self._columns([name])], str)
            settings = {key: "the column of ids"}
            extra = read_table(path, OwnLayout(columns, settings, self.config.separator))
            index = pd.Index(ids.astype(str)).get_indexer(
                pd.Index(ids_of(extra[key], path).astype(str))
            )
            present = index >= 0
            features += [
                self._feature(name, pd.Series(labels[present]), index[present], ids)
                for name, labels in extra.items()
                if name != key
            ]
        return features

    def _feature(self, name: str, labels: pd.Series, owner: np.ndarray, ids: np.ndarray) -> Feature:
        """Convert a column to a feature; log how values are interpreted if they are not plain
        categories."""
        values = _constant(name, labels, owner, ids)
        if name in self.config.item_texts:
            return Feature.words(name, [value or "" for value in values])
        feature, taken = labelled(name, values)
        if taken:
            log.warning("feature %r is interpreted as %s", name, taken)
        return feature


def repeated_rows(rows: Interactions) -> str:
    """Describe the number of rows whose user and item are those of another row; empty if none."""
    repeated = len(rows) - len(distinct(rows.pairs))
    if not repeated:
        return ""
    return f"{repeated:,} of {len(rows):,} rows repeat the user and the item of another row"


def indexed(name: str, frame: Columns, config: TableConfig, path: Path) -> Interactions:
    """Convert the columns of a table to interactions without features.

    Raises:
        DataError: a value of the table at `path` is missing or wrong.
    """
    return index_rows(
        name,
        users=ids_of(frame[config.user], path),
        items=ids_of(frame[config.item], path),
        ratings=numbers_of(frame[config.rating], path) if config.rating else None,
        times=times_of(frame[config.time], path, config.time_format) if config.time else None,
    )


def _constant(name: str, labels: pd.Series, owner: np.ndarray, ids: np.ndarray) -> list[str | None]:
    """Return the constant value of each owner; None if it is missing.

    Raises:
        DataError: an owner has different values.
    """
    frame = pd.DataFrame({"owner": owner, "label": labels.to_numpy()}).dropna().drop_duplicates()
    twice = frame["owner"].duplicated()
    if twice.any():
        first = frame.loc[twice, "owner"].iloc[0]
        shown = frame.loc[frame["owner"] == first, "label"].tolist()[:2]
        raise DataError(
            f"feature {name!r} is not constant",
            expected=f"one value for {ids[first]!r} in all its rows",
            got=" and ".join(repr(value) for value in shown),
            fix="use only columns that describe the user (or the item); write several values in"
            " one field: books|food",
        )
    values: list[str | None] = [None] * len(ids)
    for row, label in frame.itertuples(index=False):
        values[row] = str(label)
    return values
