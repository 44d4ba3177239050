# SPDX-License-Identifier: Apache-2.0
"""FedGNN's server (Wu et al. 2021, algorithm 1), and what it carries to and from the third party.

A round: every client of the cohort names the items that it touches, its own among negatives and
pseudo items; the server sends their rows and the shared layers, and the third party neighbours of
the client's items; the client sends clipped, noisy gradients. Rows and layers move along the mean
over the cohort, by one step of `optimiser`.

**Who learns what.** The server sees each client's message by itself, with the rows that it names.
The third party sees tokens and user embeddings (`fedrec.graphs.third_party`). In this simulation it
lives in the server's process, which carries both unread; a real one would be somebody else, to whom
devices write under encryption. Who holds both, and the key, knows everybody's items. Noise is the
step's, on each message: what it is worth is said there, in `step.spent`, and beside the results.
The noise of DP-FedAvg is for a sum, so `[privacy]` is refused, and so is secure aggregation.

Where this differs from the paper: neighbours are looked up in every round, by what devices sent
last, and not once after some rounds of training without them; who was in no round yet has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from pydantic import Field

from fedrec.errors import ClientError, ExperimentError
from fedrec.graphs.third_party import ThirdParty
from fedrec.prefixes import under
from fedrec.protocol.generated import Generated, ItemRequests
from fedrec.protocol.messages import pack_train, unpack_each
from fedrec.protocol.orders import TrainEach, TrainOrder
from fedrec.protocol.zero_copy import to_record, zero_copy_arrays
from strategies._optimiser import Optimiser
from strategies._server_rate import ServerRate
from strategies.base import Aggregate, Cohorts, CohortStrategy
from strategies.dp import DpFedAvg

ITEMS, LAYERS = "item.id", ("items.", "users.")
NEIGHBOURS, COUNTS = "third.neighbours", "third.counts"
TOKENS, EMBEDDING = "third.tokens", "third.user"


class FedgnnConfig(ServerRate):
    """Settings of FedGNN's server and third party."""

    optimiser: Literal["adam", "sgd"] = "adam"
    """What turns mean gradients into steps."""
    server_lr: float = Field(default=0.01, gt=0)
    """Step size."""
    history: int = Field(default=50, ge=1)
    """Items of a client's local graph at most (paper's code: 100); of more, evenly spaced ones."""
    neighbours: int = Field(default=5, ge=0)
    """Other users of each item at most (paper's code: 100); 0: each client is alone with its
    items."""


