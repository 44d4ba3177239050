# SPDX-License-Identifier: Apache-2.0
"""A user's own table with one interaction per row: CSV (any separator), Parquet or JSON objects.

Ids may be text or numbers; a column of ids that are all plain whole numbers is sorted as numbers,
any other as text. A time may be a number (of seconds, milliseconds, microseconds or nanoseconds
since 1970, or any other that orders rows) or a date (ISO, or such as 26.05.2022; in UTC where no
zone is given). Interactions have times in nanoseconds, so that fractions of seconds count.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
from pydantic import Field

from fedrec.data.columns import ids_of, index_rows, numbers_of, times_of
from fedrec.data.interactions import Feature, FeatureNames, FeatureTable, Interactions, labelled
from fedrec.data.reader import Reader, ReaderConfig
from fedrec.data.tables import Columns, TableLayout, columns_of, read_table, table_start
from fedrec.errors import DataError, did_you_mean
from fedrec.runtime.ragged import distinct

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

    def _layout(self) -> TableLayout:
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
        return TableLayout.own(
            columns, settings=settings, separator=config.separator, header=config.header
        )

    @property
    def _extras(self) -> dict[str, Path]:
        """Files of additional tables, by the names of the settings; relative paths start at the
        table's folder."""
        names = (*self.config.user_features, *self.config.item_features)
        paths = {name: self._path.parent / name for name in names}
        return {name: path for name, path in paths.items() if path.is_file()}

    def _columns(self, names: Sequence[str]) -> list[str]:
        """Names of columns, in place of a name of an additional table those of its columns."""
        layout = TableLayout.own({}, separator=self.config.separator)
        extras = self._extras
        columns = (table_start(extras[n], layout).names if n in extras else [n] for n in names)
        return [column for some in columns for column in some]

    def _features(
        self,
        frame: Columns,
        key: str,
        names: Sequence[str],
        owner: np.ndarray,
        ids: np.ndarray,
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
            separator = self.config.separator
            extra = read_table(
                path, TableLayout.own(columns, settings=settings, separator=separator)
            )
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
