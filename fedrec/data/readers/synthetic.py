# SPDX-License-Identifier: Apache-2.0
"""Synthetic interactions with known truth: planted low-rank preferences, informative demographics,
and long tails.

Users and items have factors; their product is the *affinity*. A share of a user's factors comes
from gender, age and occupation, and a share of an item's from its genres. Each user gets a pool of
candidate items, mostly popular ones, and draws from it with weights proportional to
`exp(selectivity x affinity)`. Ratings 1 to 5 are the affinity plus noise, discretised at fixed
thresholds.

Users are processed in chunks, and within a chunk by candidates, so no array of size users x items
exists: for a million users and a million items, memory is needed for the interactions only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from fedrec.data.features import FeatureNames, FeatureTable
from fedrec.data.interactions import Interactions
from fedrec.data.reader import Reader, ReaderConfig
from fedrec.data.readers._planted import PopularityLaw, Truth, plant
from fedrec.rng import stream

_CANDIDATES_AT_ONCE = 2_000_000
_POPULAR_PER_INTERACTION = 5
_CHANCE_PRESENCE = 0.05  # weight of an item drawn uniformly, against 1 for each draw by popularity
_YEAR = 365 * 24 * 3600
_START = 946_684_800  # 2000-01-01
_THRESHOLDS = np.array([-0.9, -0.2, 0.5, 1.3], dtype=np.float32)


class SyntheticConfig(ReaderConfig):
    """Settings of the synthetic dataset; `path` and `verify` have no meaning for it."""

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
    """Standard deviation of the logarithm of the interactions above the fewest."""
    popularity_exponent: float = Field(1.1, gt=0)
    """Exponent of the power law of items' popularity, not 1."""
    popularity_head: float = Field(0.02, ge=0, le=1)
    """Share of the catalogue before the power law begins, in [0, 1]."""
    selectivity: float = Field(2.0, ge=0)
    """How strongly users prefer items with a high affinity; with 0 only popularity matters."""
    rank: int = Field(8, ge=1, le=256)
    """Number of latent factors."""
    noise: float = Field(0.3, ge=0)
    """Standard deviation of the noise in ratings; the affinity itself has standard deviation 1."""
    demographics: float = Field(0.3, ge=0, le=1)
    """Share of the variance of the users' factors that their features explain, in [0, 1]."""
    data_seed: int = Field(0, ge=0)
    """Seed of the data, independent of the experiment's seed, so that repeated runs see the same
    dataset."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.min_interactions <= min(self.mean_interactions, self.items / 2):
            raise ValueError("min-interactions of at most mean-interactions and half of the items")
        if self.popularity_exponent == 1:
            raise ValueError("popularity-exponent other than 1, such as 1.001")
        return self


class Synthetic(Reader):
    """Generates the dataset; equal settings give equal data."""

    Config = SyntheticConfig
    title = "synthetic interactions with known truth, any size (default 600 users, 400 items)"
    paper = "none; generated"
    config: SyntheticConfig

    def read(self) -> Interactions:
        """Generate the dataset; no file is read."""
        truth = self.truth()
        counts = self._activity()
        rows = int(counts.sum())
        kinds = (np.int64, np.int64, np.float32, np.int64)
        columns = [np.empty(rows, dtype=kind) for kind in kinds]
        end = 0
        for number, part in enumerate(_chunks(counts)):
            start = end
            end += int(counts[part].sum())
            for column, own in zip(columns, self._chunk(truth, counts, number, part), strict=True):
                column[start:end] = own
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

    def feature_names(self) -> FeatureNames:
        """Gender, age and occupation, and genres."""
        return FeatureNames(("gender", "age", "occupation"), ("genres",))

    def truth(self) -> Truth:
        """The ground truth of the data."""
        config = self.config
        generator = stream(config.data_seed, "synthetic-truth")
        return plant(
            config.users,
            PopularityLaw(config.items, config.popularity_exponent, config.popularity_head),
            config.selectivity,
            config.rank,
            config.demographics,
            generator,
        )

    def _activity(self) -> np.ndarray:
        """`int64 [users]`: interactions of each user, log-normal above the fewest, at most half of
        the items."""
        config = self.config
        generator = stream(config.data_seed, "synthetic-activity")
        spread = config.activity_spread
        excess = generator.lognormal(-(spread**2) / 2, spread, config.users) * (
            config.mean_interactions - config.min_interactions
        )
        return np.minimum(
            config.min_interactions + np.round(excess).astype(np.int64), config.items // 2
        )

    def _chunk(
        self, truth: Truth, counts: np.ndarray, number: int, part: slice
    ) -> tuple[np.ndarray, ...]:
        """Rows of the users in `part`, grouped by user: users, items, ratings, times."""
        generator = stream(self.config.data_seed, "synthetic-chunk", number)
        counts = counts[part]
        met = _candidates(truth, counts, generator)
        affinity = truth.affinity(met.users + part.start, met.items)
        chosen = _fittest(met, counts, truth.selectivity * affinity, generator)
        users = met.users[chosen]
        items = met.items[chosen]
        affinity = affinity[chosen]
        liking = affinity + np.float32(self.config.noise) * generator.standard_normal(
            len(users), dtype=np.float32
        )
        ratings = (1 + np.searchsorted(_THRESHOLDS, liking)).astype(np.float32)
        # Each user is active for a year from a random day; the order within it is independent of
        # preferences.
        times = generator.integers(_START, _START + _YEAR, len(counts))[users] + generator.integers(
            0, _YEAR, len(users)
        )
        return users + part.start, items, ratings, times


class _Candidates(NamedTuple):
    """Distinct candidates of users: `users` (within the chunk, ascending), `items`, and the weight
    of each."""

    users: np.ndarray
    items: np.ndarray
    presence: np.ndarray


def _chunks(counts: np.ndarray) -> Iterator[slice]:
    """Number of consecutive users whose candidates fit into memory; depends on the settings
    only."""
    load = np.cumsum(counts * (_POPULAR_PER_INTERACTION + 1))
    ends = np.searchsorted(
        load, np.arange(_CANDIDATES_AT_ONCE, load[-1], _CANDIDATES_AT_ONCE), side="right"
    )
    bounds = np.unique(np.concatenate([[0], ends, [len(counts)]]))
    return (slice(int(start), int(stop)) for start, stop in pairwise(bounds))


def _candidates(truth: Truth, counts: np.ndarray, generator: np.random.Generator) -> _Candidates:
    """Several popular items per interaction, and as many uniformly drawn items as interactions,
    which gives enough distinct ones."""
    num_items = len(truth.item_factors)
    local = np.arange(len(counts))
    popular_users = np.repeat(local, counts * _POPULAR_PER_INTERACTION)
    popular = truth.popular_items(len(popular_users), generator)
    chance_users = np.repeat(local, counts)
    chance = _chance_items(counts, num_items, generator)
    # User, item and origin in one number, so that one sort groups equal pairs without a second
    # array; in bits of their own, because division takes longer than the sort.
    bits = num_items.bit_length()
    codes = np.empty(len(popular_users) + len(chance_users), dtype=np.int64)
    drawn = codes[: len(popular_users)], codes[len(popular_users) :]
    for own, of_users, of_items, origin in (
        (drawn[0], popular_users, popular, 1),
        (drawn[1], chance_users, chance, 0),
    ):
        np.left_shift(of_users, bits, out=own)
        own |= of_items
        own <<= 1
        own |= origin
    codes.sort()
    pairs = codes >> 1
    starts = np.flatnonzero(np.concatenate([[True], pairs[1:] != pairs[:-1]]))
    presence = np.where(codes & 1, np.float32(1), np.float32(_CHANCE_PRESENCE))
    first = pairs[starts]
    items = first & ((1 << bits) - 1)
    return _Candidates(first >> bits, items, np.add.reduceat(presence, starts))


def _chance_items(counts: np.ndarray, num_items: int, generator: np.random.Generator) -> np.ndarray:
    """Each user's `counts` distinct items: equal steps around the catalogue, the step coprime to
    its size."""
    start = generator.integers(0, num_items, len(counts))
    step = generator.integers(1, num_items, len(counts))
    step[np.gcd(step, num_items) != 1] = 1
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return (np.repeat(start, counts) + place * np.repeat(step, counts)) % num_items


def _fittest(
    met: _Candidates, counts: np.ndarray, log_weight: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Rows of `met`: `counts` per user, drawn without replacement with weights
    `presence x exp(log_weight)`.

    Each candidate gets an exponential random number divided by its weight, and the smallest numbers
    are taken (Efraimidis and Spirakis, 2006).
    """
    weight = np.exp(log_weight) * met.presence
    arrival = generator.standard_exponential(len(weight), dtype=np.float32) / weight
    # One sort by user, then by the random number mapped into [0, 1).
    order = np.argsort(met.users + (arrival / (1 + arrival)).astype(np.float64) * 0.999)
    found = np.bincount(met.users, minlength=len(counts))
    place = np.arange(len(order)) - np.repeat(np.cumsum(found) - found, found)
    return order[place < np.repeat(counts, found)]
