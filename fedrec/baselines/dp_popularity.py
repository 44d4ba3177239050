# SPDX-License-Identifier: Apache-2.0
"""Popularity under user-level differential privacy: the floor for a system that is private itself.

One release: every training user's indicator vector of liked items is clipped, the sum gets noise once. The noise is
calibrated by the same plan and accountant as that of a federated run, for every user taking part and one round. Counts
have no signs, so under replace-one Gaussian noise is that of a sensitivity of sqrt(2) S (`fedrec.privacy.adjacency`).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from pydantic import Field

from fedrec.baselines.base import Baseline, Histories
from fedrec.config import Config
from fedrec.privacy.accounting import Report
from fedrec.privacy.adjacency import Adjacency
from fedrec.privacy.clipping import Clip
from fedrec.privacy.config import PrivacyConfig
from fedrec.privacy.mechanisms import add_noise, source_of
from fedrec.privacy.plan import Plan
from fedrec.privacy.question import report


class DpPopularityConfig(Config):
    """Settings of private popularity."""

    epsilon: float = Field(default=5.0, gt=0)
    """Of the one release."""
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """Probability with which the guarantee may fail."""
    clip_norm: float = Field(default=8.0, gt=0)
    """Bound on the norm of a user's counts (L2; L1 for Laplace): sqrt(n), or n, for n liked items."""
    mechanism: Literal["gaussian", "laplace"] = "gaussian"
    """Distribution of the noise."""
    adjacency: Adjacency = "replace-one"
    """Neighbours: one user's data exchanged for another's, or there or not."""
    backend: Literal["autodp", "tight-rdp", "pld"] = "pld"
    """Accountant."""
    seed: int = Field(default=0, ge=0)
    """Of the noise."""


class DpPopularity(Baseline):
    """Scores an item by its noisy number of likers."""

    Config = DpPopularityConfig
    config: DpPopularityConfig

    def plan(self, users: int) -> Plan:
        """Clip, noise and cost of the release for so many training users."""
        settings = self.config.model_dump(exclude={"seed"})
        return Plan.of(PrivacyConfig(**settings), "full", {}, users, 1, contributions="non-negative")

    def spent(self, users: int) -> Report:
        """What the release costs, as the accountant has it."""
        return report(self.plan(users))

    def fit(self, histories: Histories) -> None:
        """Count clipped users, and add the noise."""
        plan = self.plan(histories.num_users)
        user, item = np.divmod(np.unique(histories.rows() * histories.num_items + histories.items), histories.num_items)
        likes = np.bincount(user, minlength=histories.num_users).astype(np.float64)
        norms = np.sqrt(likes) if plan.norm_order == 2 else likes
        shares = Clip(plan.clip_norm, plan.norm_order).factors(norms)
        counts = np.bincount(item, weights=shares[user], minlength=histories.num_items)
        source = source_of("reproducible", self.config.seed)
        noisy = add_noise({"counts": counts}, plan.noise_scale, source, 1, mechanism=self.config.mechanism)
        self._counts = torch.from_numpy(noisy["counts"])

    def scores(self, histories: Histories) -> torch.Tensor:
        """The same noisy counts for every user, as `float32 [users, items]` (a view; do not write to it)."""
        return self._counts.expand(histories.num_users, -1)
