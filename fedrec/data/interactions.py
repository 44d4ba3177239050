# SPDX-License-Identifier: Apache-2.0
"""Interactions, the data type of all datasets, with the side features of users and items, their
schema and their weights.

Side features are categories, single- or multi-valued, words of texts, and dense vectors.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
from pydantic import Field

from fedrec.config import Config
from fedrec.errors import DataError, ExperimentError
from fedrec.rng import hashed, mixed
from fedrec.runtime.ragged import are_distinct, spans, within_groups

_WORD = re.compile(r"[^\W_]{2,}")


def _check(right: bool | np.bool_, problem: str) -> None:
    """Check what a reader, or a file of the catalogue, gives.

    Raises:
        DataError: it is not right.
    """
    if not right:
        fix = (
            "correct the reader: use index_rows for ids and indices, finite numbers, one value per"
            " row in each column, and one row of features per user or item"
        )
        raise DataError(problem, fix=fix)


class FeatureNames(NamedTuple):
    """Names of side features, by kind.

    Attributes:
        users: categories of users.
        items: categories of items.
        item_texts: texts of items.
        item_vectors: dense vectors of items.
    """

    users: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    item_texts: tuple[str, ...] = ()
    item_vectors: tuple[str, ...] = ()

    @classmethod
    def of(cls, users: FeatureTable, items: FeatureTable) -> FeatureNames:
        """Names of the features in a table of users and a table of items."""
        texts = tuple(text.name for text in items.texts)
        return cls(users.names, items.names, texts, tuple(v.name for v in items.vectors))

    @property
    def of_items(self) -> tuple[str, ...]:
        """Names of all item features."""
        return (*self.items, *self.item_texts, *self.item_vectors)


@dataclass(frozen=True)
class Feature:
    """One categorical feature of every row (a row is a user or an item).

    Attributes:
        name: such as `"gender"` or `"genres"`.
        categories: label of each category code, `[categories]`.
        offsets: `int64 [rows + 1]`; the codes of row r are `codes[offsets[r]:offsets[r + 1]]`.
        codes: `int64 [total]`, each in `[0, len(categories))`. A row may have none, one or several.
    """

    name: str
    categories: tuple[str, ...]
    offsets: np.ndarray
    codes: np.ndarray

    def __post_init__(self) -> None:
        for array in (self.offsets, self.codes):
            array.setflags(write=False)
        ends = self.offsets[:1].tolist() == [0] and self.offsets[-1] == len(self.codes)
        ascending = ends and (np.diff(self.offsets) >= 0).all()
        _check(ascending, f"feature {self.name!r} has invalid offsets")
        known = (self.codes >= 0) & (self.codes < len(self.categories))
        _check(known.all(), f"feature {self.name!r} has a code outside its categories")

    @classmethod
    def coded(
        cls, name: str, categories: Collection[str], labels: Collection[Collection[str]]
    ) -> Feature:
        """Create a feature with any number of the given categories as the labels of each row."""
        number = {label: code for code, label in enumerate(categories)}
        codes = np.array([number[label] for row in labels for label in row], dtype=np.int64)
        ends = np.cumsum([len(row) for row in labels], dtype=np.int64)
        return cls(name, tuple(categories), np.concatenate([[0], ends]), codes)

    @classmethod
    def single(cls, name: str, labels: Iterable[object]) -> Feature:
        """Create a feature with one label per row; categories are the sorted distinct labels."""
        return cls.multiple(name, [[label] for label in labels])

    @classmethod
    def multiple(cls, name: str, labels: Iterable[Iterable[object]]) -> Feature:
        """Create a feature with any number of labels per row; categories are the sorted distinct
        labels."""
        texts = [list(map(str, row)) for row in labels]
        return cls.coded(name, sorted({label for row in texts for label in row}), texts)

    @classmethod
    def words(cls, name: str, texts: Iterable[str]) -> Feature:
        """Create a feature of the distinct lower-case words of each row's text, of at least two
        letters or digits."""
        return cls.multiple(name, [sorted(set(_WORD.findall(text.lower()))) for text in texts])

    @property
    def rows(self) -> int:
        """Number of users (or items)."""
        return len(self.offsets) - 1

    @cached_property
    def width(self) -> int:
        """Largest number of codes in a row; 1 for a single-valued feature."""
        return int(np.diff(self.offsets).max(initial=0))

    def padded(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Codes as a padded array `int64 [rows, width]`, of some rows `int64 [n]` or of all; -1 is
        padding."""
        starts = self.offsets[:-1] if rows is None else self.offsets[rows]
        counts = (self.offsets[1:] if rows is None else self.offsets[rows + 1]) - starts
        if self.width == 1 and (counts == 1).all():
            return self.codes[starts][:, None]
        table = np.full((len(counts), max(self.width, 1)), -1, dtype=np.int64)
        row = np.repeat(np.arange(len(counts)), counts)
        table[row, within_groups(counts)] = self.codes[spans(starts, counts)]
        return table

    def renumbered(self, rows: np.ndarray) -> Feature:
        """Return the feature with selected rows `int64 [n]`; -1: no codes."""
        counts = np.where(rows >= 0, np.diff(self.offsets)[rows], 0) if self.rows else 0 * rows
        codes = self.codes[spans(self.offsets[rows], counts)]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        return replace(self, offsets=offsets, codes=codes)

    def among(self, declared: Sequence[str], other: str) -> Feature:
        """Return the feature with the declared categories, which do not depend on the rows; all
        remaining values become `other`."""
        categories = (*dict.fromkeys(declared), *(() if other in declared else (other,)))
        number = {name: code for code, name in enumerate(categories)}
        new = np.array([number.get(name, number[other]) for name in self.categories], np.int64)
        return replace(self, categories=categories, codes=new[self.codes])


