# SPDX-License-Identifier: Apache-2.0
"""Synthetic interactions with known ground truth.

Synthetic interactions with known truth: planted low-rank preferences, informative demographics,
and long tails.

Users and items have factors; their product is the *affinity*. A share of a user's factors comes
from gender, age and occupation, and a share of an item's from its genres. Each user gets a pool of
candidate items, mostly popular ones, and draws from it with weights proportional to
`exp(selectivity x affinity)`. Ratings 1 to 5 are the affinity plus noise, discretised at fixed
thresholds.

Users are drawn in chunks, each from a stream of its own, and a chunk in blocks whose candidates
stay in the processor's cache. No array of size users x items exists: for a million users and a
million items, memory is needed for the interactions only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from fedrec.data.interactions import Feature, FeatureNames, FeatureTable, Interactions
from fedrec.data.reader import Reader, ReaderConfig
from fedrec.rng import stream
from fedrec.runtime.ragged import spans, within_groups

# Ground truth of the synthetic dataset: factors, features that explain a part of them, and
# popularity.

_GENDERS = ("F", "M")
_AGES = ("Under 18", "18-24", "25-34", "35-44", "45-49", "50-55", "56+")
_OCCUPATIONS = tuple(f"occupation {number}" for number in range(1, 11))
_GENRES = tuple(f"genre {number}" for number in range(1, 13))
_MOST_GENRES = 3
_DEMOGRAPHICS = 0.3  # share of the variance of the users' factors that features explain
_GENRE_SHARE = 0.5  # likewise, of the items' factors
_RANK = 8  # number of latent factors
_SEED = 0  # independent of the experiment's, so that repeated runs see the same dataset


@dataclass(frozen=True, eq=False)
class Truth:
    """Parameters that the data were generated from.

    Attributes:
        user_factors: `float32 [users, rank]`.
        item_factors: `float32 [items, rank]`.
        ranked_items: `int32 [items]`, items from the most to the least popular.
        user_features: gender, age and occupation, which explain a share of the users' factors.
        genres: one to three per item, which explain a share of the items' factors.
    """

    user_factors: np.ndarray
    item_factors: np.ndarray
    ranked_items: np.ndarray
    user_features: tuple[Feature, ...]
    genres: Feature

    @classmethod
    def of(cls, users: int, items: int) -> Truth:
        """Draw the truth for numbers of users and items."""
        generator = stream(_SEED, "synthetic-truth")
        kinds = (("gender", _GENDERS), ("age", _AGES), ("occupation", _OCCUPATIONS))
        features = tuple(_single(*kind, users, generator) for kind in kinds)
        genres = _multiple("genres", _GENRES, items, generator)
        explained = np.zeros((users, _RANK), dtype=np.float32)
        for feature in features:
            explained += _means(feature, generator)
        ranked = generator.permutation(items).astype(np.int32)  # less memory to gather from
        return cls(
            user_factors=_mixed(explained / np.sqrt(len(features)), _DEMOGRAPHICS, generator),
            item_factors=_mixed(_means(genres, generator), _GENRE_SHARE, generator),
            ranked_items=ranked,
            user_features=features,
            genres=genres,
        )

    def affinity(
        self, users: np.ndarray, items: np.ndarray, counts: np.ndarray | int = 1
    ) -> np.ndarray:
        """Affinity of users for items: `float32 [items]`, mean near 0, standard deviation near 1.

        Args:
            users: `int64 [users]`.
            items: `int64 [items]`, by user.
            counts: items of each user, `int64 [users]`, or the same number of all.
        """
        of_users = np.repeat(self.user_factors[users], counts, axis=0)
        of_items = np.take(self.item_factors, items, axis=0, mode="clip")
        return np.einsum("nr,nr->n", of_users, of_items)


def _ranks_at(chance: np.ndarray, items: int, exponent: float, head: float) -> np.ndarray:
    """Ranks `int64 [n]`, from 0, at uniform chances `[n]` in [0, 1): of a power law with an
    exponent > 0, not 1, that begins after a `head`, a share of the items."""
    start = max(1.0, head * items)
    power = 1 - exponent
    least = start**power
    most = (items + start) ** power
    # x ** y as exp(y log x), which numpy computes faster
    ranks = np.exp(np.log(chance * (most - least) + least) * (1 / power)) - start
    return np.clip(ranks, 0, items - 1).astype(np.int64)


def _single(
    name: str, categories: tuple[str, ...], rows: int, generator: np.random.Generator
) -> Feature:
    # Unequal shares, so that there are minorities.
    share = generator.dirichlet(np.full(len(categories), 5.0))
    codes = generator.choice(len(categories), rows, p=share)
    return Feature(name, categories, np.arange(rows + 1), codes)


def _multiple(
    name: str, categories: tuple[str, ...], rows: int, generator: np.random.Generator
) -> Feature:
    """Draw one to three distinct categories per row: cyclic steps through the list, each at most a
    third of its length."""
    counts = generator.integers(1, _MOST_GENRES + 1, rows)
    steps = generator.integers(1, len(categories) // _MOST_GENRES, (rows, _MOST_GENRES))
    steps[:, 0] = generator.integers(0, len(categories), rows)
    codes = np.cumsum(steps, axis=1) % len(categories)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return Feature(name, categories, offsets, codes[np.arange(_MOST_GENRES) < counts[:, None]])


def _means(feature: Feature, generator: np.random.Generator) -> np.ndarray:
    """Scaled sums of random vectors, one per category of a row, `float32 [rows, rank]`."""
    vectors = generator.standard_normal((len(feature.categories) + 1, _RANK), dtype=np.float32)
    vectors[-1] = 0.0  # for padding
    codes = feature.padded()
    sums = vectors[codes[:, 0]]
    for column in codes.T[1:]:
        sums += vectors[column]
    sums /= np.sqrt((codes >= 0).sum(axis=1, keepdims=True), dtype=np.float32)
    return sums


def _mixed(explained: np.ndarray, share: float, generator: np.random.Generator) -> np.ndarray:
    """Draw factors with `share` of the variance explained; their products have standard deviation
    near 1."""
    random = generator.standard_normal(explained.shape, dtype=np.float32)
    explained = explained - explained.mean(axis=0)
    explained /= max(float(np.sqrt(np.square(explained).mean())), 1e-6)
    mixed = np.sqrt(share) * explained + np.sqrt(1 - share) * random
    return (mixed / explained.shape[1] ** 0.25).astype(np.float32)


_CANDIDATES_AT_ONCE = 2_000_000
_CANDIDATES_IN_CACHE = 100_000  # some MB; other sizes give the same data, slower
_POPULAR_PER_INTERACTION = 5
_CHANCE_PRESENCE = 0.05  # weight of an item drawn uniformly, against 1 for each draw by popularity
_YEAR = 365 * 24 * 3600
_START = 946_684_800  # 2000-01-01
_THRESHOLDS = np.array([-0.9, -0.2, 0.5, 1.3], dtype=np.float32)


class SyntheticConfig(ReaderConfig):
    """Settings of the synthetic dataset; `path` and `verify` are ignored."""

    users: int = Field(600, ge=1)
    """Number of users."""
    items: int = Field(400, ge=2)
    """Number of items."""
    mean_interactions: float = Field(40.0, gt=0)
    """Mean number of interactions of a user; most have fewer, a few have many (at most half of the
    items)."""
    min_interactions: int = Field(8, ge=1)
    """Smallest number of interactions of a user, at most `mean-interactions` and half of the
    items."""
    activity_spread: float = Field(1.0, ge=0)
    """Standard deviation of the logarithm of the interactions above `min-interactions`."""
    popularity_exponent: float = Field(1.1, gt=0)
    """Exponent of the power law of items' popularity, not 1."""
    popularity_head: float = Field(0.02, ge=0, le=1)
    """Share of the catalogue before the power law begins, in [0, 1]."""
    selectivity: float = Field(2.0, ge=0)
    """How strongly users prefer items with a high affinity; with 0 only popularity matters."""
    noise: float = Field(0.3, ge=0)
    """Standard deviation of the noise in ratings; the affinity itself has standard deviation 1."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.min_interactions <= min(self.mean_interactions, self.items / 2):
            raise ValueError("min-interactions of at most mean-interactions and half of the items")
        if self.popularity_exponent == 1:
            raise ValueError("popularity-exponent other than 1, such as 1.001")
        return self


class Synthetic(Reader):
    """Generates the dataset; equal settings give equal data."""

    name = "synthetic"
    Config = SyntheticConfig
    title = "synthetic interactions with known truth, any size (default 600 users, 400 items)"
    paper = "none; generated"
    features = FeatureNames(("gender", "age", "occupation"), ("genres",))
    config: SyntheticConfig

    def read(self) -> Interactions:
        """Generate the dataset; no file is read."""
        truth = Truth.of(self.config.users, self.config.items)
        counts = self._activity()
        rows = int(counts.sum())
        kinds = (np.int64, np.int64, np.float32, np.int64)
        columns = [np.empty(rows, dtype=kind) for kind in kinds]
        end = 0
        for number, part in enumerate(_parts(counts, _CANDIDATES_AT_ONCE)):
            start = end
            end += int(counts[part].sum())
            chunk = self._chunk(truth, counts, number, part)
            for column, values in zip(columns, chunk, strict=True):
                column[start:end] = values
        users, items, ratings, times = columns
        return Interactions(
            name=self.name,
            users=users,
            items=items,
            user_ids=np.arange(1, self.config.users + 1),
            item_ids=np.arange(1, self.config.items + 1),
            user_features=FeatureTable(self.config.users, truth.user_features),
            item_features=FeatureTable(self.config.items, (truth.genres,)),
            ratings=ratings,
            times=times,
        )

    def _activity(self) -> np.ndarray:
        """Draw the number of interactions of each user, `int64 [users]`: log-normal above the
        minimum, at most half of the items."""
        config = self.config
        spread = config.activity_spread
        excess = stream(_SEED, "synthetic-activity").lognormal(
            -(spread**2) / 2, spread, config.users
        ) * (config.mean_interactions - config.min_interactions)
        counts = config.min_interactions + np.round(excess).astype(np.int64)
        return np.minimum(counts, config.items // 2)

    def _chunk(
        self, truth: Truth, counts: np.ndarray, number: int, part: slice
    ) -> tuple[np.ndarray, ...]:
        """Draw the rows of the users in `part`, grouped by user: users, items, ratings, times."""
        config = self.config
        generator = stream(_SEED, "synthetic-chunk", number)
        num_items = config.items
        users = np.arange(part.start, part.stop)
        counts = counts[part]
        ends = _POPULAR_PER_INTERACTION * np.concatenate([[0], np.cumsum(counts)])
        chances = generator.random(ends[-1])
        # a user's items by chance alone: from a start in steps around the catalogue, which are
        # coprime to its size, so that the items are distinct
        starts = generator.integers(0, num_items, len(counts))
        steps = generator.integers(1, num_items, len(counts))
        steps[np.gcd(steps, num_items) != 1] = 1
        chosen = []
        for block in _parts(counts, _CANDIDATES_IN_CACHE):
            drawn = chances[ends[block.start] : ends[block.stop]]
            law = (config.popularity_exponent, config.popularity_head)
            ranks = _ranks_at(drawn, num_items, *law)
            popular = np.take(truth.ranked_items, ranks, mode="clip")
            chance = within_groups(counts[block]) * np.repeat(steps[block], counts[block])
            chance += np.repeat(starts[block], counts[block])
            sizes, items, presence = _candidates(
                counts[block], popular, chance % num_items, num_items
            )
            affinity = truth.affinity(users[block], items, sizes)
            weight = np.exp(config.selectivity * affinity) * presence
            rows = _fittest(sizes, weight, counts[block], generator)
            chosen.append((items[rows], affinity[rows]))
        items, liking = map(np.concatenate, zip(*chosen, strict=True))
        liking += np.float32(config.noise) * generator.standard_normal(len(items), dtype=np.float32)
        ratings = np.ones(len(items), dtype=np.float32)
        for threshold in _THRESHOLDS:
            ratings += liking > threshold
        # Each user is active for a year from a random day; the order within it is independent of
        # preferences.
        days = generator.integers(_START, _START + _YEAR, len(users))
        times = np.repeat(days, counts) + generator.integers(0, _YEAR, len(items))
        return np.repeat(users, counts), items, ratings, times


def _parts(counts: np.ndarray, most: int) -> Iterator[slice]:
    """Split consecutive users into parts of at most `most` candidates, or a single user with more;
    a function of the settings only."""
    load = np.cumsum(counts * (_POPULAR_PER_INTERACTION + 1))
    ends = np.searchsorted(load, np.arange(most, load[-1], most), side="right")
    bounds = np.unique(np.concatenate([[0], ends, [len(counts)]]))
    return (slice(int(start), int(stop)) for start, stop in pairwise(bounds))


def _candidates(
    counts: np.ndarray, popular_items: np.ndarray, chance_items: np.ndarray, num_items: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Collect distinct candidates of a block of users: several popular items per interaction, and a
    uniformly drawn item per interaction, which ensures enough distinct ones.

    Args:
        counts: `int64 [users]`, interactions of each.
        popular_items: `int [5 x interactions]`, by user.
        chance_items: `int [interactions]`, by user and distinct for each.
        num_items: size of the catalogue.

    Returns:
        Number of candidates of each user, `int64 [users]`, and by user their items
        `int64 [candidates]` and weights `float32 [candidates]`.
    """
    # User, item and origin in one number, so that one sort groups equal pairs.
    bits = (2 * num_items).bit_length()
    narrow = len(counts).bit_length() + bits <= 32
    users = np.arange(len(counts) + 1, dtype=np.uint32 if narrow else np.int64) << bits
    codes = np.concatenate([2 * popular_items + 1, 2 * chance_items]).astype(users.dtype)
    codes |= np.repeat(np.tile(users[:-1], 2), np.append(_POPULAR_PER_INTERACTION * counts, counts))
    codes.sort()
    pairs = codes >> 1
    starts = np.flatnonzero(np.append(True, pairs[1:] != pairs[:-1]))
    first = codes[starts]
    # Of equal pairs, the uniformly drawn one comes first.
    presence = np.array([_CHANCE_PRESENCE, 1], dtype=np.float32)[first & 1]
    presence += np.diff(starts, append=len(codes)) - 1
    items = ((first & ((1 << bits) - 1)) >> 1).astype(np.int64)
    return np.diff(np.searchsorted(first, users)), items, presence


def _fittest(
    number: np.ndarray, weight: np.ndarray, counts: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Draw `counts` candidates per user by weight, without replacement, and return their rows.

    Each candidate gets an exponential random number divided by its weight, and the smallest numbers
    are taken (Efraimidis and Spirakis, 2006).

    Args:
        number: `int64 [users]`, candidates of each.
        weight: `float32 [candidates]`, by user.
        counts: `int64 [users]`, at most `number`.
        generator: of the random numbers.
    """
    arrival = generator.standard_exponential(len(weight), dtype=np.float32)
    arrival /= weight
    # User, number and row in one key. The bits of positive floats are ordered as the floats are.
    bits = len(weight).bit_length()
    keys = arrival.view(np.uint32).astype(np.uint64)
    keys <<= np.uint64(bits)
    keys |= np.repeat(np.arange(len(number), dtype=np.uint64) << np.uint64(32 + bits), number)
    keys |= np.arange(len(weight), dtype=np.uint64)
    keys.sort()
    first = spans(np.cumsum(number) - number, counts)
    return (keys[first] & np.uint64((1 << bits) - 1)).astype(np.int64)
