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
from typing import ClassVar, Protocol

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from fedrec.errors import ExperimentError
from fedrec.prefixes import add_prefix, strip_prefix
from fedrec.protocol.client_arrays import ClientArrays, ItemRequests
from fedrec.protocol.zero_copy import to_record, zero_copy_arrays
from strategies._optimiser import Optimiser
from strategies.base import CohortStrategy
from strategies.dp import DpFedAvg


class Memory(Protocol):
    """State between rounds."""

    def state(self) -> Mapping[str, np.ndarray]:
        """The state as named arrays."""
        ...

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore what `state` returned."""
        ...


class PerClientStrategy(CohortStrategy):
    """Base of strategies whose server sends each client parameters of its own. A subclass sets
    `_optimiser`, makes these parameters in `sent`, and returns in `memories` the state to be saved.

    Attributes:
        system: its name in errors.
        sees: the reason why there is no sum to protect, in words.
        instead: what may protect clients in place of `[privacy]`.
        own_step: name of the only step that it works with; empty: any whose clients start from
            parameters of their own.
    """

    reply = "each"
    system: ClassVar[str]
    sees: ClassVar[str]
    instead: ClassVar[str] = "perturb the data on the device with a [perturb] table"
    own_step: ClassVar[str] = ""

    _optimiser: Optimiser

    @abstractmethod
    def sent(self, requests: ItemRequests) -> ClientArrays:
        """The parameters of a round's clients, with the rows of the items that they need."""

    @property
    def memories(self) -> dict[str, Memory]:
        """The states to be saved, by the prefix of their arrays' names."""
        return {"optimiser/": self._optimiser}

    def state(self) -> dict[str, np.ndarray]:
        """All `memories` in one table."""
        return add_prefix({prefix: memory.state() for prefix, memory in self.memories.items()})

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned."""
        for prefix, memory in self.memories.items():
            memory.restore(strip_prefix(prefix, state))

    def protect(self, privacy: DpFedAvg) -> None:
        """Always raises an error.

        Raises:
            ExperimentError: the noise of DP-FedAvg is for a sum, which is never made here.
        """
        raise ExperimentError(
            f"{self.system} cannot be made differentially private by [privacy]",
            expected="a strategy that uses only the sum of the clients' updates",
            got=self.sees,
            fix=f"{self.instead}, or choose another system",
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message per node, with the parameters of its clients; nodes whose request for items
        failed get none.

        Raises:
            ExperimentError: the step is another one.
        """
        self._refuse_other_step()
        self._theta = zero_copy_arrays(arrays)
        self._open = set()
        groups = dict(self.cohorts.by_node(self.cohorts.sample(server_round)))
        asked = self.cohorts.item_requests(groups, server_round)
        requests = ItemRequests.joined(list(asked.values()))
        whole = self.sent(requests)
        for node, part in asked.items():
            own = whole.take(np.searchsorted(requests.clients, part.clients))
            yield self._order(server_round, node, part.clients, to_record(own.arrays()))

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
