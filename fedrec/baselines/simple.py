# SPDX-License-Identifier: Apache-2.0
"""Simple systems: random order, popularity, own items again, and a Markov chain of items."""

from __future__ import annotations

import zlib

import numpy as np
import torch
from pydantic import Field
from scipy import sparse

from fedrec.baselines.base import Baseline, Histories, Sparse
from fedrec.config import Config
from fedrec.data.interactions import RecencyConfig, recent_weights
from fedrec.rng import stream
from fedrec.sums.products import multipliers, transition_sums

# Items in random order, the weakest baseline.
# Of M items a user with n known ones gets each held-out positive into the first k positions with
# probability k / (M - n).


class RandomConfig(Config):
    """Settings of the random order."""

    seed: int = Field(default=0, ge=0)
    """Seed of the order."""


class Random(Baseline):
    """Uniform random scores, fixed for each user."""

    name = "random"
    Config = RandomConfig
    config: RandomConfig

    def fit(self, histories: Histories) -> None:
        """Do nothing: random scores need no training."""

    def scores(self, histories: Histories) -> torch.Tensor:
        """Scores `float32 [users, items]` in [0, 1), seeded by the user's number, or its items."""
        rows = []
        for user in range(histories.num_users):
            items = histories.items[histories.offsets[user] : histories.offsets[user + 1]]
            users = histories.users
            number = zlib.crc32(items.tobytes()) if users is None else int(users[user])
            random = stream(self.config.seed, "baseline-random", number)
            rows.append(random.random(histories.num_items, np.float32))
        table = np.stack(rows) if rows else np.zeros((0, histories.num_items), np.float32)
        return torch.from_numpy(table)


# A Markov chain over the items of users' sequences (`fedrec.sums.products`): the items that follow
# a user's last ones.
#
# It needs the order of users' items. It has no user parameters, so it also scores users that it was
# not fitted to. Sums are sparse; a block of users is scored from the rows of their last items.


class TransitionsBaseline(Baseline):
    """Markov chain of items: sums of the transitions in users' sequences."""

    name = "transitions"
    Config = RecencyConfig
    paper = "a smoothed Markov chain; FPMC (Rendle et al. 2010) without factors"
    ordered = True
    config: RecencyConfig

    def fit(self, histories: Histories) -> None:
        """Sum and normalise the transitions of all users."""
        ordered = histories.in_order()
        total = transition_sums(ordered.offsets, ordered.items, ordered.num_items, self.config)
        left, right = multipliers(total.sum(1), total.sum(0))
        weights = sparse.diags_array(left) @ total @ sparse.diags_array(right)
        self._weights: Sparse = sparse.csr_array(weights.astype(np.float32))

    def scores(self, histories: Histories) -> torch.Tensor:
        """Sums of transition weights from each user's last items, `float32 [users, items]`."""
        ordered = histories.in_order()
        recent = recent_weights(ordered.offsets, ordered.items, ordered.num_items, self.config)
        return torch.from_numpy((sparse.csr_array(recent) @ self._weights).toarray())


# Popularity: every user gets the items that most training users like. The simplest baseline of
# recommenders.


def item_counts(histories: Histories) -> torch.Tensor:
    """Number of occurrences of each item in the histories, `float32 [items]`, with repeats."""
    return torch.from_numpy(
        np.bincount(histories.items, minlength=histories.num_items).astype(np.float32)
    )


class Popularity(Baseline):
    """Popularity ranking by number of positive interactions."""

    name = "popularity"

    def fit(self, histories: Histories) -> None:
        """Count the positive interactions of the training users."""
        self._counts = item_counts(histories)

    def scores(self, histories: Histories) -> torch.Tensor:
        """Counts, equal for all users, as `float32 [users, items]` (a view; do not write to it)."""
        return self._counts.expand(histories.num_users, -1)


# Repeat: the user's own items first, by count, then the most popular items.
#
# On data where the same pair occurs again and again (Frappe: five rows per pair), a row-level
# evaluation mostly measures whether a system recommends what the user already uses. This baseline
# does nothing else, and should be reported with every such result. On data without repeats it
# equals popularity.


class RepeatBaseline(Baseline):
    """Ranking by the user's own interaction count, ties by popularity."""

    name = "repeat"

    def fit(self, histories: Histories) -> None:
        """Compute popularity, scaled into [0, 1) so that it only breaks ties."""
        counts = item_counts(histories)
        self._popularity = counts / (counts.max() + 1)

    def scores(self, histories: Histories) -> torch.Tensor:
        """User's own count plus scaled popularity, `float32 [users, items]`."""
        shape = histories.num_users, histories.num_items
        cells = histories.rows() * histories.num_items + histories.items
        counts = np.bincount(cells, minlength=shape[0] * shape[1]).astype(np.float32)
        return torch.from_numpy(counts).view(shape) + self._popularity
