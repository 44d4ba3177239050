# SPDX-License-Identifier: Apache-2.0
"""FedAvg (McMahan et al. 2017): the mean of the clients' parameters, weighted by their numbers of examples.

theta <- theta + sum_k n_k (theta_k - theta) / sum_k n_k
"""

from __future__ import annotations

import numpy as np

from fedrec.config import Config
from strategies.base import Aggregate, CohortStrategy


class FedAvgConfig(Config):
    """FedAvg has no settings."""


class FedAvg(CohortStrategy):
    """Averages over examples instead of over clients."""

    Config = FedAvgConfig
    paper = "FedAvg (McMahan et al. 2017), algorithm 1"
    weighting = "examples"

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """See `CohortStrategy.apply`; a cohort without any example changes nothing."""
        if aggregate.weight == 0:
            return theta
        return aggregate.added_to(theta, 1 / aggregate.weight)
