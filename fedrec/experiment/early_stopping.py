# SPDX-License-Identifier: Apache-2.0
"""The `[early-stopping]` table of an experiment: end training when a metric of validation users no
longer improves, and keep the best parameters (Prechelt 1998).

The metric is always one of validation users, independently of `evaluation.held-out`, because
parameters selected on test users could not be evaluated on them.
"""

from __future__ import annotations

from pydantic import Field

from fedrec.config import Config


class EarlyStoppingConfig(Config):
    """Settings of early stopping."""

    metric: str | None = None
    """Metric of held-out rows, such as `ndcg@10`; default: `hits@10`, or the first hit rate of
    `evaluation.ks`; `rmse` for ratings."""
    patience: int = Field(default=10, ge=1)
    """Number of evaluations without improvement after which training ends, counted in the
    strategy's last phase."""
    min_improvement: float = Field(default=0.0, ge=0)
    """Smallest improvement over the best evaluation so far, in units of the metric; 0: any
    improvement counts."""
    every: int = Field(default=1, ge=1)
    """Number of rounds between evaluations."""
    users: int = Field(default=1000, ge=1)
    """Number of validation users to evaluate (a fixed sample)."""
