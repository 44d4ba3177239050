# SPDX-License-Identifier: Apache-2.0
"""Shared code of strategies that send each client parameters of its own and need its reply
separately.

A round: every client of the cohort names the items that it needs; the server sends it its
parameters, one message per node; it replies with an update, under its id. No sum of updates is ever
made, so neither DP-FedAvg nor secure aggregation can cover these strategies.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import ArrayRecord

from fedrec.errors import ExperimentError
from fedrec.protocol.client_arrays import ClientArrays, ItemRequests
from fedrec.protocol.zero_copy import to_record
from strategies._optimiser import Kind, Optimiser
from strategies._server_rate import ServerRate
from strategies.base import Cohorts, CohortStrategy, Memory


class PerClientConfig(ServerRate):
    """Settings of strategies that send each client parameters of its own."""

    optimiser: Kind = "adam"
    """Optimiser on the server: Adam, or plain gradient descent."""


class PerClientStrategy(CohortStrategy):
    """Base of strategies whose server sends each client parameters of its own. A subclass makes
    these parameters in `sent`, and says in `sees` why there is no sum to protect.

    Args:
        config: its settings.
        cohorts: the clients.
        step: name and settings of the local step that the clients run.

    Attributes:
        own_step: name of the only step that it works with; empty: any whose clients start from
            parameters of their own.
    """

    reply = "each"
    instead = "perturb the data on the device with a [perturb] table, or choose another system"
    own_step: ClassVar[str] = ""

    def __init__(self, config: PerClientConfig, cohorts: Cohorts, step: dict[str, Any]) -> None:
        super().__init__(config, cohorts, step)
        self._optimiser = Optimiser(config.optimiser)

    @abstractmethod
    def sent(self, requests: ItemRequests) -> ClientArrays:
        """The parameters of a round's clients, with the rows of the items that they need."""

    @property
    def memories(self) -> Mapping[str, Memory]:
        """The optimiser."""
        return {"optimiser/": self._optimiser}

    def _sent(
        self, server_round: int, groups: Mapping[int, np.ndarray], arrays: ArrayRecord
    ) -> Iterable[tuple[int, np.ndarray, ArrayRecord]]:
        """Nodes whose request for items failed get none.

        Raises:
            ExperimentError: the step is another one.
        """
        self._refuse_other_step()
        asked = self.cohorts.item_requests(groups, server_round)
        requests = ItemRequests.joined(list(asked.values()))
        whole = self.sent(requests)
        for node, part in asked.items():
            own = whole.arranged(np.searchsorted(requests.clients, part.clients))
            yield node, part.clients, to_record(own.arrays())

    def _refuse_other_step(self) -> None:
        """Refuse models and steps that do not belong to a strategy.

        Raises:
            ExperimentError: they are others.
        """
        if self.own_step and self.step.get("name") != self.own_step:
            raise ExperimentError(
                f"strategy {self.own_step!r} has a step of its own",
                expected=f"model, step and strategy all by the name {self.own_step!r}",
                got=f"step {self.step.get('name')!r}",
                fix=f"set model.name and step.name to {self.own_step!r}",
            )

    def _moved(
        self, gradients: Mapping[str, np.ndarray], server_round: int
    ) -> dict[str, np.ndarray]:
        """The global parameters after one step of the optimiser along some gradients, at the
        round's rate."""
        values = {name: torch.from_numpy(np.array(self._theta[name])) for name in gradients}
        along = {n: torch.from_numpy(g.astype(np.float32)) for n, g in gradients.items()}
        rates = dict.fromkeys(gradients, self.server_rate(self.config, server_round))
        self._optimiser.step(values, along, rates, dict.fromkeys(gradients, 0.0))
        return {**self._theta, **{n: v.detach().numpy() for n, v in values.items()}}
