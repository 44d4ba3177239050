# SPDX-License-Identifier: Apache-2.0
"""A block of clients that are trained together, and the padded batches of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from fedrec.data.client_data import ClientData
from fedrec.device import on_device
from fedrec.protocol.updates import ItemRequests

_NARROW = 512  # examples; padding up to here is cheaper than blocks of fewer clients
UNLIMITED = 1 << 40
"""Examples of a batch, more than any client has."""


@dataclass(frozen=True, eq=False)
class Batches:
    """All batches of a client's local work, in order.

    Attributes:
        items: `int64 [S, B]`, S gradient steps of at most B examples; places beyond a batch's size
            hold 0.
        labels: `float32 [S, B]`.
        sizes: `int64 [S]`, number of examples in each batch, in `[0, B]`.
        examples: number of examples in the last epoch.
        last_epoch: number of steps in the last epoch.
        together: largest number of clients of a block on a processor, unless compiled code takes
            one after the other: more do not fit into its cache, from which several gradient steps
            read them again.
    """

    together: ClassVar[int] = 16

    items: np.ndarray
    labels: np.ndarray
    sizes: np.ndarray
    examples: int
    last_epoch: int

    @classmethod
    def cut(cls, epochs: Sequence[tuple[np.ndarray, np.ndarray]], batch_size: int) -> Batches:
        """Cut each epoch's (items `int64 [n]`, labels `float32 [n]`), already in the order of
        training, into batches; the last may be smaller.

        If the batch size is far larger than the client's data, as for a step on all examples, the
        rectangle is narrower.
        """
        longest = max((len(items) for items, _ in epochs), default=0)
        batch_size = int(width_of(batch_size, np.array(longest)))
        steps = [-(-len(items) // batch_size) for items, _ in epochs]
        total = sum(steps)
        items = np.zeros(total * batch_size, dtype=np.int64)
        labels = np.zeros(total * batch_size, dtype=np.float32)
        sizes = np.full(total, batch_size, dtype=np.int64)
        end = 0
        for (epoch_items, epoch_labels), count in zip(epochs, steps, strict=True):
            start = end * batch_size
            end += count
            length = len(epoch_items)
            items[start : start + length] = epoch_items
            labels[start : start + length] = epoch_labels
            if count:
                sizes[end - 1] = length - (count - 1) * batch_size
        shape = total, batch_size
        return cls(
            items.reshape(shape),
            labels.reshape(shape),
            sizes,
            len(epochs[-1][0]) if epochs else 0,
            steps[-1] if steps else 0,
        )

    @classmethod
    def none(cls) -> Batches:
        """No batches."""
        items = np.zeros((0, 0), dtype=np.int64)
        return Batches(items, items.astype(np.float32), items.reshape(-1), 0, 0)

    @classmethod
    def whole(cls, epochs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Batches:
        """Each epoch's (items `int64 [n]`, labels `float32 [n]`) as one batch."""
        return cls.cut(epochs, UNLIMITED)

    def references(self) -> tuple[np.ndarray, np.ndarray]:
        """The items whose rows each step needs, `int64 [S, N]`, and which of them are no padding,
        `bool [S, N]`."""
        return self.items, np.arange(self.items.shape[1]) < self.sizes[:, None]


@dataclass(frozen=True, eq=False)
class OwnData(Batches):
    """A client's data and random stream as they are, for steps that draw their batches while they
    train.

    Attributes:
        data: the client's data.
        random: its stream.
    """

    data: ClientData
    random: np.random.Generator

    @classmethod
    def of(cls, data: ClientData, random: np.random.Generator) -> OwnData:
        """No batches, and what they would be drawn from."""
        return cls(**vars(cls.none()), data=data, random=random)


def width_of(batch_size: int, longest: np.ndarray) -> np.ndarray:
    """The widths of clients' rectangles, `int64 [C]`, of so many examples, `int64 [C]`. They depend
    on the client's own data only, because otherwise rounding would depend on the other clients of
    the block."""
    powers = 2 ** np.ceil(np.log2(np.maximum(longest, 1))).astype(np.int64)
    return np.minimum(batch_size, np.maximum(_NARROW, powers))


# A block of clients that are trained together: their batches padded to one rectangle, built once
# before the loop.

UserCodes = Sequence[tuple[np.ndarray, ...]]
"""For each client its category codes per user feature, `int64 [width]` each."""


