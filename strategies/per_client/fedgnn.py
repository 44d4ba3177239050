# SPDX-License-Identifier: Apache-2.0
"""FedGNN's server (Wu et al. 2021, algorithm 1), and the messages that it forwards to and from the
third party.

A round: every client of the cohort names the items that it needs, its own among negatives and
pseudo items; the server sends their rows and the shared layers, and the third party neighbours of
the client's items; the client sends clipped, noisy gradients. Rows and layers move along the mean
over the cohort, by one step of `optimiser`.

**Who learns what.** The server sees each client's message separately, with the rows that it names.
The third party sees tokens and user embeddings (`fedrec.graphs.third_party`). In this simulation it
is part of the server's process, which forwards both without reading them; a real third party would
be separate, and devices would encrypt their messages to it. A party with both, and the key, learns
all users' items. The step adds noise to each message; its guarantee is documented there, computed
by `step.spent` and printed with the results. The noise of DP-FedAvg is for a sum, so `[privacy]` is
refused, and so is secure aggregation.

Where this differs from the paper: neighbours are looked up in every round, from the last messages
of the devices, and not once after some rounds of training without them; a client that was in no
round yet has no neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from pydantic import Field

from fedrec.graphs.third_party import ThirdParty
from fedrec.protocol.generated import Generated, ItemRequests
from fedrec.protocol.messages import unpack_each
from fedrec.protocol.orders import TrainEach
from fedrec.protocol.zero_copy import zero_copy_arrays
from strategies._optimiser import Optimiser
from strategies._server_rate import ServerRate
from strategies.base import Cohorts
from strategies.per_client.base import Memory, PerClientStrategy

ITEMS = "item.id"
LAYERS = ("items.", "users.")
NEIGHBOURS = "third.neighbours"
COUNTS = "third.counts"
TOKENS = "third.tokens"
EMBEDDING = "third.user"


class FedgnnConfig(ServerRate):
    """Settings of FedGNN's server and third party."""

    optimiser: Literal["adam", "sgd"] = "adam"
    """Optimiser for the mean gradients."""
    server_lr: float = Field(default=0.01, gt=0)
    """Server learning rate."""
    history: int = Field(default=50, ge=1)
    """Largest number of items in a client's local graph (paper's code: 100); of more items, evenly
    spaced ones are used."""
    neighbours: int = Field(default=5, ge=0)
    """Largest number of neighbours per item (paper's code: 100); 0: local graphs without
    neighbours."""


class Fedgnn(PerClientStrategy):
    """Averages gradients of local graphs; the third party finds neighbours."""

    Config = FedgnnConfig
    paper = "FedGNN (Wu et al. 2021), algorithm 1"
    config: FedgnnConfig
    system = "FedGNN"
    takes = "the gradient of each client"
    sees = "strategy 'fedgnn': its server needs each client's message separately"
    instead = "set step.noise and step.clip"

    def __init__(self, config: FedgnnConfig, cohorts: Cohorts, step: dict[str, Any]) -> None:
        super().__init__(config, cohorts, step)
        self._third = ThirdParty(config.neighbours)
        self._optimiser = Optimiser(config.optimiser, 0.0)

    @property
    def memories(self) -> dict[str, Memory]:
        """The messages to the third party, and the optimiser's state."""
        return {"third/": self._third, **super().memories}

    @classmethod
    def remarks(
        cls, config: Any, step: Any, parameters: Mapping[str, np.ndarray], rounds: int
    ) -> list[str]:
        """Remarks to be reported with the results: the guarantee of the noise, compared with the
        paper's claim."""
        hidden = (
            "FedGNN: which rows a client's messages name, the tokens of its items and its user"
            " embedding are covered by no guarantee."
        )
        if not step.noise:
            return [hidden, "FedGNN: messages had no noise; their values have no guarantee either."]
        sent = [v for n, v in parameters.items() if n == ITEMS or n.startswith(LAYERS)]
        size = sum(value.size for value in sent)
        claim = 2 * step.clip_norm / step.noise
        once = step.spent(size, 1)
        return [
            hidden,
            f"FedGNN: the paper's formula gives epsilon = 2 S / b = {claim:g}. The values of one"
            f" message of up to {size} numbers cost {once:g}, and those of a client that is in all"
            f" {rounds} rounds {step.spent(size, rounds):g} (pure differential privacy, clip ="
            f" {step.clip!r}; the noise is from a seed: a simulation).",
        ]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message per node, with its clients' rows and neighbours; nodes that did not say what
        they need get none.

        Raises:
            ExperimentError: the step is another one.
        """
        self._theta = zero_copy_arrays(arrays)
        self._refuse_other_step("fedgnn", ITEMS, "has a step of its own")
        for node, part in self._requests(server_round).items():
            yield self._message(node, self._sent(part), server_round)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Step along the cohort's mean gradient; without any client the parameters stay."""
        answers = [unpack_each(reply.content) for reply in replies if not reply.has_error()]
        names = [name for name in self._theta if name == ITEMS or name.startswith(LAYERS)]
        sums = {name: np.zeros(self._theta[name].shape) for name in names}
        clients = sum(self._add(reply, sums) for reply in answers)
        metrics = self._metrics(answers, clients)
        if not clients:
            return None, metrics
        means = {name: total / clients for name, total in sums.items()}
        return self._moved(means, server_round), metrics

    def _sent(self, requests: ItemRequests) -> Generated:
        """The parameters for some clients: rows, layers, neighbours, and space for messages to the
        third party."""
        clients = requests.clients.tolist()
        slots = self.config.history
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
        """Add the gradients of a node's clients that had examples, and forward the messages to the
        third party; returns the number of these clients.

        Raises:
            ClientError: it answers for clients that were not asked, or a second time.
        """
        requests = reply.gradients.requests
        values = reply.gradients.values
        clients = self._answered(reply)
        learned = reply.examples > 0
        np.add.at(sums[ITEMS], requests.items, reply.gradients.rows[ITEMS])
        for name in sums:
            if name != ITEMS:
                sums[name] += values[name].sum(axis=0, dtype=np.float64)
        for place in np.flatnonzero(learned).tolist():
            own = values[TOKENS][place]
            embedding = values[EMBEDDING][place]
            self._third.register(clients[place], own.copy(), embedding.copy())
        return int(learned.sum())
