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

from fedrec.data.columns import SECOND, ids_of, index_rows, numbers_of, times_of
from fedrec.data.feature_labels import labelled
from fedrec.data.features import Feature, FeatureNames, FeatureTable
from fedrec.data.interactions import Interactions
from fedrec.data.reader import Reader, ReaderConfig
from fedrec.data.recognition import repeated_rows
from fedrec.data.tables import Columns, TableLayout, column_names, columns_of, read_table
from fedrec.errors import DataError, did_you_mean
from fedrec.runtime.ragged import distinct

log = logging.getLogger("fedrec.data")

OTHER = "other"
"""Category of users whose own is not among the declared ones."""


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
    """Form of the dates in the column of times, as of `strptime`, such as "%m/%d/%Y %H:%M"; ISO
    dates, dotted dates with the day first and numbers need none."""
    separator: str = Field(",", pattern="^(.|::)$")
    """What is between two values of a CSV file: a character, such as "," or "\\t", or "::"; " " is
    any number of spaces."""
    header: bool = True
    """Whether the first line of a CSV file has the names of the columns; otherwise they are named
    by their positions, "1", "2" and so on."""
    user_features: tuple[str, ...] = ()
    """Names of columns that are constant per user, or files of additional tables with the user
    column and one row per user."""
    user_categories: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Categories of users' features, by column, such as `{city = ["Bonn", "Ulm"]}`; any other
    value becomes "other". Without them the categories are those that occur, which tells that some
    user has each; models that use them are then refused under privacy."""
    item_features: tuple[str, ...] = ()
    """Names of columns that are constant per item, or files of additional tables with the item
    column and one row per item. As in those of users, a value may be a list (books|food, or with
    semicolons), and more than 20 different prices or other amounts are put in bands (10 to 20)."""
    item_texts: tuple[str, ...] = ()
    """Names of columns of these tables that hold a text, such as a title, instead of a category."""


class Table(Reader):
    """Reads the file named by `path`."""

    name = "table"
    Config: ClassVar[type[ReaderConfig]] = TableConfig
    config: TableConfig
    title = "your own CSV, Parquet or JSON file"

    def read(self) -> Interactions:
        rows = self.interactions(read_table(self._path(), self._layout()))
        repeated = len(rows) - len(distinct(rows.users * rows.num_items + rows.items))
        if repeated:
            log.warning("%s: %s", self._path(), repeated_rows(repeated, len(rows)))
        return rows

    def interactions(self, columns: Columns) -> Interactions:
        """The interactions in columns that were read before.

        Args:
            columns: all that the settings name; ids as text, or as numbers of a Parquet file.

        Raises:
            DataError: a column is missing, a value is missing or wrong, or a feature is not
                constant.
        """
        config = self.config
        path = self._path()
        frame = columns_of(str(path), columns, self._layout())
        bare = indexed(self.name, frame, config, path)
        return replace(
            bare,
            user_features=self._declared(
                self._features(frame, config.user, config.user_features, bare.users, bare.user_ids)
            ),
            item_features=_with_texts(
                self._features(
                    frame,
                    config.item,
                    (*config.item_features, *self._own_texts(path)),
                    bare.items,
                    bare.item_ids,
                ),
                config.item_texts,
            ),
        )

    def feature_names(self) -> FeatureNames:
        """Columns, and files of additional tables, as the settings name them."""
        config = self.config
        return FeatureNames(config.user_features, config.item_features, config.item_texts)

    def undeclared_categories(self) -> tuple[str, ...]:
        """Columns of users' features without `user-categories`."""
        config = self.config
        layout = TableLayout.own({}, separator=config.separator)
        extras = {name: self._extra(name, self._path()) for name in config.user_features}
        columns = [
            column
            for name, extra in extras.items()
            for column in (column_names(extra, layout) if extra else (name,))
        ]
        return tuple(c for c in columns if c != config.user and c not in config.user_categories)

    def _declared(self, table: FeatureTable) -> FeatureTable:
        """The users' features with the declared categories.

        Raises:
            DataError: categories are declared of a feature that users do not have.
        """
        declared = self.config.user_categories
        unknown = [name for name in declared if name not in table.names]
        if unknown:
            raise DataError(
                f"users have no feature {unknown[0]!r}, whose categories are declared",
                expected=f"one of {', '.join(table.names) or 'dataset.user-features'}",
                got=f"dataset.user-categories with {unknown[0]!r}",
                fix=did_you_mean(unknown[0], table.names),
            )
        features = tuple(
            one.among(declared[one.name], OTHER) if one.name in declared else one
            for one in table.features
        )
        return replace(table, features=features)

    def files(self) -> list[Path]:
        path = self.config.path
        if path is None or not path.is_file():
            return []
        names = (*self.config.user_features, *self.config.item_features)
        return [path, *(extra for name in names if (extra := self._extra(name, path)))]

    def _path(self) -> Path:
        if self.config.path is None:
            raise DataError(
                "no table is given",
                expected="dataset.path",
                got="nothing",
                fix="set dataset.path = ...",
            )
        return self.folder()

    def _layout(self) -> TableLayout:
        config = self.config
        settings = self._columns(self._path())
        numbers = (config.rating, config.time)
        columns = {name: None if name in numbers else str for name in settings}
        return TableLayout.own(
            columns, settings=settings, separator=config.separator, header=config.header
        )

    def _columns(self, path: Path) -> dict[str, str]:
        """The columns to read from the main table, and the setting that names each."""
        config = self.config
        columns: dict[str, str] = {}
        for role in ("user", "item", "rating", "time"):
            name = getattr(config, role)
            if name in columns:
                raise DataError(
                    f"column {name!r} is given twice",
                    expected="a column of its own for each of users, items, ratings and times",
                    got=f"{columns[name]} and dataset.{role}",
                    fix=f"set dataset.{role} to the name of another column",
                )
            columns |= {name: f"dataset.{role}"} if name else {}
        for setting, names in (
            ("user-features", config.user_features),
            ("item-features", config.item_features),
            ("item-texts", self._own_texts(path)),
        ):
            columns |= {
                name: f"dataset.{setting}" for name in names if self._extra(name, path) is None
            }
        return columns

    def _extra(self, name: str, path: Path) -> Path | None:
        """The additional table called `name`; None if it is a column. Relative paths start at the
        table's folder."""
        extra = path.parent / name
        return extra if extra.is_file() else None

    def _own_texts(self, path: Path) -> tuple[str, ...]:
        """The texts that are columns of the main table: those that no additional one has."""
        layout = TableLayout.own({}, separator=self.config.separator)
        extras = (self._extra(name, path) for name in self.config.item_features)
        elsewhere = {name for extra in extras if extra for name in column_names(extra, layout)}
        return tuple(name for name in self.config.item_texts if name not in elsewhere)

    def _features(
        self,
        frame: Columns,
        key: str,
        names: Sequence[str],
        owner: np.ndarray,
        ids: np.ndarray,
    ) -> FeatureTable:
        features: list[Feature] = []
        for name in names:
            extra = self._extra(name, self._path())
            if extra is None:
                features.append(self._feature(name, frame[name], owner, ids))
            else:
                features += self._from_extra(extra, key, ids)
        return FeatureTable(len(ids), tuple(features))

    def _feature(self, name: str, labels: pd.Series, owner: np.ndarray, ids: np.ndarray) -> Feature:
        """A column as a feature; what its values are taken for is told, if that is not one
        category each."""
        values = _constant(name, labels, owner, ids)
        if name in self.config.item_texts:
            return Feature.words(name, [value or "" for value in values])
        feature, taken = labelled(name, values)
        if taken:
            log.warning("feature %r is taken for %s", name, taken)
        return feature

    def _from_extra(self, path: Path, key: str, ids: np.ndarray) -> list[Feature]:
        layout = TableLayout.own({}, separator=self.config.separator)
        columns = dict.fromkeys([key, *column_names(path, layout)], str)
        settings = {key: "the column of ids"}
        frame = read_table(path, replace(layout, columns=columns, settings=settings))
        place = pd.Index(ids.astype(str)).get_indexer(
            pd.Index(ids_of(frame[key], path).astype(str))
        )
        known = place >= 0
        return [
            self._feature(name, pd.Series(labels[known]), place[known], ids)
            for name, labels in frame.items()
            if name != key
        ]


