# SPDX-License-Identifier: Apache-2.0
"""Orders of the server and replies of nodes, before `fedrec.protocol.messages` packs them into
records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fedrec.privacy.clipping import Protection
from fedrec.protocol.client_arrays import ClientArrays
from fedrec.protocol.secure import MaskOrder
from fedrec.protocol.updates import Change

Weighting = Literal["uniform", "examples"]
Reply = Literal["sum", "each"]
"""Reply of a node: the sum of its clients' updates, or the update of each."""
HeldOutPart = Literal["test", "validation"]
Purpose = Literal["train", "evaluate", "validate"]


@dataclass(frozen=True, eq=False)
class TrainOrder:
    """An order to train clients in a round.

    Attributes:
        round: number of the round, from 1; 0 when the server gives none.
        clients: `int64 [clients]`, which of its clients train; None: all training clients it hosts,
            answered in standard form.
        weighting: an update enters the sum with weight 1 (`uniform`) or with its number of
            examples.
        step: name and settings of the local step; None: the experiment's own.
        overrides: additional settings of some of Flower's strategies, such as FedProx's
            `proximal-mu`.
        protection: clip and noise of each client's update; all clients then have weight 1.
        each: whether to reply with the update of each client, not their sum.
        secure: how the sum is masked, under secure aggregation.
    """

    round: int = 0
    clients: np.ndarray | None = None
    weighting: Weighting = "uniform"
    step: dict[str, Any] | None = None
    overrides: Mapping[str, float] | None = None
    protection: Protection | None = None
    each: bool = False
    secure: MaskOrder | None = None


@dataclass(frozen=True, eq=False)
class TrainEach:
    """Updates of single clients.

    Attributes:
        updates: each client's update; of item tables the rows that may have changed.
        examples: `int64 [C]`, number of examples of each client.
        losses: `float64 [C]`, each one's mean loss; NaN without examples.
    """

    updates: ClientArrays
    examples: np.ndarray
    losses: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[TrainEach]) -> TrainEach:
        """Join several blocks or nodes; clients are ascending."""
        updates = ClientArrays.joined([part.updates for part in parts])
        clients = np.concatenate([updates.requests.clients[:0], *(part.clients for part in parts)])
        order = np.argsort(clients)
        examples = np.concatenate([np.empty(0, np.int64), *(part.examples for part in parts)])
        losses = np.concatenate([np.empty(0), *(part.losses for part in parts)])
        return cls(updates, examples[order], losses[order])

    @property
    def clients(self) -> np.ndarray:
        """Client ids, `int64 [C]`, ascending."""
        return self.updates.requests.clients

    def take(self, indices: np.ndarray) -> TrainEach:
        """Select the clients at the given positions, `int64 [n]`."""
        return TrainEach(self.updates.take(indices), self.examples[indices], self.losses[indices])

    def changes(self, name: str, table: np.ndarray) -> list[Change]:
        """Each client's update of one parameter, in the order of the clients; `table` is its value
        before, `[...]`. Zero for a parameter that clients keep private."""
        return self.updates.changes(name, table)


@dataclass(frozen=True, eq=False)
class ItemQuery:
    """A request for the items of clients, before parameters are generated for them.

    Attributes:
        round: number of the round.
        clients: `int64 [clients]`, ascending.
        purpose: the items that they train on in this round, those of the held-out rows that the
            experiment evaluates, or those of their validation rows.
        step: name and settings of the local step.
    """

    round: int
    clients: np.ndarray
    purpose: Purpose
    step: dict[str, Any]


@dataclass(frozen=True, eq=False)
class SentUpdate:
    """A client's compressed update.

    Attributes:
        payloads: arrays sent for each parameter, by name.
        share: factor of the update in the sum.
    """

    payloads: Mapping[str, Mapping[str, np.ndarray]]
    share: float = 1.0


@dataclass(frozen=True, eq=False)
class TrainSum:
    """A node's sum over the clients that it trained.

    Attributes:
        total: weighted sum of the clients' updates, per parameter; only the changed rows of a table
            with few of them.
        clients: number of clients in it.
        weight: sum of their weights.
        examples: sum of their numbers of examples.
        loss: sum of the losses of clients with training examples.
        losses: number of clients with training examples.
        sent: bytes that its clients would send, each as a separate device (`compact`); 0 if not
            reported.
        updates: the compressed updates, which are sent in place of their sum if they are shorter;
            None: the sum is sent.
    """

    total: dict[str, Change]
    clients: int
    weight: float
    examples: int
    loss: float
    losses: int
    sent: int = 0
    updates: Sequence[SentUpdate] | None = None


@dataclass(frozen=True, eq=False)
class EvaluateOrder:
    """An order to evaluate clients.

    Attributes:
        round: number of the round after which this is.
        clients: `int64 [clients]`, which of its clients; None: all it hosts that have held-out
            rows, answered in standard form.
        step: the local step of on-device fine-tuning; None: the experiment's own.
        each: whether parameters are generated for each client.
        held_out: which held-out rows are ranked; None: those that the experiment evaluates.
        sums: whether to compute the sums over clients that list metrics need.
    """

    round: int = 0
    clients: np.ndarray | None = None
    step: dict[str, Any] | None = None
    each: bool = False
    held_out: HeldOutPart | None = None
    sums: bool = False


@dataclass(frozen=True, eq=False)
class Presence:
    """A node's description of itself.

    Attributes:
        partition: the node's position among the nodes.
        training: `int64 [clients]`, clients it hosts that may be sampled for training.
        evaluated: `int64 [clients]`, clients it hosts that have held-out rows.
        work: `int64 [clients]`, number of training rows of each of `training`, reported only by
            nodes of a simulation that hold all clients' data and may train each other's clients.
            None: only the host can train a client.
        paths: training path for each of the experiment's steps, by the step's name, if reported;
        validated: `int64 [clients]`, clients it hosts that have validation rows; reported only with
            early stopping.
    """

    partition: int
    training: np.ndarray
    evaluated: np.ndarray
    work: np.ndarray | None = None
    paths: Mapping[str, str] = field(default_factory=dict)
    validated: np.ndarray | None = None
