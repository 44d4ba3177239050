# SPDX-License-Identifier: Apache-2.0
"""Readers of MovieLens, Gowalla, Frappe, Netflix and Amazon."""

import re
from abc import abstractmethod
from array import array
from bisect import bisect_right
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd

from fedrec.data.interactions import Feature, FeatureNames, FeatureTable, Interactions
from fedrec.data.reader import Archive, DatasetSource, Reader, ReaderConfig
from fedrec.data.tables import Columns, TableLayout, malformed_line, read_table
from fedrec.errors import DataError

# MovieLens: ratings, features by id, age bands, genres, licence.

_LICENCE = (
    "research use with acknowledgement; no redistribution, no commercial use without permission"
)
_STARS = {"user": np.int32, "item": np.int32, "rating": np.float32, "time": np.int64}
"""The columns of ratings in the two oldest releases, whose files have no header."""
_BAND_STARTS = (0, 18, 25, 35, 45, 50, 56)
_BANDS = ("Under 18", "18-24", "25-34", "35-44", "45-49", "50-55", "56+")


class _MovieLens(Reader):
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


class MovieLens1M(_MovieLens):
    """Reads `ratings.dat`, `users.dat` and `movies.dat`."""

    name = "ml-1m"
    Config: ClassVar[type[ReaderConfig]] = MovieLens1MConfig
    config: MovieLens1MConfig
    title = "MovieLens-1M: 1,000,209 ratings, 6,040 users, 3,706 rated films"
    paper = "PrivRec, PNBM; F. M. Harper, J. A. Konstan, The MovieLens Datasets, ACM TiiS 2015"
    source = DatasetSource(
        page="https://grouplens.org/datasets/movielens/1m/",
        licence=_LICENCE,
        files=("ratings.dat", "users.dat", "movies.dat"),
        extras=("README",),
        archive=Archive(
            url="https://files.grouplens.org/datasets/movielens/ml-1m.zip",
            size=5_917_549,
            sha256="a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20",
        ),
        rows=1_000_209,
        fingerprint="5b75cd00c6c0484a1135c0f59b5ef3667177635a4c1e989b770a1d8b7906e43f",
    )

    ratings = TableLayout(_STARS, separator="::")
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


class MovieLens100K(_MovieLens):
    """Reads `u.data`, `u.user` and `u.item`."""

    name = "ml-100k"
    title = "MovieLens-100K: 100,000 ratings, 943 users, 1,682 films"
    paper = "DP-VAE, PNBM; F. M. Harper, J. A. Konstan, The MovieLens Datasets, ACM TiiS 2015"
    source = DatasetSource(
        page="https://grouplens.org/datasets/movielens/100k/",
        licence=_LICENCE,
        files=("u.data", "u.user", "u.item"),
        extras=("README", "u[1-5].base", "u[1-5].test"),
        archive=Archive(
            url="https://files.grouplens.org/datasets/movielens/ml-100k.zip",
            size=4_924_029,
            sha256="50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229",
        ),
        rows=100_000,
        fingerprint="33caa63b1f96eb36dbe5d712b44ef39aa3ba8252027c98507131ca06498f48fd",
    )

    ratings = TableLayout(_STARS)
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