def indexed(name: str, frame: Columns, config: TableConfig, path: Path) -> Interactions:
    """Interactions without features from the columns of a table.

    Raises:
        DataError: a value is missing or wrong; `path` is named as its place.
    """
    return index_rows(
        name,
        users=ids_of(frame[config.user], path),
        items=ids_of(frame[config.item], path),
        ratings=numbers_of(frame[config.rating], path) if config.rating else None,
        times=times_of(frame[config.time], path, config.time_format) if config.time else None,
        second=SECOND,
    )


def _with_texts(table: FeatureTable, names: Sequence[str]) -> FeatureTable:
    """A table of which the features of some names, by their words, are texts."""
    texts = [one for one in table.features if one.name in names]
    return replace(
        table, features=table.only(set(table.names) - set(names)).features, texts=tuple(texts)
    )


def _constant(name: str, labels: pd.Series, owner: np.ndarray, ids: np.ndarray) -> list[str | None]:
    """The value of each owner, which is repeated in every row; None where it is missing.

    Raises:
        DataError: one owner has two labels.
    """
    frame = pd.DataFrame({"owner": owner, "label": labels.to_numpy()}).dropna().drop_duplicates()
    twice = np.asarray(frame["owner"].duplicated())
    if twice.any():
        first = int(np.asarray(frame["owner"])[twice][0])
        shown = frame.loc[frame["owner"] == first, "label"].tolist()[:2]
        raise DataError(
            f"feature {name!r} is not constant",
            expected=f"one value for {ids[first]!r} in all its rows",
            got=" and ".join(repr(value) for value in shown),
            fix="name only columns that belong to the user (or to the item); write several values"
            " in one field: books|food",
        )
    values: list[str | None] = [None] * len(ids)
    for place, label in frame.itertuples(index=False):
        values[place] = str(label)
    return values
