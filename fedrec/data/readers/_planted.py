# SPDX-License-Identifier: Apache-2.0
"""Ground truth of the synthetic dataset: factors, features that explain a part of them, and
popularity."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedrec.data.features import Feature

_GENDERS = ("F", "M")
_AGES = ("Under 18", "18-24", "25-34", "35-44", "45-49", "50-55", "56+")
_OCCUPATIONS = tuple(f"occupation {number}" for number in range(1, 11))
_GENRES = tuple(f"genre {number}" for number in range(1, 13))
_MOST_GENRES = 3
_GENRE_SHARE = 0.5  # of the variance of the items' factors
_AT_ONCE = 2**14  # rows of factors at once, which stay in the cache


@dataclass(frozen=True)
class PopularityLaw:
    """A power law with a flat head, over the ranks of `items` items.

    Attributes:
        items: size of the catalogue.
        exponent: of the power law, > 0 and not 1.
        head: share of the catalogue before it begins, in [0, 1].
    """

    items: int
    exponent: float
    head: float

    def cumulative(self, rank: np.ndarray) -> np.ndarray:
        """`float [n]`: chance of the `rank` most popular items, `[n]`."""
        (start, power, low, high) = self._terms
        return ((rank + start) ** power - low) / (high - low)

    def rank_at(self, chance: np.ndarray) -> np.ndarray:
        """Inverse of `cumulative`: the ranks `int64 [n]`, from 0, at chances `[n]` in [0, 1)."""
        (start, power, low, high) = self._terms
        # x ** y as exp(y log x), which numpy computes faster
        rank = chance * (high - low)
        rank += low
        np.log(rank, out=rank)
        rank *= 1 / power
        np.exp(rank, out=rank)
        rank -= start
        return np.clip(rank, 0, self.items - 1, out=rank).astype(np.int64)

    @property
    def _terms(self) -> tuple[float, float, float, float]:
        start = max(1.0, self.head * self.items)
        power = 1 - self.exponent
        return start, power, start**power, (self.items + start) ** power


@dataclass(frozen=True, eq=False)
class Truth:
    """Parameters that the data were generated from.

    Attributes:
        user_factors: `float32 [users, rank]`.
        item_factors: `float32 [items, rank]`.
        ranked_items: `int32 [items]`, items from the most to the least popular.
        log_popularity: `float32 [items]`, logarithm of the probability that a popular candidate is
            this item.
        user_features: gender, age and occupation, which explain a share of the users' factors.
        genres: one to three per item, which explain a share of the items' factors.
        law: the popularity of `ranked_items`.
        selectivity: how strongly users prefer items with a high affinity; with 0 only popularity
            matters.
    """

    user_factors: np.ndarray
    item_factors: np.ndarray
    ranked_items: np.ndarray
    log_popularity: np.ndarray
    user_features: tuple[Feature, ...]
    genres: Feature
    law: PopularityLaw
    selectivity: float

    def affinity(
        self, users: np.ndarray, items: np.ndarray, counts: np.ndarray | int = 1
    ) -> np.ndarray:
        """How well items suit users: `float32 [items]`, mean near 0, standard deviation near 1.

        Args:
            users: `int64 [users]`.
            items: `int64 [items]`, by user.
            counts: items of each user, `int64 [users]`, or the same number of all.
        """
        own = np.repeat(self.user_factors[users], counts, axis=0)
        theirs = np.take(self.item_factors, items, axis=0, mode="clip")
        return np.einsum("nr,nr->n", own, theirs)

    def scores(self, users: np.ndarray) -> np.ndarray:
        """Scores of an oracle that knows the truth, `float32 [users, items]`: affinity and
        popularity.

        They are nearly the best possible for users with a small part of the catalogue; that very
        active users run out of popular items is not modelled.
        """
        affinity = self.user_factors[users] @ self.item_factors.T
        return self.selectivity * affinity + self.log_popularity

    def popular_items(self, chances: np.ndarray) -> np.ndarray:
        """`int32 [n]` items by popularity, in constant time each, from `[n]` uniform draws in
        [0, 1)."""
        return np.take(self.ranked_items, self.law.rank_at(chances), mode="clip")


def plant(
    users: int,
    law: PopularityLaw,
    selectivity: float,
    rank: int,
    demographics: float,
    generator: np.random.Generator,
) -> Truth:
    """Draw a ground truth; see `SyntheticConfig` for the meaning of the arguments."""
    items = law.items
    each = np.arange(users + 1)
    features = tuple(
        _single(name, categories, each, generator)
        for name, categories in (("gender", _GENDERS), ("age", _AGES), ("occupation", _OCCUPATIONS))
    )
    genres = _multiple("genres", _GENRES, items, generator)
    explained = np.zeros((users, rank), dtype=np.float32)
    for feature in features:
        explained += _means(feature, rank, generator)
    log_mass = np.log(np.diff(law.cumulative(np.arange(items + 1)))).astype(np.float32)
    ranked = generator.permutation(items).astype(np.int32)  # less memory to gather from
    log_popularity = np.empty(items, dtype=np.float32)
    log_popularity[ranked] = log_mass
    return Truth(
        user_factors=_mixed(explained / np.sqrt(len(features)), demographics, generator),
        item_factors=_mixed(_means(genres, rank, generator), _GENRE_SHARE, generator),
        ranked_items=ranked,
        log_popularity=log_popularity,
        user_features=features,
        genres=genres,
        law=law,
        selectivity=selectivity,
    )


def _single(
    name: str, categories: tuple[str, ...], offsets: np.ndarray, generator: np.random.Generator
) -> Feature:
    # Unequal shares, so that there are minorities.
    share = generator.dirichlet(np.full(len(categories), 5.0))
    codes = generator.choice(len(categories), len(offsets) - 1, p=share)
    return Feature(name, categories, offsets, codes)


def _multiple(
    name: str, categories: tuple[str, ...], rows: int, generator: np.random.Generator
) -> Feature:
    """One to three distinct categories per row: cyclic steps through the list, each at most a third
    of its length."""
    counts = generator.integers(1, _MOST_GENRES + 1, rows)
    steps = generator.integers(1, len(categories) // _MOST_GENRES, (rows, _MOST_GENRES))
    steps[:, 0] = generator.integers(0, len(categories), rows)
    codes = np.cumsum(steps, axis=1) % len(categories)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return Feature(name, categories, offsets, codes[np.arange(_MOST_GENRES) < counts[:, None]])


def _means(feature: Feature, rank: int, generator: np.random.Generator) -> np.ndarray:
    """`float32 [rows, rank]`: the scaled sum of random vectors, one per category of the row."""
    vectors = generator.standard_normal((len(feature.categories) + 1, rank), dtype=np.float32)
    vectors[-1] = 0.0  # for places without a code
    codes = feature.padded()
    sums = np.empty((len(codes), rank), dtype=np.float32)
    for start in range(0, len(codes), _AT_ONCE):
        part = codes[start : start + _AT_ONCE]
        own = np.take(vectors, part[:, 0], axis=0)
        for column in part.T[1:]:
            own += np.take(vectors, column, axis=0)
        own /= np.sqrt((part >= 0).sum(axis=1, keepdims=True), dtype=np.float32)
        sums[start : start + _AT_ONCE] = own
    return sums


def _mixed(explained: np.ndarray, share: float, generator: np.random.Generator) -> np.ndarray:
    """Factors of which `share` of the variance is explained, in place; their products have standard
    deviation near 1."""
    mixed = generator.standard_normal(explained.shape, dtype=np.float32)
    explained -= explained.mean(axis=0)
    scale = max(float(np.sqrt(np.square(explained).mean())), 1e-6)
    for start in range(0, len(mixed), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        explained[part] /= scale
        own = np.sqrt(share) * explained[part] + np.sqrt(1 - share) * mixed[part]
        mixed[part] = own / explained.shape[1] ** 0.25
    return mixed
