# SPDX-License-Identifier: Apache-2.0
"""Federated collaborative filtering (Ammad-ud-din et al. 2019, equations 7 to 10): the server's
step on the items.

Clients run the step `als` on the model `ials`. With N training clients and means over the cohort,

    g_i   = 2 N mean(user.gram) y_i - 2 N mean(item.right)_i + 2 lambda y_i
    y_i  <- Adam(y_i, g_i)

g_i is the gradient of the loss of implicit matrix factorization with respect to y_i, at the users'
factors that were solved for.

Where this differs from the paper: g_i is computed from the users' second moments and the rows of
the items that they like, which gives the same sum as one gradient per user and item; the sums of a
cohort are scaled up to all clients, so that lambda keeps its meaning.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from fedrec.errors import ExperimentError
from strategies._server_rate import ServerRate
from strategies.base import Aggregate, Cohorts, CohortStrategy

FACTORS = "item.factors"
GRAM = "user.gram"
RIGHT = "item.right"
MOMENTS = "item.moments"


class FcfConfig(ServerRate):
    """Settings of the server's Adam."""

    server_lr: float = Field(default=0.05, gt=0)
    """Step size of Adam."""
    regularisation: float = Field(default=10.0, ge=0)
    """Regularisation lambda of the items' factors."""
    beta1: float = Field(default=0.1, ge=0, lt=1)
    """Decay rate of the first moment (beta1), in [0, 1)."""
    beta2: float = Field(default=0.99, ge=0, lt=1)
    """Decay rate of the second moment (beta2), in [0, 1)."""


class Fcf(CohortStrategy):
    """Adam on the items' factors, with the gradient computed from the clients' sums."""

    name = "fcf"
    Config = FcfConfig
    paper = "FCF (Ammad-ud-din et al. 2019), eq. 7-10"
    config: FcfConfig

    def __init__(self, config: FcfConfig, cohorts: Cohorts, step: dict[str, Any]) -> None:
        super().__init__(config, cohorts, step)
        self._first: np.ndarray | None = None
        self._second: np.ndarray | None = None
        self._steps = 0

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """The next global parameters from the present ones and a round's aggregate with at least
        one client.

        Raises:
            ExperimentError: the model has no such parameters, or its clients send moments.
        """
        refuse_other_models(theta, moments=False)
        factors = theta[FACTORS].astype(np.float64)
        gradient = self.gradient(factors, summed(aggregate, theta, len(self.cohorts.clients)))
        if self._first is None or self._second is None:
            self._first = np.zeros_like(gradient)
            self._second = np.zeros_like(gradient)
        config = self.config
        self._steps = self._steps + 1
        self._first = config.beta1 * self._first + (1 - config.beta1) * gradient
        self._second = config.beta2 * self._second + (1 - config.beta2) * gradient**2
        mean = self._first / (1 - config.beta1**self._steps)
        spread = np.sqrt(self._second / (1 - config.beta2**self._steps))
        moved = factors - config.rate(aggregate.round) * mean / (spread + 1e-8)
        return with_factors(theta, moved)

    def gradient(self, factors: np.ndarray, sums: dict[str, np.ndarray]) -> np.ndarray:
        """Gradient of the loss with respect to the items' factors, `float64 [items, d]`."""
        gram = (sums[GRAM] + sums[GRAM].T) / 2  # noise is not symmetric
        return 2 * (factors @ gram - sums[RIGHT] + self.config.regularisation * factors)

    def state(self) -> dict[str, np.ndarray]:
        """Adam's two means and its number of steps."""
        if self._first is None or self._second is None:
            return {}
        return {"first": self._first, "second": self._second, "steps": np.asarray(self._steps)}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned."""
        if state:
            self._first = state["first"]
            self._second = state["second"]
            self._steps = int(state["steps"])


def summed(
    aggregate: Aggregate, theta: dict[str, np.ndarray], everybody: int
) -> dict[str, np.ndarray]:
    """The cohort's sums scaled up to all clients, float64."""
    scale = everybody / aggregate.clients
    total = aggregate.total(theta)
    # moments of a large catalogue are not copied where everybody took part
    return total if scale == 1 else {name: scale * value for name, value in total.items()}


def with_factors(theta: dict[str, np.ndarray], factors: np.ndarray) -> dict[str, np.ndarray]:
    """Parameters with new item factors `[items, d]` and their Gram matrix; the clients' sums stay
    zero."""
    return {**theta, FACTORS: factors, "item.gram": factors.T @ factors}


def refuse_other_models(theta: dict[str, np.ndarray], *, moments: bool) -> None:
    """Refuse parameters that are not those of implicit matrix factorization.

    Raises:
        ExperimentError: they are not, or clients send other sums than those that are needed.
    """
    needed = {FACTORS, GRAM, RIGHT, "item.gram"}
    if needed - set(theta) or (MOMENTS in theta) != moments:
        raise ExperimentError(
            "the items' factors cannot be computed from the updates of these clients",
            expected=f"model.name = 'ials' with model.moments = {str(moments).lower()}",
            got=f"a model with {', '.join(theta)}",
            fix=(
                f"set model.name = 'ials', model.moments = {str(moments).lower()} and step.name ="
                " 'als'"
            ),
        )
