# SPDX-License-Identifier: Apache-2.0
"""The `[early-stopping]` table of an experiment: end training when validation users gain no more,
and keep the best parameters (Prechelt 1998).

What is watched is a metric of validation users, whatever `evaluation.held-out` says: parameters
that were picked by test users could not be measured on them any more.
"""

from __future__ import annotations

from pydantic import Field

from fedrec.config import Config


class EarlyStoppingConfig(Config):
    """When training ends before its last round."""

    metric: str | None = None
    """What is watched, a metric of held-out rows such as `ndcg@10`; default: `hits@10`, or the
    first hit rate of `evaluation.ks`; `rmse` for ratings."""
    patience: int = Field(default=10, ge=1)
    """Evaluations without improvement after which training ends. Counted are those of the
    strategy's last phase."""
    min_improvement: float = Field(default=0.0, ge=0)
    """By how much, in units of the metric, an evaluation must be better than the best one so far
    to count as an improvement; at 0 by anything."""
    every: int = Field(default=1, ge=1)
    """Rounds from one such evaluation to the next."""
    users: int = Field(default=1000, ge=1)
    """Number of validation users that are evaluated, the same ones each time."""
