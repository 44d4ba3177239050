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

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from pydantic import Field

from fedrec.graphs.third_party import ThirdParty
from fedrec.protocol.client_arrays import ClientArrays, ItemRequests
from strategies.base import Aggregate, Cohorts, Memory
from strategies.per_client.base import PerClientConfig, PerClientStrategy

ITEMS = "item.id"
LAYERS = ("items.", "users.")
NEIGHBOURS = "third.neighbours"
COUNTS = "third.counts"
TOKENS = "third.tokens"
EMBEDDING = "third.user"


class FedgnnStrategyConfig(PerClientConfig):
    """Settings of FedGNN's server and third party."""

    server_lr: float = Field(default=0.01, gt=0)
    """Server learning rate."""
    history: int = Field(default=50, ge=1)
    """Largest number of items in a client's local graph (paper's code: 100); of more items, evenly
    spaced ones are used."""
    neighbours: int = Field(default=5, ge=0)
    """Largest number of neighbours per item (paper's code: 100); 0: local graphs without
    neighbours."""


class FedgnnStrategy(PerClientStrategy):
    """Averages gradients of local graphs; the third party finds neighbours."""

    name = "fedgnn"
    Config = FedgnnStrategyConfig
    paper = "FedGNN (Wu et al. 2021), algorithm 1"
    config: FedgnnStrategyConfig
    sees = "strategy 'fedgnn': its server needs each client's message separately"
    instead = "set step.noise and step.clip, or choose another system"
    own_step = "fedgnn"

    def __init__(
        self, config: FedgnnStrategyConfig, cohorts: Cohorts, step: dict[str, Any]
    ) -> None:
        super().__init__(config, cohorts, step)
        self._third = ThirdParty(config.neighbours)

    @property
    def memories(self) -> Mapping[str, Memory]:
        """The messages to the third party, and the optimiser."""
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

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """Forward the messages to the third party, and step along the mean of the clients that had
        examples; without any the parameters stay."""
        each = aggregate.each
        learned = 0 if each is None else int((each.examples > 0).sum())
        if each is None or not learned:
            return theta
        updates = each.updates
        for place in np.flatnonzero(each.examples).tolist():
            own = updates.values[TOKENS][place]
            embedding = updates.values[EMBEDDING][place]
            self._third.register(int(each.clients[place]), own.copy(), embedding.copy())
        names = [name for name in theta if name == ITEMS or name.startswith(LAYERS)]
        sums = {name: np.zeros(theta[name].shape) for name in names}
        rows = torch.from_numpy(updates.requests.items)
        changes = torch.tensor(updates.rows[ITEMS], dtype=torch.float64)
        torch.from_numpy(sums[ITEMS]).index_add_(0, rows, changes)
        for name in names:
            if name != ITEMS:
                sums[name] += updates.values[name].sum(axis=0, dtype=np.float64)
        means = {name: -total / learned for name, total in sums.items()}
        return self._moved(means, aggregate.round)

    def sent(self, requests: ItemRequests) -> ClientArrays:
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
        return ClientArrays(requests, {**layers, **third, **room}, {ITEMS: table[requests.items]})