class MovieLens20M(_MovieLens):
    """Reads `ratings.csv` and `movies.csv`."""

    name = "ml-20m"
    title = "MovieLens-20M: 20,000,263 ratings, 138,493 users, 26,744 rated films"
    paper = "DP-VAE; F. M. Harper, J. A. Konstan, The MovieLens Datasets, ACM TiiS 2015"
    source = DatasetSource(
        page="https://grouplens.org/datasets/movielens/20m/",
        licence=_LICENCE,
        files=("ratings.csv", "movies.csv"),
        extras=("README.txt",),
        archive=Archive(
            url="https://files.grouplens.org/datasets/movielens/ml-20m.zip",
            size=198_702_078,
            sha256="96f243c338a8665f6bcc89c53edf6ee39162a846940de6b7c8c48aeada765ff3",
        ),
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


# Pairs published as a training and a test file.


class _PublishedPairs(Reader):
    """Reads a training and a test file of pairs.

    Attributes:
        source: `files` are the training and the test file.
        train: rows and fingerprint of the training file alone.
    """

    source: ClassVar[DatasetSource]  # pyright: ignore[reportIncompatibleVariableOverride]
    train: ClassVar[tuple[int, str]]

    features = FeatureNames()

    def read(self) -> Interactions:
        files = [self._pairs(self.file(name)) for name in self.source.files]
        users, items = (np.concatenate(columns) for columns in zip(*files, strict=True))
        rows = self.indexed(users=users, items=items)
        split = len(files[0][0])
        rows = replace(rows, published_test=np.arange(len(rows)) >= split)
        if self.config.verify:  # moving pairs between the files leaves their union unchanged
            count, fingerprint = self.train
            alone = replace(self.source, rows=count, fingerprint=fingerprint)
            alone.check(rows.with_rows(slice(split)))
        return rows

    @abstractmethod
    def _pairs(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        """Read users and items `int [pairs]` from one of the files.

        Raises:
            DataError: a line is not in the format of the file.
        """


# Gowalla check-ins as split by the NGCF and LightGCN authors: 29,858 users, 40,981 places, 810,128
# + 217,242 pairs.
#
# Each line of `train.txt` and `test.txt` is a user followed by that user's places. Pairs have no
# rating and no time. Rows of `train.txt` come first.

_NUMBERS = re.compile(rb"[0-9 \t]*")


class Gowalla(_PublishedPairs):
    """Reads `train.txt` and `test.txt`. Import only: no direct download."""

    name = "gowalla"
    title = "Gowalla: 1,027,370 check-ins, 29,858 users, 40,981 places"
    paper = "UPC-SDG; X. He et al., LightGCN, SIGIR 2020"
    source = DatasetSource(
        page="https://github.com/gusye1234/LightGCN-PyTorch",
        licence=(
            "collected by E. Cho, S. A. Myers, J. Leskovec (KDD 2011) and published by SNAP; cite"
            " the paper"
        ),
        files=("train.txt", "test.txt"),
        rows=1_027_370,
        fingerprint="e747d1fbcd694b9a04bcab83a20e4c6f0392254f692f11171f9b13313c05bbf2",
    )
    train = (810_128, "55a126701da3607f7ae5bfa45ca00d0786f9c8106783579b6db56a20a9a63d7d")

    def _pairs(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        """Read users and items `int64 [pairs]` from a file of lines `user item item ...`.

        Raises:
            DataError: a line holds something other than whole numbers.
        """
        lines = path.read_bytes().splitlines()
        for number, line in enumerate(lines, start=1):
            if not _NUMBERS.fullmatch(line):
                expected = "a user and items, all whole numbers, between single spaces"
                raise malformed_line(path, number, line[:200].decode("latin-1"), expected)
        values = [np.fromstring(line, dtype=np.int64, sep=" ") for line in lines]
        values = [numbers for numbers in values if len(numbers)]
        users = [np.full(len(numbers) - 1, numbers[0]) for numbers in values]
        empty = np.empty(0, dtype=np.int64)
        return np.concatenate([empty, *users]), np.concatenate([empty, *(v[1:] for v in values)])


# Frappe: 96,203 rows of mobile app usage, 957 users, 4,082 apps, each row with its context
# (Baltrunas et al., 2015).
#
# A row says that a user used an app `cnt` times in one context; a (user, app) pair has 5 rows on
# average. There are no star ratings: `cnt` is the rating here, and there are no times.
#
# PrivRec (section 3.2) treats daytime, weekday, isweekend, homework, weather, country and city as
# features of the user. They vary from row to row, so the feature of a user is the value that most
# of the user's rows have (of equals, the first in alphabetical order). PrivRec's 288,609
# interactions are these rows and two sampled negatives for each.

_CONTEXT = ("daytime", "weekday", "isweekend", "homework", "weather", "country", "city")
_USAGE = TableLayout(
    {
        "user": np.int32,
        "item": np.int32,
        "cnt": np.float32,
        "cost": str,
        **dict.fromkeys(_CONTEXT, str),
    },
    names="first line",
)
_APPS = TableLayout({"item": np.int32, "category": str}, names="first line", gaps=True)


class Frappe(Reader):
    """Reads `frappe.csv`, and app categories from `meta.csv` if present. Import only: no direct
    download."""

    name = "frappe"
    title = "Frappe: 96,203 rows of app usage, 957 users, 4,082 apps"
    paper = (
        "PrivRec; L. Baltrunas et al., Frappe: Understanding the Usage and Perception of Mobile App"
        " Recommendations"
    )
    source = DatasetSource(
        page="https://www.baltrunas.info/context-aware/frappe",
        licence=_LICENCE,
        files=("frappe.csv",),
        extras=("meta.csv", "README.txt"),
        rows=96_203,
        fingerprint="b23699fb46d8614269915466ff38cfdfe67d9fb42b04b74e6e3c695ee574e770",
    )

    def read(self) -> Interactions:
        rows, usage = self.rows(_USAGE, ("users", "items", "ratings"))
        features = [
            Feature.single(name, _most_frequent(rows.users, usage[name])) for name in _CONTEXT
        ]
        return replace(
            rows,
            user_features=FeatureTable(rows.num_users, tuple(features)),
            item_features=self._item_features(rows, usage["cost"]),
        )

    def feature_names(self) -> FeatureNames:
        """Names of users' contexts, apps' costs, and app categories if `meta.csv` is present."""
        described = any(file.name == "meta.csv" for file in self.files())
        return FeatureNames(tuple(_CONTEXT), ("cost", "category") if described else ("cost",))

    def _item_features(self, rows: Interactions, cost: pd.Series) -> FeatureTable:
        features = [Feature.single("cost", _most_frequent(rows.items, cost))]
        if (self.folder() / "meta.csv").is_file():
            apps = read_table(self.file("meta.csv"), _APPS)
            category = dict(zip(apps["item"].tolist(), apps["category"], strict=True))
            names = (category.get(app) for app in rows.item_ids.tolist())
            features.append(Feature.multiple("category", [[n] if n else [] for n in names]))
        return FeatureTable(rows.num_items, tuple(features))


def _most_frequent(owner: np.ndarray, labels: pd.Series) -> list[str]:
    """Most frequent label of each owner, ascending; ties are resolved in alphabetical order."""
    frame = pd.DataFrame({"owner": owner, "label": labels.to_numpy()})
    counts = frame.value_counts(sort=False).rename("rows").reset_index()
    best = counts.sort_values(
        ["owner", "rows", "label"], ascending=[True, False, True]
    ).drop_duplicates("owner")
    return best["label"].tolist()


# Netflix Prize: 100,480,507 star ratings with dates, 480,189 users, 17,770 films (Bennett and
# Lanning, KDD Cup 2007).
#
# Two forms are read: the original `training_set/mv_*.txt` (one film per file) and
# `combined_data_*.txt` (the same files concatenated). In both, a line `film:` is followed by lines
# `user,rating,date`. Times are midnight (UTC) of the date.


class Netflix(Reader):
    """Reads both forms. Import only: the publisher withdrew the download."""

    name = "netflix"
    title = "Netflix Prize: 100,480,507 ratings, 480,189 users, 17,770 films"
    paper = "DP-VAE; J. Bennett, S. Lanning, The Netflix Prize, KDD Cup and Workshop 2007"
    source = DatasetSource(
        page="https://archive.org/details/nf_prize_dataset.tar",
        licence=(
            "research use as granted by the Netflix Prize rules; no redistribution, no"
            " commercial use"
        ),
        files=(),
        extras=("training_set/mv_*.txt", "combined_data_*.txt"),
        rows=100_480_507,
    )

    features = FeatureNames()

    def read(self) -> Interactions:
        films, users, ratings, times = _read_rows(self._files())
        return self.indexed(users=users, items=films, ratings=ratings, times=times)

    def _files(self) -> list[Path]:
        folder = self.folder()
        for pattern in ("training_set/mv_*.txt", "combined_data_*.txt"):
            if files := sorted(folder.glob(pattern)):
                return files
        raise DataError(
            f"{folder} has neither training_set/mv_*.txt nor combined_data_*.txt",
            fix="unpack training_set.tar there, or import the folder that contains the files",
        )


def _read_rows(files: list[Path]) -> list[np.ndarray]:
    """Read films, users, ratings and times, in small types: 100 million rows take 1.7 GB."""
    columns = [array("i") for _ in range(4)]
    for path in files:
        film = None
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.rstrip(b"\r\n")
                try:
                    if text.endswith(b":"):
                        film = int(text[:-1])
                        continue
                    user, rating, date = text.split(b",")
                    if film is None:
                        raise ValueError("a rating before the first film")
                    row = (film, int(user), _stars(rating), _seconds(date))
                    for column, value in zip(columns, row, strict=True):
                        column.append(value)
                except (ValueError, OverflowError):
                    shown = text[:200].decode("latin-1")
                    expected = "film: or user,rating,YYYY-MM-DD"
                    raise malformed_line(path, number, shown, expected) from None
    return [np.array(column) for column in columns]


def _stars(text: bytes) -> int:
    """Parse a rating from 1 to 5."""
    return (b"1", b"2", b"3", b"4", b"5").index(text) + 1


@lru_cache
def _seconds(date: bytes) -> int:
    """Convert a date to seconds since 1970 (at midnight)."""
    return int(datetime.fromisoformat(f"{date.decode()}T00:00+00:00").timestamp())


# Amazon's ratings as prepared by three publications.
#
# Files of reviews with one JSON object per line, such as the 5-core ones of McAuley et al. (2015),
# are read as tables: `user = "reviewerID"`, `item = "asin"`, `rating = "overall"` and
# `time = "unixReviewTime"`.

# Amazon Instant Video: 63,836 ratings with times, 8,072 users, 11,830 items, as included in the
# public code of PFedRec.
#
# Times are real, in whole days; the seed orders the rows of a user on one day. A row is
# `user,item,rating,seconds since 1970`.

_RATINGS = TableLayout(
    {"user": str, "item": str, "rating": np.float32, "time": np.int64}, separator=","
)


class AmazonVideo(Reader):
    """Reads `ratings.dat`. Import only: no direct download."""

    name = "amazon-video"
    title = "Amazon Instant Video: 63,836 ratings with times, 8,072 users, 11,830 items"
    paper = "J. McAuley et al., SIGIR 2015; as in PFedRec (Zhang et al. 2023)"
    source = DatasetSource(
        page="https://github.com/Zhangcx19/IJCAI-23-PFedRec",
        licence="research use",
        files=("ratings.dat",),
        rows=63_836,
        fingerprint="d696bd35b6e61009c89bb9350e1f17b46d1033275e0f77caa766a13be041b3ed",
    )

    features = FeatureNames()

    def read(self) -> Interactions:
        return self.rows(_RATINGS)[0]


# Amazon Office as split by the authors of UPC-SDG: 4,874 users, 2,406 items, 37,027 + 15,930 pairs.
#
# The paper states a random 80:10:10 split; the files that the authors released are 70:30 and its
# figures agree with those. Pairs have no rating and no time. Rows of `train.csv` come first.
#
# The authors' other Amazon datasets (such as Clothing) have the same format: set `path` to their
# folder and `verify` to false.

_PAIRS = TableLayout({"userID": np.int32, "itemID": np.int32}, separator=",", names="first line")


class AmazonUpc(_PublishedPairs):
    """Reads `train.csv` and `test.csv`. Import only: no direct download."""

    name = "amazon-upc"
    title = "Amazon Office (UPC-SDG): 52,957 purchases, 4,874 users, 2,406 items"
    paper = (
        "UPC-SDG: F. Liu et al., Privacy-Preserving Synthetic Data Generation for Recommendation,"
        " SIGIR 2022"
    )
    source = DatasetSource(
        page="https://github.com/HuilinChenJN/UPC_SDG",
        licence=(
            "derived from the Amazon review data of J. McAuley (UCSD); research use, cite the"
            " source"
        ),
        files=("train.csv", "test.csv"),
        folder="office",
        rows=52_957,
        fingerprint="09098895a87d69485c1fb544dd0a168a29a74aca745c4d23ca3a3896ff355d84",
    )
    train = (37_027, "d217ddbd0bd4e228197e73db417e8b104eddec9118fc5fcc58f6b8bb4c2e0a6d")

    def _pairs(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        frame = read_table(path, _PAIRS)
        return frame["userID"].to_numpy(), frame["itemID"].to_numpy()


# Amazon Beauty as BERT4Rec prepared it: 353,962 rows of 40,226 users and 54,542 items, each user's
# in the order of time (Sun et al., CIKM 2019).
#
# The file has no times and no ratings: a row is `user item`, and the position of a row is its time
# here. It orders the rows of a user and says nothing of the time between them, nor of different
# users.

_BEAUTY_PAIRS = TableLayout({"user": np.int64, "item": np.int64}, separator=" ")


class Beauty(Reader):
    """Reads `beauty.txt`. Import only: no direct download."""

    name = "beauty"
    title = "Amazon Beauty (BERT4Rec): 353,962 rows in order, 40,226 users, 54,542 items"
    paper = "J. McAuley et al., SIGIR 2015; F. Sun et al., BERT4Rec, CIKM 2019"
    source = DatasetSource(
        page="https://github.com/FeiSun/BERT4Rec",
        licence="research use",
        files=("beauty.txt",),
        rows=353_962,
        fingerprint="aa68e59cd682fc6c53a5c15e610f861b3857bd50de786bff1554b4359b041a76",
    )

    features = FeatureNames()

    def read(self) -> Interactions:
        rows, _ = self.rows(_BEAUTY_PAIRS, ("users", "items"))
        return replace(rows, times=np.arange(len(rows)))
