# SPDX-License-Identifier: Apache-2.0
"""What the MovieLens readers share: ratings, features by id, age bands, genres, licence."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd

from fedrec.data.features import Feature, FeatureNames, FeatureTable
from fedrec.data.files.indexing import index_rows
from fedrec.data.files.published import DatasetSource
from fedrec.data.files.tables import Columns, TableLayout, read_table
from fedrec.data.interactions import Interactions
from fedrec.data.reader import Reader
from fedrec.errors import DataError

LICENCE = (
    "research use with acknowledgement; no redistribution, no commercial use without permission"
)
RATINGS = {"user": np.int32, "item": np.int32, "rating": np.float32, "time": np.int64}
"""The columns of ratings in the two oldest releases, whose files have no header."""
_BAND_STARTS = (0, 18, 25, 35, 45, 50, 56)
_BANDS = ("Under 18", "18-24", "25-34", "35-44", "45-49", "50-55", "56+")


class MovieLens(Reader):
    """Reads one release.

    Attributes:
        source: its files are those of the ratings, of the users where it has features of them, and
            of the films.
        ratings: layout of the ratings; its columns are user, item, rating and time.
        films: layout of the films; the first column is the id.
        users: layout of the users, likewise; None if the release has none.
    """

    source: ClassVar[DatasetSource]  # pyright: ignore[reportIncompatibleVariableOverride]
    ratings: ClassVar[TableLayout]
    films: ClassVar[TableLayout]
    users: ClassVar[TableLayout | None] = None

    def read(self) -> Interactions:
        ratings, *users, films = self.source.files
        header = self.ratings.names == "first line"
        frame = read_table(self.file(ratings, lines=(self.source.rows or 0) + header), self.ratings)
        names = ("users", "items", "ratings", "times")
        columns = dict(zip(names, (frame[one] for one in self.ratings.columns), strict=True))
        bare = self.verified(index_rows(self.name, **columns))
        found = replace(bare, item_features=self._table(films, self.films, bare.item_ids))
        if self.users is None:
            return found
        return replace(found, user_features=self._table(users[0], self.users, bare.user_ids))

    def feature_names(self) -> FeatureNames:
        """Gender, age and occupation where there is a file of users, and genres."""
        users = () if self.users is None else ("gender", "age", "occupation")
        return FeatureNames(users, ("genres",))

    def _table(self, file: str, layout: TableLayout, ids: np.ndarray) -> FeatureTable:
        path = self.file(file)
        rows = rows_of(ids, read_table(path, layout), path)
        if layout is self.films:
            return FeatureTable(
                len(ids), tuple(self.film_features(rows)), tuple(self.film_texts(rows))
            )
        return FeatureTable(len(ids), tuple(self.user_features(rows)))

    @abstractmethod
    def film_features(self, films: Columns) -> list[Feature]:
        """Features of films from their rows in the file of films."""

    def film_texts(self, films: Columns) -> list[Feature]:
        """Words of films' texts from the same rows; none by default."""
        return []

    def user_features(self, users: Columns) -> list[Feature]:
        """Gender, age band and occupation from the columns `gender`, `age` (years) and
        `occupation`."""
        return [
            Feature.single("gender", users["gender"]),
            Feature.single("age", [age_band(age) for age in users["age"]]),
            Feature.single("occupation", users["occupation"]),
        ]


def age_band(age: int) -> str:
    """The band of an age in years, as defined by MovieLens-1M (whose codes are the youngest age of
    each band)."""
    return _BANDS[bisect_right(_BAND_STARTS, age) - 1]


def rows_of(ids: np.ndarray, table: Columns, path: Path) -> Columns:
    """The rows of a table, read from `path`, whose first column is one of the `ids` `[n]`, in the
    order of these.

    Raises:
        DataError: an id has no row, or two.
    """
    listed = pd.Index(next(iter(table.values())))
    if not listed.is_unique:
        twice = listed[listed.duplicated()][0]
        raise DataError(
            f"{path}: id {twice} is given twice",
            expected="one line per id",
            got="two or more",
            fix="get the file again, or leave one line out",
        )
    place = listed.get_indexer(pd.Index(ids))
    missing = place < 0
    if missing.any():
        raise DataError(
            f"{path}: id {ids[missing][0]} of the ratings is missing",
            expected=f"a line for each of {len(ids):,} ids",
            got=f"{int(missing.sum()):,} without one",
            fix="take both files from one copy of the dataset",
        )
    return {name: values.iloc[place] for name, values in table.items()}


def genre_lists(texts: Iterable[str]) -> list[list[str]]:
    """`"Comedy|Drama"` -> `["Comedy", "Drama"]`; a film without genres has an empty list."""
    return [
        [genre for genre in text.split("|") if genre and genre != "(no genres listed)"]
        for text in texts
    ]