@dataclass(frozen=True, eq=False)
class Vectors:
    """A dense vector of every row, such as an embedding of a text or an image.

    Attributes:
        name: such as `"cover"`.
        values: `float32 [rows, width]`, finite; zeros where a row has none.
        known: `bool [rows]`, whether a row has a vector.
    """

    name: str
    values: np.ndarray
    known: np.ndarray

    def __post_init__(self) -> None:
        for array in (self.values, self.known):
            array.setflags(write=False)
        shape = self.values.shape
        fits = self.values.ndim == 2 and shape[1] > 0 and self.known.shape == shape[:1]
        _check(fits and np.isfinite(self.values).all(), f"invalid vectors {self.name!r}")

    @property
    def rows(self) -> int:
        """Number of users (or items)."""
        return len(self.values)

    def renumbered(self, rows: np.ndarray) -> Vectors:
        """Return the vectors of selected rows `int64 [n]`; -1: no vector."""
        has = rows >= 0
        has[has] = self.known[rows[has]]
        values = np.zeros((len(rows), self.values.shape[1]), dtype=np.float32)
        values[has] = self.values[rows[has]]
        return Vectors(self.name, values, has)

    def standardised(self) -> np.ndarray:
        """Centred vectors of mean squared length 1, `float32 [rows, width]`; zeros (the mean) for
        rows without a vector."""
        centred = np.zeros(self.values.shape)
        values = self.values[self.known].astype(np.float64)
        if len(values):
            values -= values.mean(0)
            length = max(float(np.square(values).sum(1).mean()) ** 0.5, 1e-12)
            centred[self.known] = values / length
        return centred.astype(np.float32)


