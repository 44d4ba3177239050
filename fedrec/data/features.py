# SPDX-License-Identifier: Apache-2.0
"""Side features of users and of items: categories, single- or multi-valued, words of texts, and
dense vectors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fedrec.errors import DataError
from fedrec.runtime.ragged import spans, within_groups

_WORD = re.compile(r"[^\W_]{2,}")


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
        if not ends or (np.diff(self.offsets) < 0).any():
            fix = f"give non-decreasing offsets from 0 to {len(self.codes)}, the number of codes"
            raise DataError(f"feature {self.name!r} has invalid offsets", fix=fix)
        if len(self.codes) and not 0 <= self.codes.min() <= self.codes.max() < len(self.categories):
            fix = f"give codes in [0, {len(self.categories)})"
            raise DataError(f"feature {self.name!r} has a code outside its categories", fix=fix)

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
        wrong = self.values.ndim != 2 or not shape[1] or self.known.shape != shape[:1]
        if wrong or not np.isfinite(self.values).all():
            raise DataError(
                f"invalid vectors {self.name!r}",
                got=f"an array of shape {list(shape)}" + ("" if wrong else " with NaN or infinity"),
                fix="give finite numbers [rows, width], at least one in a row",
            )

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
        if len(set(names)) != len(names):
            raise DataError(f"duplicate feature names: {', '.join(names)}", fix="rename one")
        for feature in features:
            if feature.rows != self.rows:
                raise DataError(
                    f"feature {feature.name!r} has the wrong number of rows",
                    got=f"{feature.rows} rows",
                    fix=f"give {self.rows} rows, one for each user (or item)",
                )

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
