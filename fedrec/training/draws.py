# SPDX-License-Identifier: Apache-2.0
"""Descriptions of the random draws of clients' local work: all clients of a block are drawn in one
call of compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedrec.data.client_data import ClientData, draw_negatives
from fedrec.data.interactions import RecencyConfig, Schema, time_weighted
from fedrec.data.population import Population
from fedrec.device import on_device
from fedrec.sums.products import transitions
from fedrec.training.block import UNLIMITED, Batches, Block, width_of

Ragged = tuple[np.ndarray, np.ndarray]
"""Offsets `int64 [C + 1]`, and `int64 [n]`, the numbers of each client after those of the one
before."""


@dataclass(frozen=True)
class ExampleDraw:
    """A client's labelled examples, in batches: its rows, which of a ranking are the positive ones,
    and negatives.

    A client that likes the whole catalogue has no negatives; it is no error, or its data would
    decide whether a private run ends.

    Attributes:
        epochs: passes over the examples; 0: none are drawn.
        batch_size: examples per step at most.
        negatives: items per positive that are drawn outside the positives (ranking only).
        low_rated: whether rows that are not positive are negatives, too (ranking only).
        shuffled: whether each epoch has an order of its own.
        together: see `Batches`.
        numbered: whether items are rows of item tables, see `Block.rows`.
    """

    together: ClassVar[int] = Batches.together
    numbered: ClassVar[bool] = True
    epochs: int
    batch_size: int
    negatives: int = 0
    low_rated: bool = False
    shuffled: bool = True

    def of(self, population: Population, clients: np.ndarray) -> ClientExamples:
        """The examples of some clients, `int64 [clients]`."""
        rows = population.rows(clients)
        ranking = population.task == "ranking"
        liked = rows.where(rows.labels > 0) if ranking else rows
        chosen = rows if self.low_rated else liked
        avoided = population.rows(clients, "all") if population.partition.leaky_negatives else liked
        items = chosen.lists, chosen.labels
        counts = np.diff(liked.offsets) if ranking else np.zeros(len(clients), np.int64)
        return ClientExamples.of(
            self, *items, avoided.lists, counts, population.interactions.num_items
        )

    def batches(self, data: ClientData, schema: Schema, random: np.random.Generator) -> Batches:
        """The batches of one client, drawn from its stream as a block's are."""
        if not self.epochs:
            return Batches.cut([], self.batch_size)
        items, labels = self.examples(data, schema, random)
        orders = [
            random.permutation(len(items)) if self.shuffled else slice(None)
            for _ in range(self.epochs)
        ]
        return Batches.cut([(items[order], labels[order]) for order in orders], self.batch_size)

    def examples(
        self, data: ClientData, schema: Schema, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """The examples of one client in no order: items `int64 [n]` and labels `float32 [n]`."""
        ranking = schema.task == "ranking"
        liked = data.labels > 0
        chosen = liked if ranking and not self.low_rated else slice(None)
        known = data.never_negative
        count = (
            self.negatives * int(liked.sum()) if ranking and len(known) < schema.num_items else 0
        )
        drawn = draw_negatives(known, schema.num_items, count, random) if count else known[:0]
        negative = np.zeros(count, dtype=np.float32)
        return (
            np.concatenate([data.items[chosen], drawn]),
            np.concatenate([data.labels[chosen], negative]),
        )


@dataclass(frozen=True)
class PreferenceDraw(ExampleDraw):
    """All positive items of a client as one batch, with its preferences for them as labels
    (`ClientData.amounts`); nothing is drawn.

    Attributes:
        epochs: 0 or 1.
    """

    batch_size: int = UNLIMITED
    shuffled: bool = False

    def of(self, population: Population, clients: np.ndarray) -> ClientExamples:
        """The preferences of some clients."""
        rows = population.rows(clients)
        liked = rows.labels > 0
        if population.task == "rating":  # one of 0 or less belongs to a positive item, too
            liked |= ~np.isin(rows.pairs, rows.pairs[liked])
        rows = rows.where(liked)
        owner, items, amounts = time_weighted(rows.owner, rows.items, rows.ratings, rows.times)
        ends = np.searchsorted(owner, np.arange(len(clients) + 1))
        return self._without_negatives(ends, items, amounts, population)

    def batches(self, data: ClientData, schema: Schema, random: np.random.Generator) -> Batches:
        """Batches of one client."""
        return Batches.whole([(data.positives, data.amounts(rated=True))] * self.epochs)

    def _without_negatives(
        self, offsets: np.ndarray, items: np.ndarray, labels: np.ndarray, population: Population
    ) -> ClientExamples:
        """The examples of clients whose rows are these, ragged."""
        none = np.zeros(len(offsets), np.int64)
        given = labels, (none, none[:0]), none[:-1], population.interactions.num_items
        return ClientExamples.of(self, (offsets, items), *given)


@dataclass(frozen=True)
class WeightedDraw(PreferenceDraw):
    """All items of a client as one batch, with weights as labels: 1 for positive ones, `others` for
    rated ones that are not, which 0 leaves out."""

    # one batch, whose rows are read once, and the moments of many clients summed by item
    together = 128
    others: float = 0.0

    def of(self, population: Population, clients: np.ndarray) -> ClientExamples:
        """The weighted items of some clients."""
        return self._without_negatives(*population.weighted_items(clients, self.others), population)

    def batches(self, data: ClientData, schema: Schema, random: np.random.Generator) -> Batches:
        """Batches of one client."""
        return Batches.whole([data.weighted_items(self.others)] * self.epochs)


@dataclass(frozen=True, kw_only=True)
class TransitionsDraw(PreferenceDraw):
    """The transitions of a client's sequence (`fedrec.sums.products`) as one batch: numbers of
    pairs of items, the first one times the catalogue plus the second, with weights as labels.

    Attributes:
        recency: window and decay.
    """

    together = WeightedDraw.together
    numbered = False
    recency: RecencyConfig

    def of(self, population: Population, clients: np.ndarray) -> ClientExamples:
        """The transitions of some clients."""
        sequences = population.rows(clients, positive=True).sequences()
        pairs = self._pairs(*sequences, population.interactions.num_items)
        return self._without_negatives(*pairs, population)

    def batches(self, data: ClientData, schema: Schema, random: np.random.Generator) -> Batches:
        """Batches of one client."""
        if not self.epochs:
            return Batches.none()
        sequence = data.sequence()
        pairs = self._pairs(np.array([0, len(sequence)]), sequence, schema.num_items)
        return Batches.whole([pairs[1:]])

    def _pairs(
        self, offsets: np.ndarray, items: np.ndarray, catalogue: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Offsets, numbers of pairs and weights of sequences."""
        pairs = transitions(offsets, items, catalogue, self.recency)
        return pairs.offsets, pairs.first * catalogue + pairs.second, pairs.weights


@dataclass(frozen=True, eq=False)
class ClientExamples:
    """The examples that some clients will draw.

    Attributes:
        draw: the description.
        rows: the items of their rows.
        labels: `float32 [n]`, of these.
        avoided: items that are no negatives; they may repeat.
        negatives: `int64 [C]`, how many a client draws.
        num_items: of the catalogue.
        counts: `int64 [C]`, number of examples in an epoch.
        epoch: `int64 [C]`, number of steps in an epoch.
        widths: `int64 [C]`, see `width_of`.
    """

    draw: ExampleDraw
    rows: Ragged
    labels: np.ndarray
    avoided: Ragged
    negatives: np.ndarray
    num_items: int
    counts: np.ndarray
    epoch: np.ndarray
    widths: np.ndarray

    @classmethod
    def of(
        cls,
        draw: ExampleDraw,
        rows: Ragged,
        labels: np.ndarray,
        avoided: Ragged,
        positives: np.ndarray,
        num_items: int,
    ) -> ClientExamples:
        """Sizes for clients with so many positive rows, `int64 [C]`."""
        negatives = draw.negatives * positives
        for client in np.flatnonzero(np.diff(avoided[0]) >= num_items):
            known = avoided[1][slice(*avoided[0][client : client + 2])]
            if len(np.unique(known)) >= num_items:
                negatives[client] = 0
        counts = (np.diff(rows[0]) + negatives) * (draw.epochs > 0)
        widths = width_of(draw.batch_size, counts)
        sizes = counts, -(-counts // widths), widths
        return cls(draw, rows, labels, avoided, negatives, num_items, *sizes)

    @property
    def steps(self) -> np.ndarray:
        """`int64 [C]`: number of steps of each client."""
        return self.epoch * self.draw.epochs

    def block(
        self,
        clients: np.ndarray,
        states: np.ndarray,
        users: Sequence[np.ndarray],
        device: torch.device,
    ) -> Block:
        """Draw a block.

        Args:
            clients: `int64 [C]`, which; those with the most steps first.
            states: of their streams (`fedrec.rng.streams`), changed in place.
            users: per user feature the clients' category codes, `int64 [C, width]`.
            device: device of the tensors.
        """
        drawn = self.drawn(clients, states)
        laid_out = _in_compiled_code if device.type == "cpu" else _on_device
        return Block.given(
            [on_device(codes, device) for codes in users],
            drawn.steps,
            [*laid_out(drawn, device), on_device(drawn.touched, device)],
            drawn.touched_counts,
            drawn.counts,
            drawn.epoch,
        )

    def drawn(self, clients: np.ndarray, states: np.ndarray) -> _Drawn:
        """The draws of a block of clients, `int64 [C]`, from the states of their streams,
        `uint64 [C, 6]`, changed in place; it needs no device, and hardly Python's lock."""
        from fedrec.kernel.draws import draw  # imports Numba
        from fedrec.kernel.rows import number_items

        of = self.draw
        counts = self.counts[clients]
        items = np.empty(int(counts.sum()), np.int64)
        labels = np.empty(len(items), np.float32)
        orders = np.empty(len(items) * of.epochs, np.int32)
        given = (*self.rows, self.labels), self.avoided, self.num_items, self.negatives
        draw(states, clients, *given, of.epochs, of.shuffled, (items, labels), orders)
        references = items if of.numbered else np.zeros_like(items)
        touched, touched_counts, numbers = number_items(references, np.cumsum(counts))
        width = int(self.widths[clients].max(initial=0))
        pools = items, labels, numbers
        sizes = counts, self.epoch[clients], of.epochs, width
        return _Drawn(pools, orders, touched, touched_counts, *sizes)


class _Drawn(NamedTuple):
    """A block as it was drawn; see `fedrec.kernel.draws.draw`.

    Attributes:
        pools: items, labels, and numbers of the items among those of their client, `[P]` each.
        orders: `int32 [Q]`.
        touched: `int64 [C, R]`, see `Block`.
        touched_counts: `int64 [C]`.
        counts: `int64 [C]`, examples in an epoch.
        epoch: `int64 [C]`, steps in an epoch.
        epochs: how many.
        width: examples of a step.
    """

    pools: tuple[np.ndarray, np.ndarray, np.ndarray]
    orders: np.ndarray
    touched: np.ndarray
    touched_counts: np.ndarray
    counts: np.ndarray
    epoch: np.ndarray
    epochs: int
    width: int

    @property
    def steps(self) -> np.ndarray:
        """`int64 [C]`: number of steps of each client."""
        return self.epoch * self.epochs

    @property
    def shape(self) -> tuple[int, int, int]:
        """`[S, C, B]`."""
        return int(self.steps.max(initial=0)), len(self.counts), self.width


def _in_compiled_code(drawn: _Drawn, device: torch.device) -> list[Tensor]:
    """Items, rows, labels and sizes of a block, see `Block`."""
    from fedrec.kernel.draws import lay_out

    kinds = (np.int64, np.int64, np.float32)
    batches = [np.zeros(drawn.shape, kind) for kind in kinds]
    sizes = np.zeros(drawn.shape[:2], np.int64)
    counts = drawn.counts, drawn.epochs
    lay_out(drawn.orders, drawn.pools, *counts, drawn.touched.shape[1], (*batches, sizes))
    return [torch.from_numpy(part) for part in (*batches, sizes)]


def _on_device(drawn: _Drawn, device: torch.device) -> list[Tensor]:
    """The layout by operations of the device, to which only what was drawn is copied."""
    steps, clients, width = drawn.shape
    counts = on_device(drawn.counts, device)
    epoch = on_device(drawn.epoch, device)
    items, labels, numbers = (on_device(part, device) for part in drawn.pools)
    orders = on_device(drawn.orders, device).long()
    every = torch.arange(clients, device=device)
    owner = every.repeat_interleave(counts * drawn.epochs, output_size=len(orders))
    begins = counts.cumsum(0) - counts
    position = torch.arange(len(orders), device=device) - (begins * drawn.epochs)[owner]
    within = position % counts[owner]
    step = position // counts[owner] * epoch[owner] + within // width
    target = (step * clients + owner) * width + within % width
    source = orders + begins[owner]
    first = every * drawn.touched.shape[1]
    rows = first[:, None].expand(drawn.shape).flatten()
    rows.index_copy_(0, target, numbers[source] + first[owner])
    laid_out = [
        values.new_zeros(rows.shape).index_copy_(0, target, values[source])
        for values in (items, labels)
    ]
    number = torch.arange(steps, device=device)[:, None]
    left = counts - number % epoch.clamp(min=1) * width
    sizes = torch.where(number < epoch * drawn.epochs, left.clamp(max=width), 0)
    flat = (laid_out[0], rows, laid_out[1])
    return [*(part.view(drawn.shape) for part in flat), sizes]
