# SPDX-License-Identifier: Apache-2.0
"""BPR-MF (Rendle et al., BPR: Bayesian Personalized Ranking from Implicit Feedback, UAI 2009).

    -ln sigma(p_u . (q_i - q_j)) + lambda / 2 (|p_u|^2 + |q_i|^2 + |q_j|^2)

for each positive i of a user and a fresh item j that the user has not, by stochastic gradient descent, one triple after
the other. The factors and items are drawn in numpy, the triples of an epoch are worked off in native code.

Where this differs from the papers: Rendle et al. draw triples with replacement, here each epoch visits every positive
once in random order. UPC-SDG's experiments use LightGCN's code (Adam, batches of 2,048). A user who was not there when
it was fitted gets the gradient of the objective at p_u = 0: the sum of its items' factors minus the mean of all.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from pydantic import Field

from fedrec.baselines.base import Baseline, Histories
from fedrec.config import Config
from fedrec.errors import DataError
from fedrec.rng import stream


class BprmfConfig(Config):
    """Settings of BPR-MF; the defaults were chosen on validation rows of Amazon Office."""

    factors: int = Field(default=64, ge=1)
    """Width of p_u and q_i."""
    epochs: int = Field(default=800, ge=1)
    """Passes over the positives."""
    learning_rate: float = Field(default=0.05, gt=0)
    """Step size."""
    regularisation: float = Field(default=0.05, ge=0)
    """Lambda: weight of the squared norms of the three rows of a triple."""
    spread: float = Field(default=0.1, gt=0)
    """Standard deviation of the initial factors."""
    seed: int = Field(default=0, ge=0)
    """Of the initial factors, the order and the negatives."""


class Bprmf(Baseline):
    """Matrix factorization by pairwise ranking."""

    Config = BprmfConfig
    paper = "Rendle et al. 2009"
    config: BprmfConfig

    def fit(self, histories: Histories) -> None:
        """Train from fresh factors; a user with the whole catalogue has no negatives and is left out.

        Raises:
            DataError: no user has a positive and a negative item.
        """
        config, random = self.config, stream(self.config.seed, "baseline-bprmf")
        sizes = (histories.num_users, config.factors), (histories.num_items, config.factors)
        self.users, self.items = (random.normal(0, config.spread, size).astype(np.float32) for size in sizes)
        self._fitted = histories
        pairs = np.unique(histories.rows() * histories.num_items + histories.items)
        own_users, own_items = np.divmod(pairs, histories.num_items)
        counts = np.bincount(own_users, minlength=histories.num_users)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        free = (histories.num_items - counts)[own_users]
        trained = np.flatnonzero(free > 0)
        if not len(trained):
            raise DataError("there is nothing to rank", expected="a user with positives and other items", got="none")
        for _ in range(config.epochs):
            order = random.permutation(trained)
            ranks = random.integers(0, free[order])
            steps = (np.float32(config.learning_rate), np.float32(config.regularisation))
            _descend()(self.users, self.items, own_users, own_items, offsets, order, ranks, *steps)

    def scores(self, histories: Histories) -> torch.Tensor:
        """`p_u . q_i`, `float32 [users, items]`."""
        return torch.from_numpy(self._rows(histories) @ self.items.T)

    def _rows(self, histories: Histories) -> np.ndarray:
        """Factors of some users, `float32 [users, factors]`: as fitted, or made from their items."""
        rows = np.zeros((histories.num_users, self.config.factors), dtype=np.float32)
        np.add.at(rows, histories.rows(), self.items[histories.items] - self.items.mean(axis=0))
        places = self._fitted.places(histories)
        rows[places >= 0] = self.users[places[places >= 0]]
        return rows


@functools.cache
def _descend() -> Any:
    """The compiled epoch; compiled when it is first needed."""
    import numba

    return numba.njit(nogil=True, fastmath=True, cache=True)(_epoch)


def _epoch(users, items, own_users, own_items, offsets, order, ranks, rate, penalty) -> None:
    """One step for each triple.

    Args:
        users: `float32 [users, factors]`, changed in place.
        items: `float32 [items, factors]`, changed in place.
        own_users: `int64 [positives]`, ascending.
        own_items: `int64 [positives]`, ascending within a user.
        offsets: `int64 [users + 1]` of a user's positives.
        order: `int64 [triples]`, places of the positives.
        ranks: `int64 [triples]`: which of the items that the user has not is the negative, from 0.
        rate: step size.
        penalty: lambda.
    """
    width = users.shape[1]
    for n in range(len(order)):
        u, i, j = own_users[order[n]], own_items[order[n]], ranks[n]
        low, high = offsets[u], offsets[u + 1]
        while low < high:  # how many of the user's items come before the negative
            middle = (low + high) // 2
            if own_items[middle] - (middle - offsets[u]) <= j:
                low = middle + 1
            else:
                high = middle
        j += low - offsets[u]
        difference = np.float32(0)
        for d in range(width):
            difference += users[u, d] * (items[i, d] - items[j, d])
        slope = rate / (np.float32(1) + np.exp(difference))
        shrink = np.float32(1) - rate * penalty
        for d in range(width):
            own, liked, other = users[u, d], items[i, d], items[j, d]
            users[u, d] = shrink * own + slope * (liked - other)
            items[i, d] = shrink * liked + slope * own
            items[j, d] = shrink * other - slope * own
