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
_AT_ONCE = 2**16  # rows of factors gathered at once; more only takes memory


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
        rank = (chance * (high - low) + low) ** (1 / power) - start
        return np.clip(rank, 0, self.items - 1).astype(np.int64)

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
        ranked_items: `int64 [items]`, items from the most to the least popular.
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

    def affinity(self, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """How well each item suits each user: `float32`, mean near 0, standard deviation near 1.

        Args:
            users: `int64 [n]`.
            items: `int64 [n]`, pairwise with `users`.
        """
        found = np.empty(len(users), dtype=np.float32)
        size = min(len(users), _AT_ONCE)
        # numpy writes rows into an array that is there in half the time of a new one
        own = np.empty((size, self.user_factors.shape[1]), np.float32)
        theirs = np.empty_like(own)
        for start in range(0, len(users), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            count = len(users[part])
            np.take(self.user_factors, users[part], 0, own[:count], "clip")
            np.take(self.item_factors, items[part], 0, theirs[:count], "clip")
            found[part] = np.einsum("nr,nr->n", own[:count], theirs[:count])
        return found

    def scores(self, users: np.ndarray) -> np.ndarray:
        """Scores of an oracle that knows the truth, `float32 [users, items]`: affinity and
        popularity.

        They are nearly the best possible for users with a small part of the catalogue; that very
        active users run out of popular items is not modelled.
        """
        affinity = self.user_factors[users] @ self.item_factors.T
        return self.selectivity * affinity + self.log_popularity

    def popular_items(self, count: int, generator: np.random.Generator) -> np.ndarray:
        """`int64 [count]` items, each drawn with its popularity, in constant time per draw."""
        return self.ranked_items[self.law.rank_at(generator.random(count))]


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
    features = tuple(
        _single(name, categories, users, generator)
        for name, categories in (("gender", _GENDERS), ("age", _AGES), ("occupation", _OCCUPATIONS))
    )
    genres = _multiple("genres", _GENRES, items, generator)
    explained = sum(_means(feature, rank, generator) for feature in features) / np.sqrt(
        len(features)
    )
    log_mass = np.log(np.diff(law.cumulative(np.arange(items + 1)))).astype(np.float32)
    ranked = generator.permutation(items)
    log_popularity = np.empty(items, dtype=np.float32)
    log_popularity[ranked] = log_mass
    return Truth(
        user_factors=_mixed(explained, demographics, generator),
        item_factors=_mixed(_means(genres, rank, generator), _GENRE_SHARE, generator),
        ranked_items=ranked,
        log_popularity=log_popularity,
        user_features=features,
        genres=genres,
        law=law,
        selectivity=selectivity,
    )


def _single(
    name: str, categories: tuple[str, ...], rows: int, generator: np.random.Generator
) -> Feature:
    # Unequal shares, so that there are minorities.
    share = generator.dirichlet(np.full(len(categories), 5.0))
    return Feature(
        name, categories, np.arange(rows + 1), generator.choice(len(categories), rows, p=share)
    )


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
    sums = np.concatenate(
        [
            vectors[part].sum(axis=1)
            for part in np.split(codes, range(_AT_ONCE, len(codes), _AT_ONCE))
        ]
    )
    return sums / np.sqrt((codes >= 0).sum(axis=1, keepdims=True), dtype=np.float32)


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
