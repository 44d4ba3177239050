# SPDX-License-Identifier: Apache-2.0
"""GPFedRec's server (Zhang et al., KDD 2024, algorithm 1): a graph of users guides each of them.

A round: every client of the cohort names the items that it needs; for each of these the server
sends the shared embedding and the client's guidance, the mean over similar users' tables; the
client sends its changes of the rows. With X_v = E + the last change that v sent, S the cosines of
whole tables, and A the neighbours by S with equal weights,

    guidance of u = (A^layers X)_u,    E moves along the cohort's mean of (A^layers X)_u - E

by one step of `optimiser`; `sgd` with `server-lr = 1` is the paper's mean.

**What the server learns.** It keeps, under each client's id, the last change of that client's item
embeddings: which items it touched (among drawn negatives), and in which direction each moved, from
which its positives can be inferred. Clients of one neighbourhood see means of each other's rows;
the mean of a single neighbour is that neighbour's row. Secure aggregation cannot hide single
updates from a server that needs them, and the noise of DP-FedAvg is for a sum that is never made
here, so both are refused. Perturbation on the device (`[perturb]`) is possible.

Where this differs from the paper:

- Its public code takes cosine *distances* for similarities, so that a user's neighbours are those
  least like it. Here they are the most similar ones, each user itself among them.
- There everybody is in every round, and the graph is that of the round. Here it is of all who were
  in some round, by what they sent last; who was in none is guided by E.
- The weights of the paper's regulariser are in the step (`pull`). The paper adds Laplace noise to
  uploads as an option and states no epsilon of the whole run; it is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import Field

from fedrec.protocol.client_arrays import ClientArrays, ItemRequests
from strategies.base import Aggregate, Cohorts, Memory
from strategies.per_client._user_graph import Changes, Uploads, edges
from strategies.per_client.base import PerClientConfig, PerClientStrategy

ITEMS = "item.id"
GUIDE = "item.guide"


class GpfedrecStrategyConfig(PerClientConfig):
    """Settings of GPFedRec's server."""

    server_lr: float = Field(default=0.01, gt=0)
    """Server learning rate."""
    neighbours: int = Field(default=0, ge=0)
    """Number of most similar users, including the user itself, whose mean is the guidance; 0: all
    users whose similarity is above the mean (paper's code)."""
    layers: int = Field(default=1, ge=1)
    """Number of times that means over neighbours are taken (paper's code: 1)."""
    remembered: int | None = Field(default=None, ge=1)
    """Largest number of clients in the graph, the most recent ones; default: all. The server keeps
    an item table for each."""


class GpfedrecStrategy(PerClientStrategy):
    """Guides each client by similar clients; sees each client's update separately."""

    name = "gpfedrec"
    Config = GpfedrecStrategyConfig
    paper = "GPFedRec (Zhang et al. 2024), algorithm 1"
    config: GpfedrecStrategyConfig
    sees = (
        "strategy 'gpfedrec': its server keeps each client's item embeddings, under the client's id"
    )
    own_step = "gpfedrec"

    def __init__(
        self, config: GpfedrecStrategyConfig, cohorts: Cohorts, step: dict[str, Any]
    ) -> None:
        super().__init__(config, cohorts, step)
        self._uploads = Uploads(config.remembered)

    @property
    def memories(self) -> Mapping[str, Memory]:
        """Each client's last upload, and the optimiser."""
        return {"uploads/": self._uploads, **super().memories}

    @classmethod
    def remarks(
        cls, config: Any, step: Any, parameters: Mapping[str, np.ndarray], rounds: int
    ) -> list[str]:
        """Remarks to be reported with the results: what the server sees."""
        return [
            "GPFedRec: the server keeps each client's last change of the item embeddings under the"
            " client's id, and can tell the client's positives from it. No guarantee covers that."
        ]

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """Store each client's upload, and move along the mean of the cohort's new guidance."""
        if aggregate.each is None:
            return theta
        clients = aggregate.each.clients
        updates = aggregate.each.updates
        self._uploads.remember(updates.requests, updates.rows[ITEMS])
        return self._moved({ITEMS: -self._mean_guidance(clients)}, aggregate.round)

    def _mean_guidance(self, clients: np.ndarray) -> np.ndarray:
        """Mean over some clients of what their guidance differs from the shared embeddings,
        `float32 [items, d]`; those that are not remembered any more do not count."""
        changes = self._uploads.changes
        items = self._theta[ITEMS]
        if changes is None:
            return np.zeros(items.shape, dtype=np.float32)
        known = np.intersect1d(changes.clients, clients)
        return changes.mean(self._weights(changes, known).mean(axis=0), len(items))

    def _weights(self, changes: Changes, clients: np.ndarray) -> np.ndarray:
        """Of some remembered clients, each user's share in the guidance, `float64 [clients,
        users]`; each row sums to 1."""
        config = self.config
        start = np.asarray(self._theta[ITEMS])

        def neighbours(places: np.ndarray) -> np.ndarray:
            return edges(changes.similarities(places, start), config.neighbours)

        found = neighbours(np.searchsorted(changes.clients, clients))
        if config.layers > 1:
            between = neighbours(np.arange(len(changes.clients)))
            for _ in range(config.layers - 1):
                found = found @ between
        return found

    def sent(self, requests: ItemRequests) -> ClientArrays:
        """The rows that some clients start from, and their guidance: these rows for a client that
        is not remembered."""
        rows = np.asarray(self._theta[ITEMS])[requests.items].astype(np.float32)
        guide = rows.copy()
        changes = self._uploads.changes
        known = requests.clients[:0] if changes is None else changes.clients
        places = np.flatnonzero(np.isin(requests.clients, known))
        if changes is not None and len(places):
            asked = requests.take(places)
            weights = self._weights(changes, asked.clients)
            guide[requests.rows_of(places)] += changes.means_of_rows(weights, asked)
        return ClientArrays(requests, {}, {ITEMS: rows, GUIDE: guide})
