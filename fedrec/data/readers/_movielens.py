# SPDX-License-Identifier: Apache-2.0
"""Shared code of the MovieLens readers: licence, age bands, features by id."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from fedrec.data.features import Feature, FeatureTable
from fedrec.data.files.delimited import Layout, read_delimited
from fedrec.data.files.indexing import index_rows
from fedrec.data.interactions import Interactions
from fedrec.data.reader import Reader
from fedrec.errors import DataError

LICENCE = (
    "research use with acknowledgement; no redistribution, no commercial use without permission"
)

RATING_COLUMNS = {"users": "user", "items": "item", "ratings": "rating", "times": "time"}
"""Column names in the layouts of the two oldest releases, whose files have no header."""

_BAND_STARTS = (0, 18, 25, 35, 45, 50, 56)
_BANDS = ("Under 18", "18-24", "25-34", "35-44", "45-49", "50-55", "56+")


def read_ratings(
    reader: Reader, path: Path, layout: Layout, columns: Mapping[str, str]
) -> Interactions:
    """The ratings of a release without features, verified against the published counts.

    Args:
        reader: of the release.
        path: the file of ratings.
        layout: format of the file.
        columns: the file's names for `users`, `items`, `ratings` and `times`.
    """
    frame = read_delimited(path, layout)
    named = {name: frame[column] for name, column in columns.items()}
    return reader.verified(index_rows(reader.name, **named))


def age_band(age: int) -> str:
    """The band of an age in years, as defined by MovieLens-1M (whose codes are the youngest age of
    each band)."""
    return _BANDS[bisect_right(_BAND_STARTS, age) - 1]


def user_features(users: dict[str, np.ndarray], occupations: Iterable[str]) -> FeatureTable:
    """Gender, age band and occupation of each row of `users`, which has the columns `gender` and
    `age` (years)."""
    return FeatureTable(
        len(users["age"]),
        (
            Feature.single("gender", users["gender"]),
            Feature.single("age", [age_band(age) for age in users["age"]]),
            Feature.single("occupation", occupations),
        ),
    )


def rows_of(
    ids: np.ndarray, table: dict[str, np.ndarray], path: Path, key: str = "id"
) -> dict[str, np.ndarray]:
    """The rows of `table` (columns `[rows]`, read from `path`) whose `key` is one of the `ids`
    `[n]`, in the order of these.

    Raises:
        DataError: an id has no row, or two.
    """
    listed = pd.Index(table[key])
    if not listed.is_unique:
        twice = listed[listed.duplicated()][0]
        raise DataError(
            f"{path}: id {twice} is given twice", expected="one line per id", got="two or more"
        )
    place = listed.get_indexer(pd.Index(ids))
    missing = place < 0
    if missing.any():
        raise DataError(
            f"{path}: id {ids[missing][0]} of the ratings is missing",
            expected=f"a line for each of {len(ids):,} ids",
            got=f"{int(missing.sum()):,} without one",
        )
    return {name: values[place] for name, values in table.items()}


def genre_lists(texts: Iterable[str]) -> list[list[str]]:
    """`"Comedy|Drama"` -> `["Comedy", "Drama"]`; a film without genres has an empty list."""
    return [
        [genre for genre in text.split("|") if genre and genre != "(no genres listed)"]
        for text in texts
    ]
