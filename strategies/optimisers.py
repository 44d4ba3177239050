# SPDX-License-Identifier: Apache-2.0
"""Strategies that move the parameters by the mean update: FedAvg, REPTILE and FedAdam."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedrec.config import Config
from fedrec.nn.layers import SGD, Adam
from fedrec.runtime.ragged import add_prefix, strip_prefix
from strategies.base import Aggregate, Cohorts, CohortStrategy, ServerRate

# FedAvg (McMahan et al. 2017): the mean of the clients' parameters, weighted by their numbers of
# examples.
#
# theta <- theta + sum_k n_k (theta_k - theta) / sum_k n_k


class FedAvgConfig(Config):
    """Settings of FedAvg."""

    weighting: Literal["examples", "uniform"] = "examples"
    """Weight of a client: its number of examples (n_k), or uniform, which differential privacy
    requires."""


class FedAvg(CohortStrategy):
    """FedAvg: averages the clients' parameters, weighted by examples or uniformly."""

    name = "fedavg"
    Config = FedAvgConfig
    paper = "FedAvg (McMahan et al. 2017), algorithm 1"
    config: FedAvgConfig

    def __init__(self, config: FedAvgConfig, cohorts: Cohorts, step: dict[str, Any]) -> None:
        super().__init__(config, cohorts, step)
        self.weighting = config.weighting

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """Compute the next global parameters from the current ones and a round's aggregate with at
        least one client. A cohort without any example changes nothing."""
        if aggregate.weight == 0:
            return theta
        return aggregate.added_to(theta, 1 / aggregate.weight)


# REPTILE as a federated strategy (PrivRec section 2.2.2, equation 6; Nichol et al. 2018).
#
#     theta <- theta + alpha2 * (1 / M) * sum_tau (theta_tau - theta)
#
# Every client counts the same, however much data it has. M is the number of clients that answered.
#
# Where this differs from the paper: alpha2 may fall linearly to zero, as in the experiments of
# Nichol et al.; in the paper it is constant, and its value is not given.


class ReptileConfig(ServerRate):
    """Settings of REPTILE."""

    server_lr: float = Field(default=1.0, gt=0)
    """Step of the shared parameters towards the mean of the clients' (alpha2 in PrivRec)."""


class Reptile(CohortStrategy):
    """REPTILE: moves the initialisation towards the mean of the locally trained parameters."""

    name = "reptile"
    Config = ReptileConfig
    paper = "PrivRec (Wang et al. 2021), eq. 6"
    config: ReptileConfig

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """Compute the next global parameters from the current ones and a round's aggregate with at
        least one client."""
        return aggregate.added_to(theta, self.config.rate(aggregate.round) / aggregate.clients)


# FedAdam (Reddi et al. 2021, Adaptive Federated Optimization, algorithm 2) over cohorts of clients.
#
#     D     <- mean over the cohort of (theta_k - theta)
#     m     <- b1 m + (1 - b1) D
#     v     <- b2 v + (1 - b2) D^2
#     theta <- theta + server-lr * m / (sqrt(v) + tau)
#
# Flower's own FedAdam averages nodes; this one samples clients, and may run under differential
# privacy, because it uses only the mean.
#
# Where this differs from the paper: eta may fall linearly to zero (`anneal-rounds`), and m and v
# are divided by 1 - b^t as in Adam (Kingma and Ba 2015), where algorithm 2 starts v at tau^2 and
# corrects nothing. With one local step of gradient descent, this is then Adam on the cohort as
# batch, but for tau, which counts in units of the local step size.

_BETAS = (0.9, 0.999)  # b1 and b2
_TAU = 1e-8


