# SPDX-License-Identifier: Apache-2.0
"""REPTILE as a federated strategy (PrivRec section 2.2.2, equation 6; Nichol et al. 2018).

    theta <- theta + alpha2 * (1 / M) * sum_tau (theta_tau - theta)

Every client counts the same, however much data it has. M is the number of clients that answered.

Where this differs from the paper: alpha2 may fall linearly to zero, as in the experiments of Nichol
et al.; in the paper it is constant, and its value is not given.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from strategies._server_rate import ServerRate
from strategies.base import Aggregate, CohortStrategy


class ReptileConfig(ServerRate):
    """Settings of REPTILE."""

    server_lr: float = Field(default=1.0, gt=0)
    """How far the shared parameters move towards the mean of the clients' (alpha2 in PrivRec)."""


class Reptile(CohortStrategy):
    """Moves the shared initialisation towards the mean of the locally trained parameters."""

    name = "reptile"
    Config = ReptileConfig
    paper = "PrivRec (Wang et al. 2021), eq. 6"
    config: ReptileConfig

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """The next global parameters from the present ones and a round's aggregate with at least
        one client."""
        return aggregate.added_to(theta, self.config.rate(aggregate.round) / aggregate.clients)
