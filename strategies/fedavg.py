# SPDX-License-Identifier: Apache-2.0
"""FedAvg (McMahan et al. 2017): the mean of the clients' parameters, weighted by their numbers of
examples.

theta <- theta + sum_k n_k (theta_k - theta) / sum_k n_k
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from fedrec.config import Config
from strategies.base import Aggregate, Cohorts, CohortStrategy


class FedAvgConfig(Config):
    """Settings of FedAvg."""

    weighting: Literal["examples", "uniform"] = "examples"
    """Weight of a client: its number of examples (n_k), or uniform, which differential privacy
    requires."""


class FedAvg(CohortStrategy):
    """Averages the clients' parameters, weighted by examples or uniformly."""

    name = "fedavg"
    Config = FedAvgConfig
    paper = "FedAvg (McMahan et al. 2017), algorithm 1"
    config: FedAvgConfig

    def __init__(self, config: FedAvgConfig, cohorts: Cohorts, step: dict[str, Any]) -> None:
        super().__init__(config, cohorts, step)
        self.weighting = config.weighting

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """The next global parameters from the present ones and a round's aggregate with at least
        one client. A cohort without any example changes nothing."""
        if aggregate.weight == 0:
            return theta
        return aggregate.added_to(theta, 1 / aggregate.weight)
