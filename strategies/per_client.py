# SPDX-License-Identifier: Apache-2.0
"""Strategies that send each client its own parameters: FedGNN, GPFedRec and MetaMF."""

import fnmatch
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from flwr.app import ArrayRecord
from pydantic import Field
from torch import Tensor

from fedrec.errors import ExperimentError
from fedrec.graphs import (
    COUNTS,
    EMBEDDING,
    NEIGHBOURS,
    TOKENS,
    ThirdParty,
    add_products,
    merge_rows,
    weighted_sums,
)
from fedrec.models.personal import generate
from fedrec.nn.layers import Adam
from fedrec.protocol.messages import TrainEach
from fedrec.protocol.serialization import to_record
from fedrec.protocol.updates import ClientArrays, ItemRequests
from strategies.base import Aggregate, Cohorts, CohortStrategy, ServerRate, server_rate

# PyTorch's Adam over named tensors, with a state that can be saved.


class _Optimiser:
    """Adam (Kingma and Ba 2015)."""

    def __init__(self) -> None:
        self._memory: dict[str, dict[str, Tensor]] = {}

    def step(
        self,
        values: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        rates: Mapping[str, float],
        decay: float = 0.0,
    ) -> None:
        """Update values in place, each with its own learning rate, and an L2 penalty that is added
        to the gradient."""
        groups: list[dict[str, Any]] = []
        for name, value in values.items():
            value.grad = gradients[name]
            groups.append({"params": [value], "lr": rates[name], "weight_decay": decay})
        optimiser = Adam(groups, fused=True)
        for name, value in values.items():
            if name in self._memory:
                optimiser.state[value] = self._memory[name]
        optimiser.step()
        self._memory = {
            name: {
                key: moment
                for key, moment in optimiser.state[value].items()
                if isinstance(moment, Tensor)
            }
            for name, value in values.items()
        }

    def state(self) -> dict[str, np.ndarray]:
        """Return the optimiser's state as named arrays."""
        return {
            f"{name}/{key}": v.numpy()
            for name, moments in self._memory.items()
            for key, v in moments.items()
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore what `state` returned."""
        self._memory = {}
        for key, array in state.items():
            name, _, part = key.rpartition("/")
            self._memory.setdefault(name, {})[part] = torch.from_numpy(np.array(array))


# Shared code of strategies that send each client its own parameters and need its reply separately.
#
# A round: every client of the cohort requests its items; the server sends it its parameters, one
# message per node; it replies with an update, under its id. No sum of updates is computed, so
# neither DP-FedAvg nor secure aggregation can cover these strategies.


class PerClientStrategy(CohortStrategy):
    """Base of strategies whose server sends each client its own parameters. A subclass makes these
    parameters in `sent`.

    Args:
        config: its settings.
        cohorts: the clients.
        step: name and settings of the local step that the clients run.

    Attributes:
        own_step: name of the only supported step; empty: any step whose clients start from their
            own parameters.
        remarks: notes to report with the results of a run, one paragraph each.
    """

    reply = "each"
    own_step: ClassVar[str] = ""
    remarks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: ServerRate, cohorts: Cohorts, step: dict[str, Any]) -> None:
        super().__init__(config, cohorts, step)
        self._optimiser = _Optimiser()
        self.memories = {"optimiser/": self._optimiser}

    @abstractmethod
    def sent(self, requests: ItemRequests) -> ClientArrays:
        """Make the parameters of a round's clients, with the rows of the items that they need."""

    def _sent(
        self, server_round: int, groups: Sequence[tuple[int, np.ndarray]], arrays: ArrayRecord
    ) -> Iterable[tuple[int, np.ndarray, ArrayRecord]]:
        """Make each node's parameters; nodes whose item request failed get none.

        Raises:
            ExperimentError: the step is not supported.
        """
        if self.own_step and self.step.get("name") != self.own_step:
            raise ExperimentError(
                f"strategy {self.own_step!r} supports only its own step",
                got=f"step {self.step.get('name')!r}",
                fix=f"set model.name and step.name to {self.own_step!r}",
            )
        asked = self.cohorts.item_requests(dict(groups), server_round)
        requests = ItemRequests.joined(list(asked.values()))
        client_arrays = self.sent(requests)
        for node, request in asked.items():
            rows = np.searchsorted(requests.clients, request.clients)
            yield node, request.clients, to_record(client_arrays.arranged(rows).arrays())

    def _moved(
        self, gradients: Mapping[str, np.ndarray], server_round: int
    ) -> dict[str, np.ndarray]:
        """Move the global parameters by one step of the optimiser along some gradients, at the
        round's rate."""
        values = {name: torch.from_numpy(np.array(self._theta[name])) for name in gradients}
        along = {n: torch.from_numpy(g.astype(np.float32)) for n, g in gradients.items()}
        rates = dict.fromkeys(gradients, server_rate(self.config, server_round))
        self._optimiser.step(values, along, rates)
        return {**self._theta, **{n: v.detach().numpy() for n, v in values.items()}}


# A graph of users by the similarity of their item embeddings, and means over it (Zhang et al., KDD
# 2024, equations 6 to 8).
#
# A user's table is the shared one and the user's last change of some of its rows, so that sums over
# whole tables come from the changes alone, which have far fewer rows.

_SPARE = 8  # rows per row of free memory


@dataclass(frozen=True, eq=False)
class _Changes:
    """Changes of item embeddings by users, ordered by item, then by user.

    Attributes:
        clients: `int64 [users]`, ascending.
        users: `int64 [n]`, position in `clients` of each row's user.
        items: `int64 [n]`, ascending.
        values: `float32 [n, d]`.
    """

    clients: np.ndarray
    users: np.ndarray
    items: np.ndarray
    values: np.ndarray

    @cached_property
    def _changed(self) -> tuple[np.ndarray, np.ndarray]:
        """Changed items, `int64 [m]`, ascending, and offsets of their rows, `int64 [m + 1]`."""
        return _starts(self.items)

    def products(self, ranks: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Inner products `float64 [k + 1, users]` of k users' changes, and of the shared table,
        with all users' changes.

        Args:
            ranks: `int64 [k]`, positions in `clients`, distinct.
            start: the shared table `[items, d]`.
        """
        items, starts = self._changed
        products = np.zeros((len(self.clients), len(ranks) + 1))
        column = np.full(len(self.clients), -1)
        column[ranks] = np.arange(len(ranks))
        shared = start[items].astype(np.float32, copy=False)
        add_products(starts, self.users, self.values, column, shared, products)
        return np.ascontiguousarray(products.T)

    @cached_property
    def _squares(self) -> np.ndarray:
        """Squared norms of the changes, `float64 [users]`."""
        squares = np.einsum("nd,nd->n", self.values, self.values)
        return np.bincount(self.users, squares, minlength=len(self.clients))

    def similarities(self, ranks: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Cosines `float64 [k, users]` between tables; 0 if one is zero.

        Args:
            ranks: `int64 [k]`, positions in `clients`, distinct.
            start: the shared table `[items, d]`.
        """
        shared = np.square(start, dtype=np.float64).sum()
        products = self.products(ranks, start)
        along = products[-1]
        inner = products[:-1] + (shared + along[ranks, None] + along)
        squares = np.maximum(shared + 2 * along + self._squares, 0)
        norms = np.maximum(np.sqrt(squares), 1e-12)
        return inner / norms[ranks, None] / norms

    def mean(self, weights: np.ndarray, items: int) -> np.ndarray:
        """Sum of the changes, weighted by user, `[users]`; `float32 [items, d]`."""
        return self._sums(np.arange(items), np.zeros(items, np.int64), weights[None])

    def means_of_rows(self, weights: np.ndarray, requests: ItemRequests) -> np.ndarray:
        """Weighted sums of the changes of the rows that each client needs.

        Args:
            weights: `[requests, users]`.
            requests: the n requested items.

        Returns:
            `float32 [n, d]`.
        """
        order = np.argsort(requests.items, kind="stable")
        means = np.empty((len(order), self.values.shape[1]), dtype=np.float32)
        means[order] = self._sums(requests.items[order], requests.owners[order], weights)
        return means

    def _sums(self, wanted: np.ndarray, asking: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Sums `float32 [n, d]` of the changes of items `int64 [n]`, ascending, by the weights
        `[requests, users]` of the request of each, `int64 [n]`."""
        items, asked = _starts(wanted)
        begins, ends = (np.searchsorted(self.items, items, side) for side in ("left", "right"))
        sums = np.zeros((len(wanted), self.values.shape[1]), dtype=np.float32)
        weights = weights.astype(np.float32)
        weighted_sums(begins, ends, self.users, self.values, asked, asking, weights, sums)
        return sums


def _starts(items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct items, `int64 [m]`, of ascending items `int64 [n]`, and their offsets `[m + 1]`."""
    distinct_items, starts = np.unique(items, return_index=True)
    return distinct_items, np.append(starts, len(items))


def _edges(similar: np.ndarray) -> np.ndarray:
    """Weights `[users, others]` of each user's neighbours, equal and with sum 1: all whose
    similarity is above the mean of `similar [users, others]`, or the most similar one if there is
    none."""
    above = similar > similar.mean(dtype=np.float64)
    lonely = np.flatnonzero(~above.any(axis=1))
    above[lonely, similar[lonely].argmax(axis=1)] = True
    return (above / above.sum(axis=1, keepdims=True)).astype(similar.dtype)


class _Uploads:
    """Last upload of each client: its changes to rows of the item embeddings.

    Args:
        limit: number of clients to remember, the most recent ones; None: all.

    Attributes:
        changes: the stored changes, or None; valid up to the next `remember`.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.changes: _Changes | None = None
        self._order = np.empty(0, dtype=np.int64)  # clients, most recent ones last
        # The values of the changes, from `_start` on, and free memory before or after them. The
        # system would clear a new array in each round.
        self._table = np.empty((0, 0), dtype=np.float32)
        self._start = 0

    def remember(self, requests: ItemRequests, values: np.ndarray) -> None:
        """Replace the changes of some clients.

        Args:
            requests: the clients in the order of their uploads, and the distinct items of each.
            values: `float32 [P, d]`, the changes of these items' rows.

        Raises:
            ValueError: native code would read beyond the end of an array.
        """
        old = self.changes
        if old is None:
            nothing = np.empty(0, dtype=np.int64)
            old = _Changes(nothing, nothing, nothing, values[:0])
        shape = len(requests.items), old.values.shape[1]
        if values.shape != shape:
            raise ValueError(f"Expected changes of shape {shape}, got {values.shape}.")
        before = self._order[~np.isin(self._order, requests.clients)]
        order = np.concatenate([before, requests.clients])
        order = order if self.limit is None else order[-self.limit :]
        new = np.flatnonzero(np.isin(requests.clients, order))
        rows = requests.rows_of(new)
        remaining = np.isin(old.clients, np.intersect1d(before, order))
        self._order = order
        self.changes = self._merged(old, remaining, requests.take(new), values, rows)

    def _merged(
        self,
        old: _Changes,
        remaining: np.ndarray,
        requests: ItemRequests,
        values: np.ndarray,
        rows: np.ndarray,
    ) -> _Changes:
        """Merge the stored changes of clients to keep, `bool [clients]`, with new changes, given as
        rows of `float32 [P, d]`, in the same memory."""
        clients = np.sort(np.concatenate([old.clients[remaining], requests.clients]))
        remain = np.flatnonzero(remaining[old.users])
        before = np.searchsorted(clients, old.clients)[old.users[remain]]
        new = np.searchsorted(clients, requests.clients)[requests.owners]
        users = np.concatenate([before, new])
        items = np.concatenate([old.items[remain], requests.items])
        # fast, as those from before are in this order already
        order = np.argsort(items * len(clients) + users, kind="stable")
        needed = len(old.values) + len(rows)
        if self.changes is None or len(self._table) < needed:
            size = needed + needed // _SPARE
            self._table = np.empty((size, values.shape[1]), dtype=np.float32)
            self._table[: len(old.values)] = old.values
            self._start = 0
        sources = np.concatenate([remain, len(old.values) + rows])[order]
        self._start = merge_rows(self._table, self._start, len(old.values), values, sources)
        table = self._table[self._start : self._start + len(order)]
        return _Changes(clients, users[order], items[order], table)

    def state(self) -> dict[str, np.ndarray]:
        """Return the state as named arrays, in the order of the uploads."""
        if self.changes is None:
            return {}
        changes = self.changes
        ranks = np.argsort(self._order)[changes.users]  # whose each row is, in that order
        rows = np.argsort(ranks, kind="stable")  # of each client by item, as they are here
        return {
            "clients": self._order,
            "counts": np.bincount(ranks, minlength=len(self._order)),
            "rows": changes.items[rows],
            "changes": changes.values[rows],
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore what `state` returned."""
        self.changes = None
        self._order = self._order[:0]
        if "clients" in state:
            offsets = np.concatenate([[0], np.cumsum(state["counts"])])
            requests = ItemRequests(state["clients"], offsets, state["rows"])
            self.remember(requests, state["changes"])


# FedGNN's server (Wu et al. 2021, algorithm 1), and the messages that it forwards to and from the
# third party.
#
# A round: every client of the cohort requests items, its own among negatives; the server sends
# their rows and the shared layers, and the third party neighbours of the client's items; the client
# sends clipped gradients. Rows and layers move along the mean over the cohort, by one step of Adam.
#
# **Who learns what.** The server sees each client's message separately, with the rows that it
# names. The third party sees tokens and user embeddings (`fedrec.graphs`). In this simulation it is
# part of the server's process, which forwards both without reading them; a real third party would
# be separate, and devices would encrypt their messages to it. A party with both, and the key,
# learns all users' items. DP-FedAvg adds noise to a sum, so `[privacy]` raises an error, and so
# does secure aggregation.
#
# Where this differs from the paper: neighbours are looked up in every round, from the last messages
# of the devices, and not once after some rounds of training without them; a client without an
# earlier round has no neighbours.

ITEMS = "item.id"
LAYERS = ("items.", "users.")


class FedgnnStrategyConfig(ServerRate):
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
    """FedGNN: averages gradients of local graphs; the third party finds neighbours."""

    name = "fedgnn"
    Config = FedgnnStrategyConfig
    paper = "FedGNN (Wu et al. 2021), algorithm 1"
    config: FedgnnStrategyConfig
    own_step = "fedgnn"
    remarks = (
        "FedGNN: no guarantee covers the row numbers in a client's messages, the tokens of its"
        " items and its user embedding.",
        "FedGNN: messages had no noise; their values have no guarantee either.",
    )

    def __init__(
        self, config: FedgnnStrategyConfig, cohorts: Cohorts, step: dict[str, Any]
    ) -> None:
        super().__init__(config, cohorts, step)
        self._third = ThirdParty(config.neighbours)
        self.memories |= {"third/": self._third}

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """Forward the messages to the third party, and step along the mean of the clients with
        examples; without any the parameters stay."""
        each = aggregate.each
        learned = 0 if each is None else int((each.examples > 0).sum())
        if each is None or not learned:
            return theta
        updates = each.updates
        for index in np.flatnonzero(each.examples).tolist():
            client_tokens = updates.values[TOKENS][index]
            embedding = updates.values[EMBEDDING][index]
            self._third.register(int(each.clients[index]), client_tokens.copy(), embedding.copy())
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
        """Make the parameters of some clients: rows, layers, neighbours, and space for messages to
        the third party."""
        clients = requests.clients.tolist()
        slots = self.config.history
        table = np.asarray(self._theta[ITEMS])
        given, counts = self._third.matched(clients, slots, table.shape[1])
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


# GPFedRec's server (Zhang et al., KDD 2024, algorithm 1): a graph of users guides each of them.
#
# A round: every client of the cohort requests items; for each of these the server sends the shared
# embedding and the client's guidance, the mean over similar users' tables; the client sends its
# changes of the rows. With X_v = E + the last change that v sent, S the cosines of whole tables,
# and A the neighbours by S with equal weights (those above the mean of S),
#
#     guidance of u = (A X)_u,    E moves along the cohort's mean of (A X)_u - E
#
# by one step of Adam.
#
# **What the server learns.** It keeps, under each client's id, the last change of that client's
# item embeddings: which items it touched (among drawn negatives), and in which direction each
# moved, from which its positives can be inferred. Clients of one neighbourhood see means of each
# other's rows; the mean of a single neighbour is that neighbour's row. Secure aggregation cannot
# hide single updates from a server that needs them, and DP-FedAvg adds noise to a sum, which is
# never computed here, so both raise an error. Perturbation on the device (`[perturb]`) is possible.
#
# Where this differs from the paper:
#
# - Its public code takes cosine *distances* for similarities, so that a user's neighbours are those
#   least like it. Here they are the most similar ones, each user itself among them.
# - There everybody is in every round, and the graph is that of the round. Here it is of all who
#   were in some round, by what they sent last; who was in none is guided by E.
# - There E becomes the mean itself.
# - The weights of the paper's regulariser are in the step (`pull`). The paper adds Laplace noise to
#   uploads as an option and states no epsilon of the whole run; it is left out.

GUIDE = "item.guide"


class GpfedrecStrategyConfig(ServerRate):
    """Settings of GPFedRec's server."""

    server_lr: float = Field(default=0.01, gt=0)
    """Server learning rate."""
    remembered: int | None = Field(default=None, ge=1)
    """Largest number of clients in the graph, the most recent ones; default: all. The server keeps
    an item table for each."""


class GpfedrecStrategy(PerClientStrategy):
    """GPFedRec: guides each client by similar clients, and sees each client's update."""

    name = "gpfedrec"
    Config = GpfedrecStrategyConfig
    paper = "GPFedRec (Zhang et al. 2024), algorithm 1"
    config: GpfedrecStrategyConfig
    own_step = "gpfedrec"
    remarks = (
        "GPFedRec: the server keeps each client's last change of the item embeddings under the"
        " client's id, and can tell the client's positives from it. No guarantee covers that.",
    )

    def __init__(
        self, config: GpfedrecStrategyConfig, cohorts: Cohorts, step: dict[str, Any]
    ) -> None:
        super().__init__(config, cohorts, step)
        self._uploads = _Uploads(config.remembered)
        self.memories |= {"uploads/": self._uploads}

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """Store each client's upload, and move along the mean of the cohort's new guidance."""
        if aggregate.each is None:
            return theta
        clients = aggregate.each.clients
        updates = aggregate.each.updates
        self._uploads.remember(updates.requests, updates.rows[ITEMS])
        return self._moved({ITEMS: -self._mean_guidance(clients)}, aggregate.round)

    def _mean_guidance(self, clients: np.ndarray) -> np.ndarray:
        """Mean difference between the guidance of some clients and the shared embeddings, `float32
        [items, d]`; clients no longer stored do not count."""
        changes = self._uploads.changes
        items = self._theta[ITEMS]
        if changes is None:
            return np.zeros(items.shape, dtype=np.float32)
        known = np.intersect1d(changes.clients, clients)
        return changes.mean(self._weights(changes, known).mean(axis=0), len(items))

    def _weights(self, changes: _Changes, clients: np.ndarray) -> np.ndarray:
        """Share of each user in the guidance of some stored clients, `float64 [clients, users]`;
        each row sums to 1."""
        ranks = np.searchsorted(changes.clients, clients)
        return _edges(changes.similarities(ranks, np.asarray(self._theta[ITEMS])))

    def sent(self, requests: ItemRequests) -> ClientArrays:
        """Make the rows that some clients start from, and their guidance: these rows for a client
        without a stored upload."""
        rows = np.asarray(self._theta[ITEMS])[requests.items].astype(np.float32)
        guide = rows.copy()
        changes = self._uploads.changes
        known = requests.clients[:0] if changes is None else changes.clients
        indices = np.flatnonzero(np.isin(requests.clients, known))
        if changes is not None and len(indices):
            asked = requests.take(indices)
            weights = self._weights(changes, asked.clients)
            guide[requests.rows_of(indices)] += changes.means_of_rows(weights, asked)
        return ClientArrays(requests, {}, {ITEMS: rows, GUIDE: guide})


# MetaMF: meta matrix factorization as a federated system (Lin et al. 2020).
#
# A round: every client of the cohort requests its items; the server generates its private
# parameters, the rows of these items only; the client replies with the gradient g_c of its mean
# loss with respect to them; the server back-propagates the gradients through its generator and
# takes one step of its optimiser:
#
#     gradient of the generator = sum_c n_c J_c^T g_c / sum_c n_c
#
# with J_c the Jacobian of client c's generated parameters with respect to the generator. This is
# the gradient of the mean loss over the cohort's examples, as in central training.
#
# What the server learns: it knows each client by its user id, sees which items each one needs in a
# round (with ranking, among the drawn negatives) and each one's gradient, from which ratings can be
# computed. The generated parameters are hidden from other clients, not from the server. Secure
# aggregation cannot hide single gradients from a server that needs each of them, and DP-FedAvg adds
# noise to a sum, which is never computed here, so both raise an error. Perturbation on the device
# (`[perturb]`) is possible.
#
# Where this differs from the paper: there, clients get their whole item embeddings. The non-zero
# rows of a gradient reveal the same as naming the items before. Adam moves every row of the
# catalogue in each round, touched or not.

LOW = "item.low"


class MetaMfStrategyConfig(ServerRate):
    """Settings of the server in meta matrix factorization."""

    server_lr: float = Field(default=0.001, gt=0)
    """Server learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """L2 penalty added to the gradient of each parameter."""
    rates: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Factors on the learning rate by pattern of parameter names, such as `{"user.id" = 3.0}`; of
    several matches, the largest applies."""


class MetaMfStrategy(PerClientStrategy):
    """MetaMF: generates each client's parameters and learns from each client's gradient. The global
    parameters never leave the server."""

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
        """Generate the parameters of some clients.

        Args:
            theta: the global parameters.
            clients: `int64 [clients]`, ascending.
            requests: the items whose rows each client needs; None: whole tables.
        """
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
        parameters stay."""
        if aggregate.each is None:
            return theta
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
            along = dict(zip(moved, gradients, strict=True))
            self._optimiser.step(moved, along, rates, self.config.weight_decay)
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
