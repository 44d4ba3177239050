# SPDX-License-Identifier: Apache-2.0
"""A Markov chain over the items of users' sequences (`fedrec.factors.transitions`): what follows
what users had last.

It needs the order of users' items. It has no user parameters, so it also scores users that it was
not fitted to. Sums are kept sparse; a block of users is scored from the rows of their last items.
"""

from __future__ import annotations

import torch
from scipy import sparse

from fedrec.baselines.base import Baseline, Histories, Sparse
from fedrec.data.time_weighting import RecencyConfig, recent_weights
from fedrec.factors.transition_sums import scale, transition_sums
from fedrec.factors.transitions import SmoothingConfig, multipliers


class TransitionsConfig(RecencyConfig, SmoothingConfig):
    """Settings of transitions between items."""


class TransitionsBaseline(Baseline):
    """Sums of the transitions between the items of sequences."""

    name = "transitions"
    Config = TransitionsConfig
    paper = "a smoothed Markov chain; FPMC (Rendle et al. 2010) without factors"
    config: TransitionsConfig

    @property
    def ordered(self) -> bool:
        return True

    def fit(self, histories: Histories) -> None:
        """Sum the transitions of all users, and normalise them."""
        own = histories.in_order()
        found, rows, columns = transition_sums(own.offsets, own.items, own.num_items, self.config)
        scale(found.data, found.indices, found.indptr, *multipliers(rows, columns, self.config))
        self._weights: Sparse = found

    def scores(self, histories: Histories) -> torch.Tensor:
        """Sums of the weights from each user's last items, `float32 [users, items]`."""
        own = histories.in_order()
        recent = recent_weights(own.offsets, own.items, own.num_items, self.config)
        return torch.from_numpy((sparse.csr_array(recent) @ self._weights).toarray())