@dataclass(frozen=True, eq=False)
class Block:
    """C clients, those with the most steps first.

    Attributes:
        users: per user feature the clients' category codes, `int64 [C, width]`.
        active: `active[t]` is the number of clients that still train in step t; they are the first
            ones.
        items: `int64 [S, C, B]`, items of the examples.
        rows: `int64 [S, C, N]`, rows in the compact item tables of all clients laid end to end,
            `[C * R]`, of every item that a step needs: those of its examples, in their order, and
            then any others (`Batches.references`).
        labels: `float32 [S, C, B]`.
        sizes: `int64 [S, C]`, number of examples in each batch; what comes after them is padding.
        touched: `int64 [C, R]`, the item of each row of the compact tables; padded with item 0.
        touched_counts: number of real rows of each client.
        examples: `[C]`, number of examples of each client in an epoch.
        last_epoch: `[C]`, number of steps in the last epoch.
        members: the clients' batches; empty for a block without batches.
        number: of a block that `at` returned, the number of its step, `int64 [1]`; None in others.
        like: of such a block, a step that differs in its numbers alone.
        training: of such a block, `bool [C]`: which of its clients have not ended before the step.
    """

    stepwise: ClassVar[tuple[str, ...]] = ("items", "rows", "labels", "sizes")

    users: tuple[Tensor, ...]
    active: tuple[int, ...]
    items: Tensor
    rows: Tensor
    labels: Tensor
    sizes: Tensor
    touched: Tensor
    touched_counts: tuple[int, ...]
    examples: tuple[int, ...]
    last_epoch: tuple[int, ...]
    members: tuple[Batches, ...]
    number: Tensor | None = field(default=None, kw_only=True)
    like: int = field(default=0, kw_only=True)
    training: Tensor | None = field(default=None, kw_only=True)

    @classmethod
    def of(cls, users: UserCodes, batches: Sequence[Batches], device: torch.device) -> Block:
        """Build a block from the data of some clients.

        Args:
            users: of each client.
            batches: the batches of each client, most steps first.
            device: device of the tensors.
        """
        table, counts, client_rows = _numbered([batch.references() for batch in batches])
        firsts = np.arange(len(batches)) * table.shape[1]
        codes = tuple(on_device(np.stack(feature), device) for feature in zip(*users, strict=True))
        items, labels, sizes = (
            side_by_side([getattr(batch, name) for batch in batches], device)
            for name in ("items", "labels", "sizes")
        )
        rows = side_by_side(client_rows, device) + on_device(firsts, device)[:, None]
        tensors = (items, rows, labels, sizes, on_device(table, device))
        steps, examples, last_epoch = np.array(
            [(len(batch.sizes), batch.examples, batch.last_epoch) for batch in batches]
        ).T
        return cls.given(codes, steps, tensors, counts, examples, last_epoch, batches)

    @classmethod
    def given(
        cls,
        users: Sequence[Tensor],
        steps: np.ndarray,
        tensors: Sequence[Tensor],
        touched_counts: np.ndarray,
        examples: np.ndarray,
        last_epoch: np.ndarray,
        members: Sequence[Batches] = (),
    ) -> Self:
        """A block of its attributes, of arrays and the clients' numbers of `steps`, `int64 [C]`;
        `tensors` are `items`, `rows`, `labels`, `sizes` and `touched`."""
        ended = np.searchsorted(np.sort(steps), np.arange(len(tensors[0])), side="right")
        active = (len(steps) - ended).tolist()
        counts = (tuple(part.tolist()) for part in (touched_counts, examples, last_epoch))
        rest: tuple[Any, ...] = (*tensors, *counts, tuple(members))
        return cls(tuple(users), tuple(active), *rest)

    @classmethod
    def without_batches(cls, examples: Sequence[int]) -> Block:
        """Clients of whom only the numbers of examples are given, for steps that need no batches;
        without features, steps and rows."""
        none = torch.zeros((0, len(examples), 0), dtype=torch.int64)
        rows = torch.zeros((len(examples), 1), dtype=torch.int64)
        zeros = (0,) * len(examples)
        sizes = torch.zeros((0, len(examples)), dtype=torch.int64)
        tables = (none, none, none.float(), sizes, rows)
        return cls((), (), *tables, zeros, tuple(examples), zeros, ())

    def on_whole_tables(self, items: int) -> Self:
        """The same clients with whole item tables, of so many rows, in place of compact ones."""
        device = self.touched.device
        first = items * torch.arange(len(self), device=device)[:, None]
        whole = torch.arange(items, device=device).expand(len(self), -1)
        return replace(
            self,
            rows=self.touched.flatten()[self.rows] + first,
            touched=whole,
            touched_counts=(items,) * len(self),
        )

    def at(self, number: Tensor, like: int) -> Self:
        """One step alone, whose number `int64 [1]` is on the device, so that the same operations
        give any step that is `like` another."""
        step = {name: getattr(self, name).index_select(0, number) for name in self.stepwise}
        return replace(self, **step, number=number, like=like, training=number < self._ends)

    @property
    def places(self) -> Tensor:
        """`int64 [S, C, N]`: `rows` as places in each client's table; 0 for padding."""
        firsts = torch.arange(len(self), device=self.touched.device) * self.touched.shape[1]
        return self.rows - firsts[:, None]

    @cached_property
    def steps(self) -> list[int]:
        """Number of steps of each client."""
        return (np.array(self.active)[:, None] > np.arange(len(self))).sum(0).tolist()

    def requests(self, clients: Sequence[int]) -> ItemRequests:
        """The items of each client's real rows; `clients` are the ids, `[C]`."""
        touched = self.touched.numpy(force=True)
        items = [
            client_rows[:count]
            for client_rows, count in zip(touched, self.touched_counts, strict=True)
        ]
        return ItemRequests.of(np.array(clients), items)

    @cached_property
    def weights(self) -> Tensor:
        """`float32 [S, C, B]`: one over the size of the batch, 0 for padding; a mean loss is a sum
        with these."""
        columns = torch.arange(self.items.shape[2], device=self.items.device)
        return (columns < self.sizes[:, :, None]) / self.sizes.clamp(min=1)[:, :, None]

    @cached_property
    def _ends(self) -> Tensor:
        """`int64 [C]`: `steps`, on the device."""
        return on_device(np.array(self.steps, dtype=np.int64), self.touched.device)

    def last_epoch_means(self, losses: Tensor) -> Tensor:
        """Mean over the steps of each client's last epoch.

        Args:
            losses: `[S, C]`.

        Returns:
            `float64 [C]`, on the device of the losses, so that a GPU is not waited for; NaN for a
            client without steps.
        """
        step = np.arange(len(losses))[:, None]
        last = np.array(self.last_epoch, dtype=np.float64)
        ends = np.array(self.steps, dtype=np.int64)
        counted = on_device((step >= ends - last) & (step < ends), losses.device)
        sums = losses.double().where(counted, 0.0).sum(0)
        return sums / on_device(last, losses.device)  # 0 / 0 is NaN

    def __len__(self) -> int:
        return len(self.examples)


