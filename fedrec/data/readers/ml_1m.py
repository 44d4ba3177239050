# SPDX-License-Identifier: Apache-2.0
"""MovieLens-1M: 1,000,209 star ratings, 6,040 users, 3,706 rated films (Harper and Konstan, 2015).

The catalogue is the 3,706 films with a rating: `movies.dat` lists 3,883, and film ids run to 3,952,
a number that some papers quote. Occupations get the labels of the data's README; the zip code is
dropped. Titles are public, and so is the year of release in which each ends: `titles` and `eras`
make a text and a feature of them.
"""

from __future__ import annotations

import re
from typing import ClassVar

import numpy as np
import pandas as pd

from fedrec.data.features import Feature, FeatureNames
from fedrec.data.files.published import Archive, DatasetSource
from fedrec.data.files.tables import Columns, TableLayout
from fedrec.data.reader import ReaderConfig
from fedrec.data.readers._movielens import LICENCE, RATINGS, MovieLens, genre_lists
from fedrec.errors import DataError

_YEAR = re.compile(r"\((\d{4})\)\s*$")
_OCCUPATIONS = (
    "other or not specified", "academic/educator", "artist", "clerical/admin",
    "college/grad student", "customer service", "doctor/health care", "executive/managerial",
    "farmer", "homemaker", "K-12 student", "lawyer", "programmer", "retired", "sales/marketing",
    "scientist", "self-employed", "technician/engineer", "tradesman/craftsman", "unemployed",
    "writer",
)  # fmt: skip


class MovieLens1MConfig(ReaderConfig):
    """Settings of the MovieLens-1M dataset."""

    eras: bool = False
    """Whether items have a feature `eras`: both overlapping decades (1985-1994, 1990-1999) of the
    year of release."""
    titles: bool = False
    """Whether items have a text `title`: the words of their titles, without the year."""


class MovieLens1M(MovieLens):
    """Reads `ratings.dat`, `users.dat` and `movies.dat`."""

    name = "ml-1m"
    Config: ClassVar[type[ReaderConfig]] = MovieLens1MConfig
    config: MovieLens1MConfig
    title = "MovieLens-1M: 1,000,209 ratings, 6,040 users, 3,706 rated films"
    paper = "PrivRec, PNBM; F. M. Harper, J. A. Konstan, The MovieLens Datasets, ACM TiiS 2015"
    source = DatasetSource(
        page="https://grouplens.org/datasets/movielens/1m/",
        licence=LICENCE,
        files=("ratings.dat", "users.dat", "movies.dat"),
        extras=("README",),
        archives=(
            Archive(
                url="https://files.grouplens.org/datasets/movielens/ml-1m.zip",
                size=5_917_549,
                sha256="a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20",
            ),
        ),
        users=6_040,
        items=3_706,
        rows=1_000_209,
        fingerprints=("5b75cd00c6c0484a1135c0f59b5ef3667177635a4c1e989b770a1d8b7906e43f",),
    )

    ratings = TableLayout(RATINGS, separator="::")
    films = TableLayout(
        {"id": np.int32, "title": str, "genres": str}, separator="::", encoding="latin-1"
    )
    users = TableLayout(
        {"id": np.int32, "gender": str, "age": np.int32, "occupation": np.int32, "zip": str},
        separator="::",
    )

    def feature_names(self) -> FeatureNames:
        """With eras and titles of the films if they are asked for."""
        users, items, *_ = super().feature_names()
        eras = ("eras",) if self.config.eras else ()
        return FeatureNames(users, (*items, *eras), ("title",) if self.config.titles else ())

    def film_features(self, films: Columns) -> list[Feature]:
        features = [Feature.multiple("genres", genre_lists(films["genres"]))]
        if self.config.eras:
            features.append(Feature.multiple("eras", [_eras(title) for title in films["title"]]))
        return features

    def film_texts(self, films: Columns) -> list[Feature]:
        if not self.config.titles:
            return []
        return [Feature.words("title", (_YEAR.sub("", title) for title in films["title"]))]

    def user_features(self, users: Columns) -> list[Feature]:
        return super().user_features({**users, "occupation": _occupations(users["occupation"])})


def _eras(title: str) -> list[str]:
    """The two decades, of those that start every five years, that hold the year at the end of a
    title."""
    year = _YEAR.search(title)
    if year is None:
        raise DataError(
            "movies.dat: a film without a year",
            expected="a title that ends in the year of release, such as 'Alien (1979)'",
            got=repr(title),
            fix="set dataset.eras = false",
        )
    last = int(year[1]) // 5 * 5
    return [f"{start}-{start + 9}" for start in (last - 5, last)]


def _occupations(codes: pd.Series) -> pd.Series:
    if not codes.between(0, len(_OCCUPATIONS) - 1).all():
        raise DataError(
            "users.dat: unknown occupation",
            expected=f"codes 0 to {len(_OCCUPATIONS) - 1}",
            got=f"codes {codes.min()} to {codes.max()}",
            fix="get the file again",
        )
    return codes.map(dict(enumerate(_OCCUPATIONS)))
