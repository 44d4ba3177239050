# SPDX-License-Identifier: Apache-2.0
"""FedAdam (Reddi et al. 2021, Adaptive Federated Optimization, algorithm 2) over cohorts of
clients.

    D     <- mean over the cohort of (theta_k - theta)
    m     <- b1 m + (1 - b1) D
    v     <- b2 v + (1 - b2) D^2
    theta <- theta + server-lr * m / (sqrt(v) + tau)

Flower's own FedAdam averages nodes; this one samples clients, and may run under differential
privacy, because it uses only the mean.

Where this differs from the paper: eta may fall linearly to zero (`anneal-rounds`), and
`bias-correction` divides m and v by 1 - b^t as Adam (Kingma and Ba 2015) does, where algorithm 2
starts v at tau^2 and corrects nothing. With one local step of gradient descent, this is then Adam
on the cohort as batch, but for tau, which counts in units of the local step size.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import Field

from fedrec.prefixes import add_prefix, strip_prefix
from strategies._server_rate import ServerRate
from strategies.base import Aggregate, Cohorts, CohortStrategy


class FedAdamConfig(ServerRate):
    """Settings of FedAdam."""

    server_lr: float = Field(default=0.001, gt=0)
    """Server learning rate (eta)."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of the first moment (beta1), in [0, 1)."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay rate of the second moment (beta2), in [0, 1)."""
    tau: float = Field(default=1e-8, gt=0)
    """Added to the square root of the second moment (tau); the larger, the less adaptive."""
    bias_correction: bool = True
    """Whether both moments are corrected for their start at zero, as in Adam."""
    weighting: Literal["examples", "uniform"] = "uniform"
    """Weight of a client in the mean update: uniform, which differential privacy requires, or its
    number of examples, which makes a cohort's examples one batch."""


class FedAdam(CohortStrategy):
    """Adam on the server, with the mean update of the cohort in place of a gradient."""

    name = "fed-adam"
    Config = FedAdamConfig
    paper = "Adaptive Federated Optimization (Reddi et al. 2021), algorithm 2"
    config: FedAdamConfig

    def __init__(self, config: FedAdamConfig, cohorts: Cohorts, step: dict[str, Any]) -> None:
        super().__init__(config, cohorts, step)
        self.weighting = config.weighting
        self._first: dict[str, np.ndarray] = {}
        self._second: dict[str, np.ndarray] = {}
        self._steps = 0

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """The next global parameters from the present ones and a round's aggregate with at least
        one client. A cohort without any example, by which it is weighted, changes nothing."""
        config = self.config
        divisor = aggregate.clients if config.weighting == "uniform" else aggregate.weight
        if not divisor:
            return theta
        start = 0.0 if self.config.bias_correction else self.config.tau**2
        self._steps += 1
        rate = config.rate(aggregate.round)
        whole = [
            1 - beta**self._steps if config.bias_correction else 1.0
            for beta in (config.beta1, config.beta2)
        ]
        moved = {}
        for name, total in aggregate.total(theta).items():
            mean = total / divisor
            first = self._first.setdefault(name, np.zeros(mean.shape))
            second = self._second.setdefault(name, np.full(mean.shape, start))
            first += (1 - config.beta1) * (mean - first)
            second += (1 - config.beta2) * (np.square(mean) - second)
            moved[name] = theta[name] + rate * (first / whole[0]) / (
                np.sqrt(second / whole[1]) + config.tau
            )
        return moved

    def state(self) -> dict[str, np.ndarray]:
        """State between rounds: both moments and the number of steps."""
        means = add_prefix({"first/": self._first, "second/": self._second})
        return {**means, "steps": np.array(self._steps)}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned."""
        self._steps = int(state["steps"])
        self._first = {name: v.copy() for name, v in strip_prefix("first/", state).items()}
        self._second = {name: v.copy() for name, v in strip_prefix("second/", state).items()}
