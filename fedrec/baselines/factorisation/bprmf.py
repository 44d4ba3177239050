# SPDX-License-Identifier: Apache-2.0
"""BPR-MF (Rendle et al., BPR: Bayesian Personalized Ranking from Implicit Feedback, UAI 2009).

    -ln sigma(p_u . (q_i - q_j)) + lambda / 2 (|p_u|^2 + |q_i|^2 + |q_j|^2)

for each positive i of a user and a fresh item j that the user has not, by stochastic gradient
descent, one triple after the other. Factors and items are drawn in numpy, and the triples of an
epoch are processed in native code.

Where this differs from the papers: Rendle et al. draw triples with replacement, here each epoch
visits every positive once in random order. UPC-SDG's experiments use LightGCN's code (Adam, batches
of 2,048). A user who is folded in gets the gradient of the objective at p_u = 0: the sum of its
items' factors, each minus the mean of all.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from fedrec.baselines._native import native
from fedrec.baselines.base import Histories
from fedrec.baselines.triples import Triples
from fedrec.baselines.user_rows import UserRowsBaseline, UserRowsConfig
from fedrec.config import Width
from fedrec.errors import DataError
from fedrec.rng import stream


class BprmfConfig(UserRowsConfig):
    """Settings of BPR-MF; the defaults were chosen on validation rows of Amazon Office."""

    factors: Width = 64
    """Number of factors (width of p_u and q_i)."""
    epochs: int = Field(default=800, ge=1)
    """Epochs over the positives."""
    learning_rate: float = Field(default=0.05, gt=0)
    """Learning rate."""
    regularisation: float = Field(default=0.05, ge=0)
    """Lambda: weight of the squared norms of the three rows of a triple."""
    negatives: Literal["uniform", "popular"] = "uniform"
    """Sampling of j: uniformly from the items that the user does not have, or in proportion to
    popularity, skipping its own items."""
    biases: bool = False
    """Whether items have biases, which are added to p_u . q_i and trained and penalised like
    factors."""
    spread: float = Field(default=0.1, gt=0)
    """Standard deviation of the initial factors."""


class Bprmf(UserRowsBaseline):
    """Matrix factorization by pairwise ranking.

    Attributes:
        items: `float32 [items, factors]`.
        biases: `float32 [items]`; zero without them.
    """

    name = "bprmf"
    Config = BprmfConfig
    paper = "Rendle et al. 2009"
    config: BprmfConfig

    def fit(self, histories: Histories) -> None:
        """Train from fresh factors; a user with the whole catalogue has no negatives and is left
        out.

        Raises:
            DataError: no user has a positive and a negative item.
        """
        for _ in self.training(histories):
            pass

    def training(self, histories: Histories) -> Iterator[int]:
        """`fit`, one epoch at a time, so that the model can be evaluated during training.

        Args:
            histories: positives of the users.

        Yields:
            The number of completed epochs; the factors are those after them.

        Raises:
            DataError: no user has a positive and a negative item.
        """
        config = self.config
        random = stream(self.config.seed, "baseline-bprmf")
        sizes = (histories.num_users, config.factors), (histories.num_items, config.factors)
        self.own, self.items = (
            random.normal(0, config.spread, size).astype(np.float32) for size in sizes
        )
        self.fitted = histories
        self.biases = np.zeros(histories.num_items, dtype=np.float32)
        liked = histories.distinct()
        own_users = liked.rows()
        own_items = liked.items
        offsets = liked.offsets
        counts = np.diff(offsets)
        trained = np.flatnonzero((histories.num_items - counts)[own_users] > 0)
        if not len(trained):
            raise DataError(
                "there is nothing to rank",
                expected="a user with positives and other items",
                got="none",
                fix="lower positive-above, or choose another split or dataset",
            )
        triples = Triples(liked.csr(), "pairs", random)
        keys = own_users * histories.num_items + own_items
        steps = (np.float32(config.learning_rate), np.float32(config.regularisation))
        for epoch in range(config.epochs):
            order = random.permutation(trained)
            if config.negatives == "uniform":
                others = triples.others(own_users[order])
            else:
                others = own_items[random.integers(0, len(own_items), len(order))]
                pairs = own_users[order] * histories.num_items + others
                new = keys[np.searchsorted(keys, pairs).clip(max=len(keys) - 1)] != pairs
                order = order[new]
                others = others[new]
            _epoch(
                self.own,
                self.items,
                self.biases,
                own_users[order],
                own_items[order],
                others,
                *steps,
                config.biases,
            )
            yield epoch + 1

    def scores(self, histories: Histories) -> torch.Tensor:
        """`p_u . q_i`, and biases, `float32 [users, items]`."""
        return torch.from_numpy(self.rows(histories) @ self.items.T + self.biases)

    def folded_in(self, histories: Histories) -> np.ndarray:
        """`float32 [users, width]`: rows of users that were not in training, each computed from its
        own items only."""
        rows = np.zeros((histories.num_users, self.config.factors), dtype=np.float32)
        np.add.at(rows, histories.rows(), self.items[histories.items] - self.items.mean(axis=0))
        return rows


@native(fastmath=True)
def _epoch(users, items, biases, own_users, own_items, others, rate, penalty, biased) -> None:
    """One step for each triple.

    Args:
        users: `float32 [users, factors]`, changed in place.
        items: `float32 [items, factors]`, changed in place.
        biases: `float32 [items]`, changed in place if `biased`.
        own_users: `int64 [triples]`.
        own_items: `int64 [triples]`, a positive of each.
        others: `int64 [triples]`, an item that each has not.
        rate: step size.
        penalty: lambda.
        biased: whether biases learn.
    """
    width = users.shape[1]
    for n in range(len(others)):
        u = own_users[n]
        i = own_items[n]
        j = others[n]
        difference = biases[i] - biases[j]
        for d in range(width):
            difference += users[u, d] * (items[i, d] - items[j, d])
        slope = rate / (np.float32(1) + np.exp(difference))
        shrink = np.float32(1) - rate * penalty
        for d in range(width):
            own = users[u, d]
            liked = items[i, d]
            other = items[j, d]
            users[u, d] = shrink * own + slope * (liked - other)
            items[i, d] = shrink * liked + slope * own
            items[j, d] = shrink * other - slope * own
        if biased:
            biases[i] = shrink * biases[i] + slope
            biases[j] = shrink * biases[j] - slope