def side_by_side(arrays: Sequence[np.ndarray], device: torch.device, padding: int = 0) -> Tensor:
    """The steps of C clients, `[steps, ...]` each, side by side, `[S, C, ...]`: padded to the most
    steps and to the widest."""
    widest = np.max([array.shape for array in arrays], axis=0)
    filled = np.full((widest[0], len(arrays), *widest[1:]), padding, arrays[0].dtype)
    for client, array in enumerate(arrays):
        steps, *widths = map(slice, array.shape)
        filled[(steps, client, *widths)] = array
    return on_device(filled, device)


def _numbered(
    needed: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """The distinct items of each client, `int64 [C, R]`, ascending and padded with item 0; how many
    they are, `int64 [C]`; and of each client the places of its references among them, 0 for
    padding, `int64 [S, N]`.

    Args:
        needed: of each client the items of all its steps, `int64 [S, N]`, and which of them are no
            padding, `bool [S, N]`.
    """
    from fedrec.kernel.rows import number_items  # imports Numba, which is slow

    references = [items[real] for items, real in needed]
    ends = np.cumsum([len(items) for items in references])
    table, counts, numbered = number_items(np.concatenate(references), ends)
    rows = []
    for (items, real), numbers in zip(needed, np.split(numbered, ends[:-1]), strict=True):
        client_rows = np.zeros(items.shape, dtype=np.int64)
        client_rows[real] = numbers
        rows.append(client_rows)
    return table, counts, rows