class Fedgnn(CohortStrategy):
    """Averages gradients of local graphs; the third party finds neighbours."""

    Config = FedgnnConfig
    paper = "FedGNN (Wu et al. 2021), algorithm 1"
    config: FedgnnConfig

    def __init__(self, config: FedgnnConfig, cohorts: Cohorts, step: dict[str, Any]) -> None:
        super().__init__(config, cohorts, step)
        self._third = ThirdParty(config.neighbours)
        self._optimiser = Optimiser(config.optimiser, 0.0)
        self._open: set[int] = set()

    @classmethod
    def said(
        cls, config: Any, step: Any, parameters: Mapping[str, np.ndarray], rounds: int
    ) -> list[str]:
        """What must stand beside the results of a run: what the noise is worth, beside the paper's
        claim."""
        hidden = (
            "FedGNN: which rows a client's messages name, the tokens of its items and its user"
            " embedding are covered by no guarantee."
        )
        if not step.noise:
            return [hidden, "FedGNN: messages had no noise; their values have no guarantee either."]
        sent = [v for n, v in parameters.items() if n == ITEMS or n.startswith(LAYERS)]
        size = sum(value.size for value in sent)
        claim, once = 2 * step.clip_norm / step.noise, step.spent(size, 1)
        return [
            hidden,
            f"FedGNN: the paper's formula gives epsilon = 2 S / b = {claim:g}. The values of one"
            f" message of up to {size} numbers cost {once:g}, and those of a client that is in all"
            f" {rounds} rounds {step.spent(size, rounds):g} (pure differential privacy, clip ="
            f" {step.clip!r}; the noise is from a seed: a simulation).",
        ]

    def protect(self, privacy: DpFedAvg) -> None:
        """Always refused.

        Raises:
            ExperimentError: see the module.
        """
        raise ExperimentError(
            "FedGNN cannot be made differentially private by [privacy]",
            expected="a strategy that uses nothing but the sum of the clients' updates",
            got="strategy 'fedgnn': its server takes each client's message by itself",
            fix="set step.noise and step.clip, or choose another system",
        )

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """Never called: there is no sum of updates.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("Expected the gradient of each client, got a sum.")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message per node, with its clients' rows and neighbours; nodes that did not say what
        they need get none.

        Raises:
            ExperimentError: the step is another one.
        """
        self._theta = zero_copy_arrays(arrays)
        if self.step.get("name") != "fedgnn" or ITEMS not in self._theta:
            raise ExperimentError(
                "strategy 'fedgnn' has a step of its own",
                expected="model, step and strategy all by the name 'fedgnn'",
                got=f"step {self.step.get('name')!r}",
                fix="set model.name and step.name to 'fedgnn'",
            )
        groups = dict(self.cohorts.by_node(self.cohorts.sample(server_round)))
        asked = self.cohorts.item_requests(groups, server_round)
        self._open = {client for part in asked.values() for client in part.clients.tolist()}
        for node, part in asked.items():
            order = TrainOrder(server_round, part.clients, step=self.step, each=True)
            content = pack_train(to_record(self._sent(part).arrays()), order)
            yield Message(content, node, MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Step along the cohort's mean gradient; without any client the parameters stay."""
        told = [unpack_each(reply.content) for reply in replies if not reply.has_error()]
        names = [name for name in self._theta if name == ITEMS or name.startswith(LAYERS)]
        sums = {name: np.zeros(self._theta[name].shape) for name in names}
        clients = sum(self._add(reply, sums) for reply in told)
        losses = np.concatenate([reply.losses for reply in told] or [np.empty(0)])
        examples = int(sum(reply.examples.sum() for reply in told))
        metrics = MetricRecord({"num-clients": clients, "num-examples": examples})
        if np.isfinite(losses).any():
            metrics["loss"] = float(losses[np.isfinite(losses)].mean())
        if not clients:
            return None, metrics
        values = {name: torch.from_numpy(np.array(self._theta[name])) for name in names}
        means = {n: torch.from_numpy((s / clients).astype(np.float32)) for n, s in sums.items()}
        rate = self.config.rate(server_round)
        self._optimiser.step(values, means, dict.fromkeys(names, rate), dict.fromkeys(names, 0.0))
        moved = {name: value.detach().numpy() for name, value in values.items()}
        return to_record({**self._theta, **moved}), metrics

    def state(self) -> dict[str, np.ndarray]:
        """What is remembered between rounds: what devices sent the third party, and the
        optimiser's memory."""
        third = {f"third/{name}": value for name, value in self._third.state().items()}
        return third | {f"optimiser/{n}": v for n, v in self._optimiser.state().items()}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take back what `state` gave."""

        self._third.restore(under("third/", state))
        self._optimiser.restore(under("optimiser/", state))

    def _sent(self, requests: ItemRequests) -> Generated:
        """What some clients get: rows, layers, neighbours, and room for what goes to the third
        party."""
        clients, slots = requests.clients.tolist(), self.config.history
        table = np.asarray(self._theta[ITEMS])
        given, counts = self._third.found(clients, slots, table.shape[1])
        layers = {
            name: np.repeat(np.asarray(value)[None], len(clients), axis=0)
            for name, value in self._theta.items()
            if name.startswith(LAYERS)
        }
        room = {
            TOKENS: np.zeros((len(clients), slots), dtype=np.int64),
            EMBEDDING: np.zeros((len(clients), table.shape[1]), dtype=np.float32),
        }
        third = {NEIGHBOURS: given, COUNTS: counts}
        return Generated(requests, {**layers, **third, **room}, {ITEMS: table[requests.items]})

    def _add(self, reply: TrainEach, sums: dict[str, np.ndarray]) -> int:
        """Add the gradients of a node's clients that had examples, and hand over what is for the
        third party; the number of these clients.

        Raises:
            ClientError: it answers for clients that were not asked, or a second time.
        """
        requests, values = reply.gradients.requests, reply.gradients.values
        clients = requests.clients.tolist()
        if not self._open.issuperset(clients):
            raise ClientError(
                "a node answered for other clients than it was asked for",
                expected="each client of the message once",
                got=f"clients {', '.join(map(str, clients))}",
            )
        self._open -= set(clients)
        learned = reply.examples > 0
        np.add.at(sums[ITEMS], requests.items, reply.gradients.rows[ITEMS])
        for name in sums:
            if name != ITEMS:
                sums[name] += values[name].sum(axis=0, dtype=np.float64)
        for place in np.flatnonzero(learned).tolist():
            own, embedding = values[TOKENS][place], values[EMBEDDING][place]
            self._third.register(clients[place], own.copy(), embedding.copy())
        return int(learned.sum())
