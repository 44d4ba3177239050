# SPDX-License-Identifier: Apache-2.0
"""Meta matrix factorization as a federated system (Lin et al. 2020).

A round: every client of the cohort requests its items; the server generates its private parameters,
the rows of these items only; the client replies with the gradient g_c of its mean loss with respect
to them; the server back-propagates the gradients through its generator and takes one step of its
optimiser:

    gradient of the generator = sum_c n_c J_c^T g_c / sum_c n_c

with J_c the Jacobian of client c's generated parameters with respect to the generator. This is
the gradient of the mean loss over the cohort's examples, as in central training.

What the server learns: it knows each client by its user id, sees which items each one needs in a
round (with ranking, among the drawn negatives) and each one's gradient, from which ratings can be
computed. The generated parameters are hidden from other clients, not from the server. Secure
aggregation cannot hide single gradients from a server that needs each of them, and DP-FedAvg adds
noise to a sum, which is never computed here, so both raise an error. Perturbation on the device
(`[perturb]`) is possible.

Where this differs from the paper: there, clients get their whole item embeddings. The non-zero rows
of a gradient reveal the same as naming the items before. Adam moves every row of the catalogue in
each round, touched or not; `optimiser = "sgd"` without weight decay moves touched rows only.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedrec.errors import ClientError
from fedrec.models.metamf import generate
from fedrec.protocol.client_arrays import ClientArrays, ItemRequests
from fedrec.protocol.orders import TrainEach
from strategies.base import Aggregate, Cohorts, GeneratingStrategy
from strategies.per_client import PerClientConfig, PerClientStrategy

LOW = "item.low"


class MetaMfStrategyConfig(PerClientConfig):
    """Settings of the server in meta matrix factorization."""

    server_lr: float = Field(default=0.001, gt=0)
    """Server learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """L2 penalty added to the gradient of each parameter."""
    rates: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Factors on the learning rate by pattern of parameter names, such as `{"user.id" = 3.0}`; of
    several matches, the largest applies."""


class MetaMfStrategy(PerClientStrategy, GeneratingStrategy):
    """MetaMF: generates each client's parameters and learns from each client's gradient."""

    name = "metamf"
    Config = MetaMfStrategyConfig
    paper = "MetaMF (Lin et al. 2020)"
    config: MetaMfStrategyConfig
    weighting = "examples"

    def __init__(
        self, config: MetaMfStrategyConfig, cohorts: Cohorts, step: dict[str, Any]
    ) -> None:
        super().__init__(config, cohorts, step)
        self._leaves: dict[str, Tensor] = {}
        self._made: tuple[ItemRequests, dict[str, Tensor], Tensor] | None = None

    def generate(
        self, theta: Mapping[str, np.ndarray], clients: np.ndarray, requests: ItemRequests | None
    ) -> ClientArrays:
        """Generate the parameters of some clients."""
        tensors = {name: torch.from_numpy(np.asarray(value)) for name, value in theta.items()}
        with torch.no_grad():
            values, low = generate(tensors, torch.from_numpy(clients.copy()), requests)
        if requests is not None:
            return ClientArrays.of(requests, {**values, LOW: low}, [LOW])
        nothing = ItemRequests.of(clients, [clients[:0]] * len(clients))
        return ClientArrays.of(nothing, {**values, LOW: low}, ())

    def sent(self, requests: ItemRequests) -> ClientArrays:
        """Generate the parameters of a round's clients."""
        self._leaves = {
            n: torch.from_numpy(np.asarray(v)).requires_grad_() for n, v in self._theta.items()
        }
        values, low = generate(self._leaves, torch.from_numpy(requests.clients), requests)
        self._made = requests, values, low
        return ClientArrays.of(requests, {**values, LOW: low}, [LOW])

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """Back-propagate the gradients and take a step, in place; without any example the
        parameters stay.

        Raises:
            ClientError: no parameters were generated.
        """
        if self._made is None or aggregate.each is None:
            raise ClientError(
                "received gradients for parameters that were not generated",
                fix="call configure_train before aggregate_train",
            )
        outputs, directions = self._directions(aggregate.each)
        leaves = self._leaves
        self._made = None
        self._leaves = {}
        if not directions:
            return theta
        gradients = torch.autograd.grad(
            outputs, list(leaves.values()), directions, materialize_grads=True
        )
        with torch.no_grad():
            moved = {name: leaf.detach() for name, leaf in leaves.items()}
            rate = self.config.rate(aggregate.round)
            factors = self.config.rates.items()
            rates = {
                name: rate * max((f for p, f in factors if fnmatch.fnmatch(name, p)), default=1.0)
                for name in moved
            }
            decays = dict.fromkeys(moved, self.config.weight_decay)
            self._optimiser.step(moved, dict(zip(moved, gradients, strict=True)), rates, decays)
        return theta

    def _directions(self, each: TrainEach) -> tuple[list[Tensor], list[Tensor]]:
        """All generated tensors, and the weighted mean gradients with respect to them; empty
        without any example."""
        requests, values, low = self._made  # type: ignore[misc]
        ranks = np.searchsorted(requests.clients, each.clients)
        weights = each.examples.astype(np.float32)
        whole = np.float32(float(weights.sum()))
        outputs = [*values.values(), low]
        if not whole:
            return outputs, []
        gradients = []
        for name, value in values.items():
            change = each.updates.values[name]
            total = np.zeros(value.shape, dtype=np.float32)
            total[ranks] = -change * weights.reshape(-1, *[1] * (change.ndim - 1))
            gradients.append(total)
        total = np.zeros(low.shape, dtype=np.float32)
        rows = weights[each.updates.requests.owners][:, None]
        total[requests.rows_of(ranks)] = -each.updates.rows[LOW] * rows
        return outputs, [torch.from_numpy(array / whole) for array in [*gradients, total]]