@dataclass(frozen=True)
class FeatureTable:
    """All features of the users (or of the items) of a dataset.

    Attributes:
        rows: number of users (or items); needed because there may be no features.
        features: categories; each with the same number of rows, names distinct.
        texts: words of texts, most of them rare, likewise; used only by systems that declare it.
        vectors: dense vectors, likewise.
    """

    rows: int
    features: tuple[Feature, ...] = ()
    texts: tuple[Feature, ...] = ()
    vectors: tuple[Vectors, ...] = ()

    def __post_init__(self) -> None:
        features = (*self.every, *self.vectors)
        names = [feature.name for feature in features]
        _check(len({*names}) == len(names), f"duplicate feature names: {', '.join(names)}")
        for feature in features:
            _check(feature.rows == self.rows, f"feature {feature.name!r} has {feature.rows} rows")

    def renumbered(self, rows: np.ndarray) -> FeatureTable:
        """Return the features of selected rows `int64 [n]`; -1: none."""
        return FeatureTable(
            len(rows),
            tuple(feature.renumbered(rows) for feature in self.features),
            tuple(text.renumbered(rows) for text in self.texts),
            tuple(vectors.renumbered(rows) for vectors in self.vectors),
        )

    def extended(self, rows: np.ndarray) -> FeatureTable:
        """Append copies of selected rows `int64 [n]`; -1: rows without features."""
        return self.renumbered(np.concatenate([np.arange(self.rows), rows]))

    def only(self, names: Collection[str]) -> FeatureTable:
        """Return the features with the given names."""
        return FeatureTable(
            self.rows,
            tuple(feature for feature in self.features if feature.name in names),
            tuple(text for text in self.texts if text.name in names),
            tuple(vectors for vectors in self.vectors if vectors.name in names),
        )

    @property
    def every(self) -> tuple[Feature, ...]:
        """All categorical and text features, in order."""
        return (*self.features, *self.texts)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the categories, in order."""
        return tuple(feature.name for feature in self.features)

    def __getitem__(self, name: str) -> Feature:
        return {feature.name: feature for feature in self.every}[name]


# Categories from the values of a column: lists of labels, numbers, or single labels.
#
# Numbers such as prices, which differ for nearly every item, are grouped into bands between 1, 2
# and 5 times a power of ten. Bands do not depend on the data, so a device with few rows computes
# the same ones.

SEVERAL = "|"
"""Separates several values in one field; ";" is recognised, too."""
_OTHER = ";"
_FEW = 20  # numbers up to which each is a category, such as the years that begin age groups
_BANDS = ((5, 10), (2, 5), (1, 2))


def labelled(name: str, values: Sequence[str | None]) -> tuple[Feature, str]:
    """Convert a column to a feature.

    Args:
        name: of the feature.
        values: value of each user or item, `[rows]`; None: unknown.

    Returns:
        The feature, and how its values were interpreted; empty if each value is a category.
    """
    rows = [[] if value is None else _parts(value) for value in values]
    parts = [part for row in rows for part in row]
    lists = sum(len(row) > 1 for row in rows)
    if not lists and _are_amounts(parts):
        bands = {part: band(part) or part for part in set(parts)}
        feature = Feature.multiple(name, [[bands[part] for part in row] for row in rows])
        return feature, f"{len(bands):,} numbers in {len(feature.categories):,} bands"
    feature = Feature.multiple(name, rows)
    categories = len(feature.categories)
    taken = f"lists of {categories:,} categories" if lists else ""
    if not lists and categories > max(_FEW, len(parts) / 2):
        taken = f"{categories:,} categories of {len(parts):,} values (texts: dataset.item-texts)"
    return feature, taken


def known_labels(value: str, categories: Collection[str]) -> tuple[list[str], list[str]]:
    """Split a value into known categories and unknown labels."""
    known: list[str] = []
    unknown: list[str] = []
    for piece in value.split(SEVERAL):
        for part in [piece] if piece in categories else _parts(piece):
            label = part if part in categories else band(part)
            if label is not None and label in categories:
                known.append(label)
            else:
                unknown.append(part)
    return known, unknown


def band(text: str) -> str | None:
    """Return the band of a number, such as "20 to 50"; None for other texts."""
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    if not number.is_finite():
        return None
    if not number:
        return "0"
    low, high = next(ends for ends in _BANDS if number.as_tuple().digits[0] >= ends[0])
    sign = "-" if number < 0 else ""
    power = Decimal(10) ** number.adjusted()
    return f"{sign}{float(low * power):g} to {sign}{float(high * power):g}"


def _parts(value: str) -> list[str]:
    pieces = value.replace(_OTHER, SEVERAL).split(SEVERAL)
    return list(dict.fromkeys(piece.strip() for piece in pieces if piece.strip()))


def _are_amounts(parts: Sequence[str]) -> bool:
    """True if most values are numbers with too many distinct values for categories: with decimals,
    or more than half distinct."""
    several = {part for part in set(parts) if band(part) is not None}
    if len(several) <= _FEW or 2 * sum(part in several for part in parts) <= len(parts):
        return False
    whole = all(number.lstrip("-").isdecimal() for number in several)
    return not whole or 2 * len(several) > len(parts)


# Rows of users and items, with the features of both.

_COLUMNS = {
    "users": np.int64,
    "items": np.int64,
    "ratings": np.float32,
    "times": np.int64,
    "published_test": bool,
}


@dataclass(frozen=True, eq=False)
class Interactions:
    """Interactions between users and items, validated and immutable.

    Users and items are dense indices `0..users-1` and `0..items-1`; `user_ids` and `item_ids` are
    the names in the source. Rows keep the order of the source. The same pair may occur in several
    rows (repeated use).

    Attributes:
        name: the dataset's name.
        users: `int64 [rows]`, each in `[0, num_users)`.
        items: `int64 [rows]`, each in `[0, num_items)`.
        user_ids: `[num_users]`, the source's names of the users, distinct.
        item_ids: `[num_items]`, the source's names of the items, distinct.
        user_features: side features, one row per user.
        item_features: side features, one row per item.
        ratings: `float32 [rows]`, finite, or None when the source has no ratings.
        times: `int64 [rows]`, numbers that order a user's interactions (seconds since 1970 of the
            built-in datasets, nanoseconds of a user's own table), or None.
        published_test: `bool [rows]`, the rows that the publisher holds out for testing, or None
            where it has no such file.

    Raises:
        DataError: lengths differ, an index is out of range, a rating is not finite, or an id is
            duplicate.
    """

    name: str
    users: np.ndarray
    items: np.ndarray
    user_ids: np.ndarray
    item_ids: np.ndarray
    user_features: FeatureTable
    item_features: FeatureTable
    ratings: np.ndarray | None = None
    times: np.ndarray | None = None
    published_test: np.ndarray | None = None

    def __post_init__(self) -> None:
        for column, kind in _COLUMNS.items():
            values = getattr(self, column)
            if values is None:
                continue
            values = np.ascontiguousarray(values, dtype=kind)
            values.setflags(write=False)
            object.__setattr__(self, column, values)
            _check(
                len(values) == len(self.users), f"{self.name}: {column!r} has {len(values)} rows"
            )
        for what, index, ids, features in (
            ("users", self.users, self.user_ids, self.user_features),
            ("items", self.items, self.item_ids, self.item_features),
        ):
            ids.setflags(write=False)
            inside = index.min(initial=0) >= 0 and index.max(initial=-1) < len(ids)
            _check(inside, f"{self.name}: an index in {what!r} is not in [0, {len(ids)})")
            _check(features.rows == len(ids), f"{self.name}: {features.rows} features of {what}")
            _check(are_distinct(ids), f"{self.name}: duplicate ids of {what}")
        finite = self.ratings is None or np.isfinite(self.ratings).all()
        _check(finite, f"{self.name}: a rating is not finite")

    def __len__(self) -> int:
        return len(self.users)

    @property
    def num_users(self) -> int:
        """Number of users, including those without interactions."""
        return len(self.user_ids)

    @property
    def num_items(self) -> int:
        """Number of items in the catalogue, including those without interactions."""
        return len(self.item_ids)

    @property
    def pairs(self) -> np.ndarray:
        """Number of each row's pair of user and item, `int64 [rows]`."""
        return self.users * self.num_items + self.items

    @cached_property
    def user_order(self) -> np.ndarray:
        """Row numbers grouped by user, `int64 [rows]`: users ascending, each user's rows in the
        source's order."""
        return np.argsort(self.users, kind="stable")

    @cached_property
    def user_offsets(self) -> np.ndarray:
        """Offsets `int64 [num_users + 1]`: user u's rows are
        `user_order[user_offsets[u]:user_offsets[u + 1]]`."""
        counts = np.bincount(self.users, minlength=self.num_users)
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    def rows_of(self, user: int) -> np.ndarray:
        """Row numbers of one user, `int64 [n]`, in the source's order."""
        return self.user_order[self.user_offsets[user] : self.user_offsets[user + 1]]

    def fingerprint(self) -> str:
        """SHA-256 of the set of (user id, item id, rating) rows, independent of row order, times
        and machine."""
        ratings = self.ratings if self.ratings is not None else np.zeros(1, np.float32)
        # adding zero turns -0 into 0
        bits = (ratings + np.float32(0)).view(np.uint32).astype(np.uint64)
        # mixed after each column, so that XOR of columns cannot cancel
        rows = mixed(hashed(self.user_ids.tolist())[self.users])
        rows = mixed(rows ^ hashed(self.item_ids.tolist())[self.items])
        rows = np.sort(mixed(rows ^ bits))
        return hashlib.sha256(rows.astype("<u8", copy=False).tobytes()).hexdigest()

    def with_rows(self, rows: np.ndarray | slice) -> Interactions:
        """Return selected rows (row numbers `int64 [n]`, or a slice), in that order, with the same
        users and items."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        return replace(self, **{n: v[rows] for n, v in columns.items() if v is not None})

    def frame(self) -> pd.DataFrame:
        """Return the rows as a data frame with the source's ids: user, item, and rating and time
        if present."""
        columns = {"user": self.user_ids[self.users], "item": self.item_ids[self.items]}
        if self.ratings is not None:
            columns["rating"] = self.ratings
        if self.times is not None:
            columns["time"] = self.times
        return pd.DataFrame(columns)


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


def more_ids(ids: np.ndarray, count: int, word: str) -> np.ndarray:
    """Append `count` new ids to ids `[n]`: further numbers, or `word-0`, `word-1` and so on."""
    if np.issubdtype(ids.dtype, np.integer):
        return np.concatenate([ids, ids.max(initial=-1) + 1 + np.arange(count)])
    taken = set(map(str, ids.tolist()))
    free = [name for number in range(len(ids) + count) if (name := f"{word}-{number}") not in taken]
    kind = object if ids.dtype == object else np.str_
    return np.concatenate([ids, np.array(free[:count], dtype=kind)])


def no_times(name: str, what: str) -> DataError:
    """Create the error for interactions without times; `what` is the predicate after `name`."""
    return DataError(
        f"{name} {what}",
        expected="a column of times",
        got="interactions without one",
        fix="name the column of times of a table with dataset.time (fedrec run --data: --time), or"
        " set split.order = 'random' and leave out systems that need times",
    )


# Weights of the items of a user by their times.
#
# An item that a user rated several times has one number (Fang et al. 2022, section 3.2):
#
#     R_ki = sum over t = 1..m of r_ki^t * 2 t / (m (m + 1))
#
# with the ratings in the order of their times, so that later ones count more; the weights add up to
# 1. Without ratings every r is 1, and so is R.
#
# For what comes next, the last items of a user's sequence count, the later ones more.


class RecencyConfig(Config):
    """Settings of the weights of a sequence's items by their distance."""

    window: int = Field(default=10, ge=1)
    """Largest distance, in positions, between two items of a transition, and number of last items
    used for a score."""
    decay: float = Field(default=0.8, gt=0, le=1)
    """Factor by which the weight decreases with each further position, in (0, 1]."""


