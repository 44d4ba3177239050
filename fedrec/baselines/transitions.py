# SPDX-License-Identifier: Apache-2.0
"""A Markov chain over the items of users' sequences (`fedrec.factors.transitions`): what follows
what users had last.

It needs the order of users' items. It has no user parameters, so it also scores users that it was
not fitted to. Sums are kept sparse; a block of users is scored from the rows of their last items.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy import sparse

from fedrec.baselines.base import Baseline, Histories
from fedrec.data.time_weighting import RecencyConfig, recent_weights
from fedrec.factors.transitions import SmoothingConfig, multipliers, transitions

_USERS_AT_ONCE = 20_000


class TransitionsConfig(RecencyConfig, SmoothingConfig):
    """Settings of transitions between items."""


class TransitionsBaseline(Baseline):
    """Sums of the transitions between the items of sequences."""

    Config = TransitionsConfig
    paper = "a smoothed Markov chain; FPMC (Rendle et al. 2010) without factors"
    config: TransitionsConfig

    @property
    def ordered(self) -> bool:
        return True

    def fit(self, histories: Histories) -> None:
        """Sum the transitions of all users, and normalise them."""
        config = self.config
        own = histories.in_order()
        size = own.num_items
        total = sparse.csr_array((size, size))
        for start in range(0, own.num_users, _USERS_AT_ONCE):
            part = own.block(start, start + _USERS_AT_ONCE)
            found = transitions(part.offsets, part.items, size, config)
            places = (found.first, found.second)
            total += sparse.coo_array((found.weights, places), shape=(size, size)).tocsr()
        left, right = multipliers(total.sum(1), total.sum(0), config)
        weights = sparse.diags_array(left) @ total @ sparse.diags_array(right)
        self._weights = weights.tocsr()

    def scores(self, histories: Histories) -> torch.Tensor:
        """Sums of the weights from each user's last items, `float32 [users, items]`."""
        own = histories.in_order()
        recent = recent_weights(own.offsets, own.items, own.num_items, self.config)
        scores = (sparse.csr_array(recent.astype(np.float64)) @ self._weights).toarray()
        return torch.from_numpy(scores.astype(np.float32))
