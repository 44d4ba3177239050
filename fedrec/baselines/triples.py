# SPDX-License-Identifier: Apache-2.0
"""A user, an item that the user likes, and another that the user does not: what pairwise losses are
trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from fedrec.baselines.base import Sparse
from fedrec.errors import DataError


class Triples:
    """Draws triples.

    Args:
        liked: binary `[users, items]`, columns ascending within a row. Users without a liked item,
            or without any other, are never drawn.
        draw: what is drawn uniformly: users, and then one of the user's items, or liked pairs.
        random: where they come from.

    Raises:
        DataError: nobody has both a liked item and another.
    """

    def __init__(
        self, liked: Sparse, draw: Literal["users", "pairs"], random: np.random.Generator
    ) -> None:
        counts = np.diff(liked.indptr)
        self._liked, self._counts, self._draw, self._random = liked, counts, draw, random
        self._owner = np.repeat(np.arange(len(counts)), counts)
        self._free = liked.shape[1] - counts
        self._users = np.flatnonzero((counts > 0) & (self._free > 0))
        self._pairs = np.flatnonzero(self._free[self._owner] > 0)
        # The number of other items before each liked one, and all users' in one ascending row.
        within = np.arange(liked.nnz) - np.repeat(liked.indptr[:-1], counts)
        self._before = self._owner * (liked.shape[1] + 1) + liked.indices - within
        if not len(self._users):
            raise DataError(
                "there is nothing to rank", expected="a user with liked and other items", got="none"
            )

    @property
    def per_epoch(self) -> int:
        """Triples in an epoch."""
        return len(self._pairs)

    def epoch(self, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """As many triples as there are liked pairs, in batches: users, liked items and others,
        `int64 [batch]` each."""
        random, total = self._random, len(self._pairs)
        if self._draw == "users":
            users = random.choice(self._users, total)
            places = self._liked.indptr[users] + random.integers(0, self._counts[users])
        else:
            places = random.permutation(self._pairs)
            users = self._owner[places]
        good, others = self._liked.indices[places].astype(np.int64), self.others(users)
        for start in range(0, total, batch_size):
            batch = slice(start, start + batch_size)
            yield users[batch], good[batch], others[batch]

    def others(self, users: np.ndarray) -> np.ndarray:
        """An item that each user does not like, drawn uniformly, `int64 [users]`."""
        rank = self._random.integers(0, self._free[users])
        # As many liked items lie before the rank-th other one as have no more than `rank` others
        # before them.
        skipped = np.searchsorted(
            self._before, users * (self._liked.shape[1] + 1) + rank, side="right"
        )
        return rank + skipped - self._liked.indptr[users]
