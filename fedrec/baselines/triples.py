# SPDX-License-Identifier: Apache-2.0
"""Triples for pairwise losses: a user, an item that the user likes, and an item that the user does
not like."""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from fedrec.baselines._native import native
from fedrec.baselines.base import Sparse
from fedrec.errors import DataError


class Triples:
    """Draws triples.

    Args:
        liked: binary `[users, items]`, columns ascending within a row. Users without a liked item,
            or without any other, are never drawn.
        draw: unit of uniform draws: users, followed by one of the user's items, or liked pairs.
        random: source of randomness.

    Raises:
        DataError: no user has both a liked item and another.
    """

    def __init__(
        self, liked: Sparse, draw: Literal["users", "pairs"], random: np.random.Generator
    ) -> None:
        counts = np.diff(liked.indptr)
        self._liked = liked
        self._counts = counts
        self._draw = draw
        self._random = random
        self._owner = np.repeat(np.arange(len(counts)), counts)
        self._free = liked.shape[1] - counts
        self._users = np.flatnonzero((counts > 0) & (self._free > 0))
        self._pairs = np.flatnonzero(self._free[self._owner] > 0)
        if not len(self._users):
            raise DataError(
                "there is nothing to rank",
                expected="a user with liked and other items",
                got="none",
                fix="lower positive-above, or choose another split or dataset",
            )

    @property
    def per_epoch(self) -> int:
        """Number of triples in an epoch."""
        return len(self._pairs)

    def epoch(self, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """The triples of an epoch in batches, as many as there are liked pairs: users, liked items
        and others, `int64 [batch]` each."""
        random = self._random
        total = len(self._pairs)
        if self._draw == "users":
            users = random.choice(self._users, total)
            places = self._liked.indptr[users] + random.integers(0, self._counts[users])
        else:
            places = random.permutation(self._pairs)
            users = self._owner[places]
        good = self._liked.indices[places].astype(np.int64)
        others = self.others(users)
        for start in range(0, total, batch_size):
            batch = slice(start, start + batch_size)
            yield users[batch], good[batch], others[batch]

    def hold_out(self, share: float, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Users and liked items, `int64 [pairs]` each, of a random share of the pairs, which later
        epochs leave out (with `draw = "pairs"`); they are still no negatives."""
        out = random.random(len(self._pairs)) < share
        places = self._pairs[out]
        self._pairs = self._pairs[~out]
        return self._owner[places], self._liked.indices[places].astype(np.int64)

    def others(self, users: np.ndarray) -> np.ndarray:
        """An item that each user does not like, drawn uniformly, `int64 [users]`."""
        rank = self._random.integers(0, self._free[users])
        return _ranked_others(self._liked.indptr, self._liked.indices, users, rank)


@native()
def _ranked_others(offsets, liked, users, ranks) -> np.ndarray:
    """The item of a rank among those that a user does not like.

    Args:
        offsets: `int [all users + 1]`, where each user's liked items begin.
        liked: `int [pairs]`, ascending within a user.
        users: `int64 [n]`.
        ranks: `int64 [n]`, from 0 up to less than the number of other items.

    Returns:
        `int64 [n]`.
    """
    found = np.empty(len(users), dtype=np.int64)
    for n in range(len(users)):
        start = offsets[users[n]]
        low = offsets[users[n]]
        high = offsets[users[n] + 1]
        # The number of liked items before the rank-th other item is the number of liked items with
        # at most `rank` others before them.
        while low < high:
            middle = (low + high) // 2
            if liked[middle] - (middle - start) <= ranks[n]:
                low = middle + 1
            else:
                high = middle
        found[n] = ranks[n] + low - start
    return found
