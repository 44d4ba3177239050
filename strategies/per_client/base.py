# SPDX-License-Identifier: Apache-2.0
"""Shared code of strategies that generate parameters for each client and need its reply separately.

A round: every client of the cohort names the items that it needs; the server sends it the generated
parameters, one message per node; it replies with a gradient, under its id. No sum of updates is
ever made, so neither DP-FedAvg nor secure aggregation can cover these strategies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MessageType, MetricRecord

from fedrec.config import Config
from fedrec.errors import ClientError, ExperimentError
from fedrec.prefixes import add_prefix, strip_prefix
from fedrec.protocol.generated import Generated, ItemRequests
from fedrec.protocol.messages import pack_train
from fedrec.protocol.orders import TrainEach, TrainOrder
from fedrec.protocol.zero_copy import to_record
from strategies._optimiser import Optimiser
from strategies.base import Aggregate, Cohorts, CohortStrategy
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
    """Base of strategies whose server needs each client's reply separately. A subclass sets
    `_optimiser` and returns in `memories` the state to be saved.

    Attributes:
        system: its name in errors.
        takes: what it needs of each client, in words.
        sees: the reason why there is no sum to protect, in words.
        instead: what may protect clients in place of `[privacy]`.
    """

    system: ClassVar[str]
    takes: ClassVar[str]
    sees: ClassVar[str]
    instead: ClassVar[str] = "perturb the data on the device with a [perturb] table"

    _optimiser: Optimiser

    def __init__(self, config: Config, cohorts: Cohorts, step: dict[str, Any]) -> None:
        super().__init__(config, cohorts, step)
        self._open: set[int] = set()  # clients of the round that have not answered

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

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """Not used: there is no sum of updates.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"Expected {self.takes}, got a sum.")

    def _refuse_other_step(self, name: str, table: str, why: str) -> None:
        """Refuse models and steps that do not belong to a strategy.

        Args:
            name: that model, step and strategy have.
            table: a parameter that the model has.
            why: what the strategy does with its step, in words.

        Raises:
            ExperimentError: they are others.
        """
        if table not in self._theta or self.step.get("name") != name:
            raise ExperimentError(
                f"strategy {name!r} {why}",
                expected=f"model, step and strategy all by the name {name!r}",
                got=f"step {self.step.get('name')!r}",
                fix=f"set model.name and step.name to {name!r}",
            )

    def _requests(self, server_round: int) -> dict[int, ItemRequests]:
        """By node, the items that the cohort's clients need, without nodes that failed. Each of
        these clients may answer once."""
        groups = dict(self.cohorts.by_node(self.cohorts.sample(server_round)))
        asked = self.cohorts.item_requests(groups, server_round)
        self._open = {one for part in asked.values() for one in part.clients.tolist()}
        return asked

    def _message(self, node: int, made: Generated, server_round: int) -> Message:
        """The message with the parameters of a node's clients, and the order to train them."""
        clients = made.requests.clients
        order = TrainOrder(server_round, clients, self.weighting, self.step, each=True)
        return Message(pack_train(to_record(made.arrays()), order), node, MessageType.TRAIN)

    def _answered(self, reply: TrainEach) -> list[int]:
        """The clients of a node's reply.

        Raises:
            ClientError: it answers for clients that were not asked, or a second time.
        """
        clients = reply.gradients.requests.clients.tolist()
        if not self._open.issuperset(clients):
            raise ClientError(
                "a node answered for other clients than it was asked for",
                expected="each client of the message once",
                got=f"clients {', '.join(map(str, clients))}",
            )
        self._open -= set(clients)
        return clients

    def _metrics(self, answers: Sequence[TrainEach], clients: int) -> MetricRecord:
        """A round's metrics: number of clients, their examples, and the mean loss of clients with
        examples."""
        examples = int(sum(reply.examples.sum() for reply in answers))
        metrics = MetricRecord({"num-clients": clients, "num-examples": examples})
        losses = np.concatenate([np.empty(0), *(reply.losses for reply in answers)])
        if np.isfinite(losses).any():
            metrics["loss"] = float(losses[np.isfinite(losses)].mean())
        return metrics

    def _moved(self, gradients: Mapping[str, np.ndarray], server_round: int) -> ArrayRecord:
        """The global parameters after one step of the optimiser along some gradients, at the
        round's rate."""
        values = {name: torch.from_numpy(np.array(self._theta[name])) for name in gradients}
        along = {n: torch.from_numpy(g.astype(np.float32)) for n, g in gradients.items()}
        rates = dict.fromkeys(gradients, self.server_rate(self.config, server_round))
        self._optimiser.step(values, along, rates, dict.fromkeys(gradients, 0.0))
        return to_record({**self._theta, **{n: v.detach().numpy() for n, v in values.items()}})