def time_weighted(
    users: np.ndarray, items: np.ndarray, ratings: np.ndarray | None, times: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the time-weighted rating R of every pair of user and item.

    Args:
        users: `int64 [rows]`.
        items: `int64 [rows]`.
        ratings: `float [rows]`; None: 1 each.
        times: `int64 [rows]`; None: the rows are in order. Rows of equal times keep their order.

    Returns:
        Users and items of the pairs, `int64 [pairs]`, ascending, and R, `float32 [pairs]`.
    """
    if not len(users):
        return users, items, np.zeros(0, dtype=np.float32)
    order = np.lexsort((np.arange(len(users)) if times is None else times, items, users))
    pairs = np.stack([users[order], items[order]])
    first = np.concatenate([[True], (pairs[:, 1:] != pairs[:, :-1]).any(0)])
    pair = np.cumsum(first) - 1
    counts = np.bincount(pair)
    rank = within_groups(counts) + 1
    weights = 2 * rank / (counts * (counts + 1))[pair]
    values = np.ones(len(pair)) if ratings is None else ratings[order].astype(np.float64)
    return pairs[0, first], pairs[1, first], np.bincount(pair, weights * values).astype(np.float32)


def recent_weights(
    offsets: np.ndarray, items: np.ndarray, num_items: int, recency: RecencyConfig
) -> np.ndarray:
    """Compute the weight of each item for predicting the next, `float32 [users, items]`:
    decay^(d - 1) for the d-th item from the end of a user's sequence, d up to the window (the later
    position if an item is repeated); 0 for all others.

    Args:
        offsets: `int64 [users + 1]`: user u's items are `items[offsets[u]:offsets[u + 1]]`.
        items: `int64 [n]`, each user's from the earliest to the latest.
        num_items: size of the catalogue.
        recency: window and decay.
    """
    table = np.zeros((len(offsets) - 1, num_items), dtype=np.float32)
    ends = offsets[1:]
    for distance in range(recency.window, 0, -1):
        index = ends - distance
        users = np.flatnonzero(index >= offsets[:-1])
        table[users, items[index[users]]] = recency.decay ** (distance - 1)
    return table


def last_items(offsets: np.ndarray, items: np.ndarray, length: int) -> np.ndarray:
    """Each user's last items, `int64 [users, length]`, from the earliest to the latest, padded with
    -1.

    Args:
        offsets: `int64 [users + 1]`: user u's items are `items[offsets[u]:offsets[u + 1]]`.
        items: `int64 [n]`, each user's from the earliest to the latest.
        length: largest number of items per user.
    """
    table = np.full((len(offsets) - 1, length), -1, dtype=np.int64)
    counts = np.minimum(np.diff(offsets), length)
    table[np.arange(length) < counts[:, None]] = items[spans(offsets[1:] - counts, counts)]
    return table


@dataclass(frozen=True)
class Schema:
    """Public properties of the data that a model is built from.

    Attributes:
        num_items: size of the catalogue.
        item_features: public side features of the items.
        user_features: names of the users' features and their number of categories, in order.
        task: `"ranking"` (labels 0 and 1) or `"rating"` (labels are ratings).
        num_users: number of user ids; for models that know users by id.
        user_words: labels of the categories of each of the users' features, in order.
    """

    num_items: int
    item_features: FeatureTable
    user_features: tuple[tuple[str, int], ...]
    task: Literal["ranking", "rating"]
    num_users: int = 0
    user_words: tuple[tuple[str, ...], ...] = ()

    def described(self, names: Sequence[str] = ()) -> tuple[list[int], list[tuple[str, ...]]]:
        """Positions of the named user features (no names: all), and the labels of the categories
        of each.

        Raises:
            ExperimentError: a feature is unknown, or users have no features.
        """
        known = [name for name, _ in self.user_features]
        unknown = [name for name in names if name not in known]
        if unknown or not known or len(self.user_words) != len(known):
            raise ExperimentError(
                "unknown or missing user features",
                expected=", ".join(names) or "features of the users",
                got=", ".join(known) or "users without features",
                fix="name features of the dataset, or choose a dataset with features of users",
            )
        positions = [known.index(name) for name in names or known]
        return positions, [self.user_words[position] for position in positions]


# The setting of systems that count rated items that are not positive, with a smaller weight than
# positive ones.
#
# A user chose the items that it rated, which tells something about its preferences even where it
# does not like them. Only known rows have a weight: held-out rows that are not positive stay
# unknown, and all items that are not positive are ranked as before.


class LowRatedConfig(Config):
    """Settings of the weights in a user's history."""

    low_rated: float = Field(default=0.0, ge=0, le=1)
    """Weight of rated but non-positive items in a user's history, where positive items have 1; 0
    leaves them out. Without effect if the data have no ratings."""
