# SPDX-License-Identifier: Apache-2.0
"""Readers of MovieLens-100K, MovieLens-1M and MovieLens-20M."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pandas as pd

from fedrec.data.interactions import Feature, FeatureNames, FeatureTable, Interactions
from fedrec.data.reader import Archive, DatasetSource, Reader, ReaderConfig
from fedrec.data.tables import Columns, TableLayout, read_table
from fedrec.errors import DataError

# Base class of the readers: ratings, features by id, age bands, genres, licence.

LICENCE = (
    "research use with acknowledgement; no redistribution, no commercial use without permission"
)
RATINGS = {"user": np.int32, "item": np.int32, "rating": np.float32, "time": np.int64}
"""The columns of ratings in the two oldest releases, whose files have no header."""
_BAND_STARTS = (0, 18, 25, 35, 45, 50, 56)
_BANDS = ("Under 18", "18-24", "25-34", "35-44", "45-49", "50-55", "56+")


class MovieLens(Reader):
    """Base class of the readers of MovieLens releases.

    Attributes:
        source: its files contain the ratings, the users (if the release has them) and the films.
        ratings: layout of the ratings; its columns are user, item, rating and time.
        films: layout of the films; the first column is the id.
        users: layout of the users, likewise; None if the release has none.
        occupations: names of the users' occupation codes; empty if the file has names.
    """

    source: ClassVar[DatasetSource]  # pyright: ignore[reportIncompatibleVariableOverride]
    ratings: ClassVar[TableLayout]
    films: ClassVar[TableLayout]
    users: ClassVar[TableLayout | None] = None
    occupations: ClassVar[tuple[str, ...]] = ()

    def read(self) -> Interactions:
        _, *users, films = self.source.files
        rows, _ = self.rows(self.ratings)
        table = self._film_table(self._lines_of(rows.item_ids, films, self.films))
        rows = replace(rows, item_features=table)
        if self.users is None:
            return rows
        people = self._lines_of(rows.user_ids, users[0], self.users)
        occupations = people["occupation"]
        if self.occupations:
            occupations = occupations.map(dict(enumerate(self.occupations)))
        if occupations.isna().any():
            raise DataError(f"{users[0]}: unknown occupation", fix="get the file again")
        ages = [_BANDS[bisect_right(_BAND_STARTS, age) - 1] for age in people["age"]]
        labels = {"gender": people["gender"], "age": ages, "occupation": occupations}
        features = tuple(Feature.single(*named) for named in labels.items())
        return replace(rows, user_features=FeatureTable(rows.num_users, features))

    def feature_names(self) -> FeatureNames:
        """Names of gender, age and occupation if the release has users, and of genres."""
        users = () if self.users is None else ("gender", "age", "occupation")
        return FeatureNames(users, ("genres",))

    def _film_table(self, films: Columns) -> FeatureTable:
        """Features of films from the rows of the films file: genres."""
        none = "(no genres listed)"
        genres = [[g for g in text.split("|") if g not in ("", none)] for text in films["genres"]]
        return FeatureTable(len(genres), (Feature.multiple("genres", genres),))

    def _lines_of(self, ids: np.ndarray, file: str, layout: TableLayout) -> Columns:
        """Read the rows of a file with the `ids` `[n]` in its first column, in their order.

        Raises:
            DataError: an id is missing or duplicate.
        """
        path = self.file(file)
        table = pd.DataFrame(read_table(path, layout))
        table = table.set_index(table.columns[0])
        if not table.index.is_unique:
            twice = table.index[table.index.duplicated()][0]
            raise DataError(f"{path}: duplicate id {twice}", fix="remove one of the lines")
        missing = ids[~np.isin(ids, table.index)]
        if len(missing):
            raise DataError(
                f"{path}: id {missing[0]} of the ratings is missing",
                got=f"{len(missing):,} of {len(ids):,} ids without a line",
                fix="use both files from one copy of the dataset",
            )
        return {str(name): column for name, column in table.loc[ids].items()}


# MovieLens-1M: 1,000,209 star ratings, 6,040 users, 3,706 rated films (Harper and Konstan, 2015).
#
# The catalogue is the 3,706 films with a rating: `movies.dat` lists 3,883, and film ids run to
# 3,952, a number that some papers quote. Occupations get the labels of the data's README; the zip
# code is dropped. Titles are public, and so is the year of release in which each ends: `titles` and
# `eras` make a text and a feature of them.

_YEAR = re.compile(r"\((\d{4})\)\s*$")


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
    occupations = (
        "other or not specified", "academic/educator", "artist", "clerical/admin",
        "college/grad student", "customer service", "doctor/health care", "executive/managerial",
        "farmer", "homemaker", "K-12 student", "lawyer", "programmer", "retired", "sales/marketing",
        "scientist", "self-employed", "technician/engineer", "tradesman/craftsman", "unemployed",
        "writer",
    )  # fmt: skip

    def feature_names(self) -> FeatureNames:
        """Names of the features, with the films' eras and titles if configured."""
        users, items, *_ = super().feature_names()
        eras = ("eras",) if self.config.eras else ()
        return FeatureNames(users, (*items, *eras), ("title",) if self.config.titles else ())

    def _film_table(self, films: Columns) -> FeatureTable:
        table = super()._film_table(films)
        if self.config.eras:
            eras = Feature.multiple("eras", [_eras(title) for title in films["title"]])
            table = replace(table, features=(*table.features, eras))
        if self.config.titles:
            titles = (_YEAR.sub("", title) for title in films["title"])
            table = replace(table, texts=(Feature.words("title", titles),))
        return table