class Moments:
    """Moments of the gradients of named parameters, float64, as Adam divides them (Kingma and Ba
    2015).

    Args:
        betas: decay rates b1 and b2 of the first and the second moment.
    """

    def __init__(self, betas: tuple[float, float] = _BETAS) -> None:
        self.betas = betas
        self._first: dict[str, np.ndarray] = {}
        self._second: dict[str, np.ndarray] = {}
        self._steps = 0

    def steps(self, gradients: Mapping[str, np.ndarray], rate: float) -> dict[str, np.ndarray]:
        """Add gradients, and return Adam's step along each at a learning rate."""
        self._steps += 1
        whole = [1 - beta**self._steps for beta in self.betas]
        steps = {}
        for name, gradient in gradients.items():
            first = self._first.setdefault(name, np.zeros(gradient.shape))
            second = self._second.setdefault(name, np.zeros(gradient.shape))
            first += (1 - self.betas[0]) * (gradient - first)
            second += (1 - self.betas[1]) * (np.square(gradient) - second)
            steps[name] = rate * (first / whole[0]) / (np.sqrt(second / whole[1]) + _TAU)
        return steps

    def state(self) -> dict[str, np.ndarray]:
        """Return both moments and the number of steps."""
        moments = add_prefix({"first/": self._first, "second/": self._second})
        return {**moments, "steps": np.array(self._steps)}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore what `state` returned."""
        self._steps = int(state["steps"])
        self._first = {name: v.copy() for name, v in strip_prefix("first/", state).items()}
        self._second = {name: v.copy() for name, v in strip_prefix("second/", state).items()}


class FedAdamConfig(ServerRate):
    """Settings of FedAdam."""

    server_lr: float = Field(default=0.001, gt=0)
    """Server learning rate (eta)."""
    weighting: Literal["examples", "uniform"] = "uniform"
    """Weight of a client in the mean update: uniform, which differential privacy requires, or its
    number of examples, which makes a cohort's examples one batch."""


class FedAdam(CohortStrategy):
    """FedAdam: Adam on the server, with the mean update of the cohort in place of a gradient."""

    name = "fed-adam"
    Config = FedAdamConfig
    paper = "Adaptive Federated Optimization (Reddi et al. 2021), algorithm 2"
    config: FedAdamConfig

    def __init__(self, config: FedAdamConfig, cohorts: Cohorts, step: dict[str, Any]) -> None:
        super().__init__(config, cohorts, step)
        self.weighting = config.weighting
        self._moments = Moments()
        self.memories = {"": self._moments}

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """Compute the next global parameters from the current ones and a round's aggregate with at
        least one client. A cohort without any example, by which it is weighted, changes nothing."""
        divisor = aggregate.clients if self.weighting == "uniform" else aggregate.weight
        if not divisor:
            return theta
        means = {name: total / divisor for name, total in aggregate.total(theta).items()}
        steps = self._moments.steps(means, self.config.rate(aggregate.round))
        return {name: theta[name] + step for name, step in steps.items()}


# A PyTorch optimiser over named numpy arrays, with a state that can be saved.

Kind = Literal["adam", "sgd"]


class Optimiser:
    """Adam (Kingma and Ba 2015) or gradient descent.

    Args:
        kind: the optimiser.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._memory: dict[str, dict[str, Tensor]] = {}

    def step(
        self,
        values: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        rates: Mapping[str, float],
        decays: Mapping[str, float],
    ) -> None:
        """Update values in place, each with its own learning rate and L2 penalty, which is added to
        the gradient."""
        groups: list[dict[str, Any]] = []
        for name, value in values.items():
            value.grad = gradients[name]
            groups.append({"params": [value], "lr": rates[name], "weight_decay": decays[name]})
        optimiser = self._made(groups)
        for name, value in values.items():
            if name in self._memory:
                optimiser.state[value] = self._memory[name]
        optimiser.step()
        self._memory = {
            name: {
                key: moment
                for key, moment in optimiser.state[value].items()
                if isinstance(moment, Tensor)
            }
            for name, value in values.items()
        }

    def state(self) -> dict[str, np.ndarray]:
        """Return the optimiser's state as named arrays."""
        return {
            f"{name}/{key}": v.numpy()
            for name, moments in self._memory.items()
            for key, v in moments.items()
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore what `state` returned."""
        self._memory = {}
        for key, array in state.items():
            name, _, part = key.rpartition("/")
            self._memory.setdefault(name, {})[part] = torch.from_numpy(np.array(array))

    def _made(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if self.kind == "adam":
            return Adam(groups, fused=True)
        return SGD(groups, lr=0.0)
