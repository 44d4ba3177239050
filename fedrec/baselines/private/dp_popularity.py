# SPDX-License-Identifier: Apache-2.0
"""Popularity under user-level differential privacy: the baseline for private systems.

There is one release: the indicator vector of liked items of every training user is clipped, and the
sum gets noise once. The noise is calibrated by the same plan and accountant as in a federated run,
for one round with all users. Counts are non-negative, so under replace-one Gaussian noise is
calibrated to a sensitivity of sqrt(2) S (`fedrec.privacy.adjacency`).
"""

from typing import Any

import numpy as np
import torch
from pydantic import Field

from fedrec.baselines.base import Histories
from fedrec.baselines.private._clipped_sums import clipped_row_sum
from fedrec.baselines.private._private import PrivateBaseline, PrivateConfig, ReleaseKind
from fedrec.privacy.config import PrivacyConfig
from fedrec.privacy.plan import Plan


class DpPopularityConfig(PrivateConfig):
    """Settings of private popularity."""

    clip_norm: float = Field(default=8.0, ge=1e-9)
    """Bound on the norm of a user's counts (L2; L1 for Laplace): sqrt(n), or n, for n liked
    items."""
    mechanism: str | dict[str, Any] = "gaussian"
    """The noise, as in `privacy.mechanism`."""

    def privacy(self, clip_norm: float) -> PrivacyConfig:
        """The same as an experiment's `[privacy]` table, for one clip norm."""
        return super().privacy(clip_norm).model_copy(update={"mechanism": self.mechanism})


class DpPopularity(PrivateBaseline):
    """Scores an item by its noisy number of likers."""

    name = "dp-popularity"
    Config = DpPopularityConfig
    config: DpPopularityConfig

    def parts(self) -> tuple[ReleaseKind, ...]:
        """The counts."""
        return (ReleaseKind("counts", self.config.clip_norm, contributions="non-negative"),)

    def plan(self, users: int) -> Plan:
        """Clip, noise and cost of the release for so many training users."""
        return self.plans(users)["counts"]

    def fit(self, histories: Histories) -> None:
        """Sum the clipped indicator vectors and add noise."""
        releases = self.releases(histories.num_users)
        counts = clipped_row_sum(histories.csr(np.float64), releases.plans["counts"].clip)
        self._counts = torch.from_numpy(releases.release("counts", counts))

    def scores(self, histories: Histories) -> torch.Tensor:
        """The same noisy counts for every user, as `float32 [users, items]` (a view; do not write
        to it)."""
        return self._counts.expand(histories.num_users, -1)