def _eras(title: str) -> list[str]:
    """Both overlapping decades (one starts every five years) of the year at the end of a title;
    none without a year."""
    year = _YEAR.search(title)
    last = int(year[1]) // 5 * 5 if year else 0
    return [f"{start}-{start + 9}" for start in (last - 5, last)] if year else []


# MovieLens-100K: 100,000 star ratings, 943 users, 1,682 films (Harper and Konstan, 2015).
#
# Ages are given in years; they are banded as MovieLens-1M does, so that a model with an age feature
# reads both. The zip code is dropped. The publisher's five folds lie in the same folder;
# `fedrec.data.splits.folds` reads them.

_GENRES = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary",
    "Drama", "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi",
    "Thriller", "War", "Western",
)  # fmt: skip


class MovieLens100K(MovieLens):
    """Reads `u.data`, `u.user` and `u.item`."""

    name = "ml-100k"
    title = "MovieLens-100K: 100,000 ratings, 943 users, 1,682 films"
    paper = "DP-VAE, PNBM; F. M. Harper, J. A. Konstan, The MovieLens Datasets, ACM TiiS 2015"
    source = DatasetSource(
        page="https://grouplens.org/datasets/movielens/100k/",
        licence=LICENCE,
        files=("u.data", "u.user", "u.item"),
        extras=("README", "u[1-5].base", "u[1-5].test"),
        archives=(
            Archive(
                url="https://files.grouplens.org/datasets/movielens/ml-100k.zip",
                size=4_924_029,
                sha256="50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229",
            ),
        ),
        users=943,
        items=1_682,
        rows=100_000,
        fingerprints=("33caa63b1f96eb36dbe5d712b44ef39aa3ba8252027c98507131ca06498f48fd",),
    )

    ratings = TableLayout(RATINGS)
    films = TableLayout(
        {
            "id": np.int32,
            "title": str,
            "released": str,
            "video": str,
            "page": str,
            **dict.fromkeys(_GENRES, np.int8),
        },
        separator="|",
        encoding="latin-1",
    )
    users = TableLayout(
        {"id": np.int32, "age": np.int32, "gender": str, "occupation": str, "zip": str},
        separator="|",
    )

    def _film_table(self, films: Columns) -> FeatureTable:
        flags = np.stack([films[genre] for genre in _GENRES], axis=1)
        genres = [[_GENRES[code] for code in np.flatnonzero(row)] for row in flags]
        return FeatureTable(len(genres), (Feature.multiple("genres", genres),))


# MovieLens-20M: 20,000,263 ratings in half stars, 138,493 users, 26,744 rated films (Harper and
# Konstan, 2015).
#
# The catalogue is the films with a rating; `movies.csv` lists 27,278. The release has no user
# features. It has a later edition with the same ratings (October 2016), whose archive is the one
# named here.


class MovieLens20M(MovieLens):
    """Reads `ratings.csv` and `movies.csv`."""

    name = "ml-20m"
    title = "MovieLens-20M: 20,000,263 ratings, 138,493 users, 26,744 rated films"
    paper = "DP-VAE; F. M. Harper, J. A. Konstan, The MovieLens Datasets, ACM TiiS 2015"
    source = DatasetSource(
        page="https://grouplens.org/datasets/movielens/20m/",
        licence=LICENCE,
        files=("ratings.csv", "movies.csv"),
        extras=("README.txt",),
        archives=(
            Archive(
                url="https://files.grouplens.org/datasets/movielens/ml-20m.zip",
                size=198_702_078,
                sha256="96f243c338a8665f6bcc89c53edf6ee39162a846940de6b7c8c48aeada765ff3",
            ),
        ),
        users=138_493,
        items=26_744,
        rows=20_000_263,
    )

    ratings = TableLayout(
        {"userId": np.int32, "movieId": np.int32, "rating": np.float32, "timestamp": np.int64},
        separator=",",
        names="first line",
    )
    films = TableLayout(
        {"movieId": np.int32, "genres": str}, separator=",", names="first line", gaps=True
    )
