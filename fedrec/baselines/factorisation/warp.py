# SPDX-License-Identifier: Apache-2.0
"""LightFM with the WARP loss (Kula 2015; Weston, Bengio and Usunier 2011).

    score(u, i) = p_u . q_i + b_i

where p_u, q_i and b_i are sums over the id and the side features of u and of i.

For each liked item of a user, other items are drawn, up to `max-sampled`, until one scores above it
minus 1. If that is the t-th, the item's rank is about floor((items - 1) / t), and the step is along
the gradient of

    ln(max(1, rank)) (score(u, other) - score(u, liked)),    the weight at most 10

by Adagrad, one step after the other in random order. Drawn items that the user likes count as
tried. A user is folded in by the same steps on its own row, which starts from its side features.

Where this differs from LightFM: users have no bias, because it cancels in every ranking; there is
only one thread, because results would not be reproducible with several; there is no L2 penalty,
which LightFM switches off by default.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from pydantic import Field
from scipy import sparse

from fedrec.baselines._native import pointers
from fedrec.baselines.base import Histories, Sparse
from fedrec.baselines.user_rows import UserRowsBaseline, UserRowsConfig, own_seed
from fedrec.config import Width
from fedrec.data.features import FeatureNames, FeatureTable
from fedrec.errors import ExperimentError
from fedrec.rng import stream


class WarpConfig(UserRowsConfig):
    """Settings of LightFM with WARP."""

    factors: Width = 10
    """Number of factors (width of p_u and q_i)."""
    epochs: int = Field(default=30, ge=1)
    """Epochs over the liked pairs."""
    learning_rate: float = Field(default=0.05, gt=0)
    """Learning rate of Adagrad."""
    max_sampled: int = Field(default=10, ge=1)
    """Largest number of items sampled for a liked one; with more, steps are slower and the rank is
    more exact."""
    features: tuple[str, ...] = ()
    """Names of side features of users and items that are added to their ids; none: ids only."""


class Warp(UserRowsBaseline):
    """Factors of ids and side features, trained to rank liked items first."""

    name = "warp"
    Config = WarpConfig
    paper = "Kula 2015; Weston et al. 2011"
    config: WarpConfig

    @classmethod
    def features_used(cls, config: WarpConfig, known: FeatureNames) -> FeatureNames:
        """Those that `features` names."""
        sides = (known.users, known.items)
        return FeatureNames(
            *(tuple(name for name in side if name in config.features) for side in sides)
        )

    def fit(self, histories: Histories) -> None:
        """Train from fresh factors.

        Raises:
            ExperimentError: there is no side feature of a name in `features`.
        """
        config = self.config
        random = stream(self.config.seed, "baseline-warp")
        self.fitted = histories
        liked = histories.csr()
        user_has, item_has = self._described(histories)
        self._item_has = pointers(item_has)
        users, items = (
            ((random.random((part.shape[1], config.factors)) - 0.5) / config.factors).astype(
                np.float32
            )
            for part in (user_has, item_has)
        )
        biases = np.zeros(len(items), np.float32)
        tables = (
            users,
            np.ones_like(users),
            items,
            np.ones_like(items),
            biases,
            np.ones_like(biases),
        )
        state = random.integers(1, 2**63, 1).astype(np.uint64)
        owner = np.repeat(np.arange(histories.num_users), np.diff(liked.indptr))
        for _ in range(config.epochs):
            order = random.permutation(len(owner))
            self._epoch(order, owner, liked, pointers(user_has), tables, True, state)
        self._features = users
        self._item_tables = tables[2:]
        self.own = np.asarray(user_has @ users, dtype=np.float32)
        self._items = np.asarray(item_has @ items, dtype=np.float32)
        self._biases = np.asarray(item_has @ biases, dtype=np.float32)

    def scores(self, histories: Histories) -> torch.Tensor:
        """Scores of the catalogue, `float32 [users, items]`."""
        return torch.from_numpy(self.rows(histories) @ self._items.T + self._biases)

    def folded_in(self, histories: Histories) -> np.ndarray:
        """`float32 [users, width]`: rows of users that were not in training, each computed from its
        own items only."""
        codes = _codes(
            histories.user_features, self._of_users, histories.users, histories.num_users
        )
        start = codes @ self._features[self.fitted.num_users :] if codes.shape[1] else 0.0
        rows = np.zeros((histories.num_users, self.config.factors), np.float32) + start
        alone = np.arange(2), np.zeros(1, np.int64)  # its own row only
        for user in range(histories.num_users):
            block = histories.block(user, user + 1)
            liked = block.csr()
            own = rows[user : user + 1]
            random = stream(own_seed(block.items), "fold-in")
            state = random.integers(1, 2**63, 1).astype(np.uint64)
            pairs = np.concatenate(
                [random.permutation(liked.nnz) for _ in range(self.config.epochs)]
            )
            tables = (own, np.ones_like(own), *self._item_tables)
            self._epoch(pairs, np.zeros(liked.nnz, np.int64), liked, alone, tables, False, state)
        return rows

    def _epoch(
        self,
        order: np.ndarray,
        owner: np.ndarray,
        liked: Sparse,
        user_has: tuple[np.ndarray, np.ndarray],
        tables: tuple[np.ndarray, ...],
        learn_items: bool,
        state: np.ndarray,
    ) -> None:
        """Steps on the liked pairs in an order; the tables change in place."""
        from fedrec.baselines.factorisation.warp_steps import (
            descend,  # imports Numba, which is slow and not needed to read settings
        )

        native: Any = descend  # pyright counts arguments that are unpacked as one each
        matrices = (*pointers(liked), *user_has, *self._item_has)
        config = self.config
        native(
            order,
            owner,
            *matrices,
            *tables,
            learn_items,
            config.learning_rate,
            config.max_sampled,
            state,
        )

    def _described(self, histories: Histories) -> tuple[Sparse, Sparse]:
        """The ids and feature codes that sum to the row of each user, `[users, ids + codes]`, and
        of each item, `[items, ids + codes]`."""
        tables = (
            (None if histories.users is None else histories.user_features),
            histories.item_features,
        )
        names = [() if table is None else table.names for table in tables]
        unknown = sorted(set(self.config.features) - {name for part in names for name in part})
        if unknown:
            raise ExperimentError(
                f"there is no side feature {unknown[0]!r}",
                expected="names of side features of the dataset's users or items",
                got=", ".join(self.config.features),
                fix="known: " + (", ".join(name for part in names for name in part) or "none"),
            )
        self._of_users, of_items = (
            [n for n in self.config.features if n in part] for part in names
        )
        ids = np.arange(histories.num_items)
        number = histories.num_users
        codes = (
            _codes(tables[0], self._of_users, histories.users, number),
            _codes(tables[1], of_items, ids, histories.num_items),
        )
        ids_and_codes = (
            [sparse.eye_array(part.shape[0]).astype(np.float32), part] for part in codes
        )
        users, items = (sparse.csr_array(sparse.hstack(parts)) for parts in ids_and_codes)
        return users, items


def _codes(
    table: FeatureTable | None, names: Sequence[str], rows: np.ndarray | None, number: int
) -> Sparse:
    """Which categories some rows have, binary
    `float32 [rows, categories of all these features]`."""
    parts: list[Sparse] = [sparse.csr_array((number, 0), dtype=np.float32)]
    if table is None or rows is None:
        return parts[0]
    for name in names:
        feature = table[name]
        shape = (feature.rows, len(feature.categories))
        whole: Sparse = sparse.csr_array(
            (np.ones(len(feature.codes), np.float32), feature.codes, feature.offsets), shape
        )
        parts.append(whole[rows])
    return sparse.csr_array(sparse.hstack(parts))
