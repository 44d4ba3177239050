# SPDX-License-Identifier: Apache-2.0
"""The update of a block of clients: by parameter a change that is dense, of some rows, or factored,
with norms, weighted sums, sizes, and the values of single clients.

Sums are taken in float64, in the order of the clients. A client of weight 0 adds nothing, even if
its update is not finite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedrec.device import on_device, summed_on_processor
from fedrec.errors import ExperimentError
from fedrec.protocol.updates import (
    ClientArrays,
    ItemRequests,
    SparseAccumulator,
    SparseUpdate,
    bytes_of_rows,
    bytes_of_triangle,
)
from fedrec.runtime.ragged import spans
from fedrec.training.block import Block

# Compiled functions are imported where they are called: Numba takes a third of a second, and nodes
# that train in no kernel and sum nothing do not need it.

Total: TypeAlias = "Tensor | SparseAccumulator"
"""A running sum: `float64` in the shape of a parameter, or by rows of an item table."""
New: TypeAlias = "Tensor | Sequence[SparseUpdate]"
"""New values of C clients, `[C, ...]`, or of each the rows that are not zero."""


class BlockChange(ABC):
    """The change of one parameter by each of C clients."""

    @abstractmethod
    def powers(self, order: int) -> Tensor:
        """`float64 [C]`: sum of squares (order 2) or magnitudes (1) of each client's change; may be
        on the device."""

    @abstractmethod
    def add_to(self, total: Total, shares: Tensor) -> None:
        """Add share times the change of every client, with `shares` `float64 [C]`, in place."""

    @abstractmethod
    def whole(self, index: int, table: Tensor) -> Tensor:
        """One client's change as an array `[...]` like the parameter, whose value before is
        `table`."""

    def after(self, index: int, value: Tensor) -> Tensor:
        """One client's new value of a parameter that was `value` `[...]`."""
        return value + self.whole(index, value)

    def new(self, values: Tensor) -> New:
        """The clients' new values of a private parameter, which started from `[C, ...]` or
        `[...]`."""
        raise TypeError(f"Expected whole arrays or rows, got {type(self).__name__}.")

    def changed_rows(self, table: Tensor) -> np.ndarray | None:
        """Number of rows of the parameter that each client may have changed, `int64 [C]`; None:
        all."""
        return None


@dataclass(frozen=True, eq=False)
class Dense(BlockChange):
    """Changes of a whole parameter.

    Attributes:
        values: `[C, ...]`.
        start: what the new values started from, `[...]`; None: the values are the changes.
    """

    values: Tensor
    start: Tensor | None = None

    @property
    def changes(self) -> Tensor:
        """`[C, ...]`."""
        return self.values if self.start is None else self.values - self.start

    def powers(self, order: int) -> Tensor:
        if not self.values.is_cpu:
            return _norms(self.changes.flatten(1), order) ** order
        from fedrec.kernel.rows import powers

        return torch.from_numpy(powers(*self._end_to_end(), len(self.values), order))

    def add_to(self, total: Total, shares: Tensor) -> None:
        if isinstance(total, SparseAccumulator):
            changes = self.changes
            moved = changes.flatten(2).any(2) & (shares != 0).to(changes.device)[:, None]
            clients, rows = moved.nonzero(as_tuple=True)
            weights = on_device(shares, changes.device)[clients, None]
            total.add(rows.numpy(force=True), (weights * changes[clients, rows]).numpy(force=True))
        elif self.values.is_cpu:
            from fedrec.kernel.rows import add_dense

            add_dense(total.view(-1).numpy(), *self._end_to_end(), shares.numpy())
        else:  # the place of a client of weight 0 is known here, without waiting for a GPU
            counted = (shares != 0).nonzero()[:, 0]
            clients, weights = (on_device(p, total.device) for p in (counted, shares[counted]))
            moved = self.values.index_select(0, clients).double()
            moved = moved if self.start is None else moved - self.start
            total.add_(torch.tensordot(weights, moved, dims=1))

    def whole(self, index: int, table: Tensor) -> Tensor:
        return self.values[index] if self.start is None else self.values[index] - self.start

    def after(self, index: int, value: Tensor) -> Tensor:
        return value + self.values[index] if self.start is None else self.values[index]

    def new(self, values: Tensor) -> Tensor:
        return values + self.values if self.start is None else self.values

    def _end_to_end(self) -> tuple[np.ndarray, np.ndarray, int]:
        """The start in one row, `[0]` without; the values of one client after those of the one
        before with what is between them, `float32 [n]`, in the same memory; and how far apart the
        first ones of clients are."""
        start = self.values.new_empty(0) if self.start is None else self.start.reshape(-1)
        rows = self.values.detach().reshape(len(self.values), -1)
        stride = rows.stride(0)
        size = (len(rows) - 1) * stride + rows.shape[1]
        return start.numpy(), rows.as_strided((size,), (1,)).numpy(), stride


@dataclass(frozen=True, eq=False)
class ChangedRows(BlockChange):
    """Changes of some rows of a parameter, viewed as a table of rows of d numbers: of an item table
    its rows; of single numbers of a matrix, with d = 1, those of one row of it side by side.

    Attributes:
        rows: `int64 [n]`, distinct within a client; may hold padding between clients.
        firsts: `int64 [C]`, the place of each client's first row in `rows` and `values`.
        counts: `int64 [C]`, how many rows a client has.
        values: `[n, d]`; of compact tables `[C, R, d]`.
        start: the table that the new values started from; None: the values are the changes.
    """

    rows: Tensor
    firsts: np.ndarray
    counts: np.ndarray
    values: Tensor
    start: Tensor | None = None

    @classmethod
    def compact(cls, block: Block, values: Tensor, start: Tensor | None = None) -> ChangedRows:
        """The rows that the clients of a block touch, `values [C, R, d]`."""
        cohort, width = block.touched.shape
        firsts = width * np.arange(cohort)
        counts = np.array(block.touched_counts, dtype=np.int64)
        return cls(block.touched.reshape(-1), firsts, counts, values, start)

    @classmethod
    def ragged(cls, offsets: np.ndarray, rows: np.ndarray, values: np.ndarray) -> ChangedRows:
        """Rows `int64 [n]` and changes `float64 [n, d]` of one client after the other, those of
        client c from `offsets[c]` up to `offsets[c + 1]`."""
        tensors = torch.from_numpy(rows), torch.from_numpy(values)
        return cls(tensors[0], offsets[:-1], np.diff(offsets), tensors[1])

    def powers(self, order: int) -> Tensor:
        if self.values.is_cpu:
            from fedrec.kernel.rows import row_powers

            return torch.from_numpy(row_powers(*self._arrays(), order))
        _, owner, moved = self.moved()
        total = torch.zeros(len(self.counts), dtype=torch.float64, device=moved.device)
        return total.index_add_(0, owner, _norms(moved, order) ** order)

    def add_to(self, total: Total, shares: Tensor) -> None:
        if self.values.is_cpu:
            from fedrec.kernel.rows import add_changed_rows

            if isinstance(total, SparseAccumulator):
                total.reserve(int(self.counts.sum()))
                sums = total.values, total.slots, total.rows, total.used
                total.used = add_changed_rows(*sums, *self._arrays(), shares.numpy())
                return
            none = np.empty(0, np.int64)
            with summed_on_processor(total) as summed:
                table = summed.view(-1, self.values.shape[-1]).numpy()
                add_changed_rows(table, none, none, 0, *self._arrays(), shares.numpy())
            return
        rows, owner, moved = self.moved(shares != 0)
        weights = on_device(shares, moved.device)[owner, None]
        change = moved.double() * weights
        if not isinstance(total, SparseAccumulator):
            total.view(-1, change.shape[1]).index_add_(0, rows, change)
            return
        # to copy the rows of all clients takes longer than to add them there
        rows, indices = rows.unique(return_inverse=True)
        change = change.new_zeros(len(rows), change.shape[1]).index_add_(0, indices, change)
        total.add(rows.cpu().numpy(), change.cpu().numpy())

    def whole(self, index: int, table: Tensor) -> Tensor:
        change = torch.zeros_like(table)
        rows, values = self._of(index)
        before = 0 if self.start is None else self.start[rows]
        change.view(-1, self.values.shape[-1])[rows] = (values - before).to(change)
        return change

    def after(self, index: int, value: Tensor) -> Tensor:
        if self.start is None:
            return super().after(index, value)
        rows, values = self._of(index)
        if not len(rows):
            return value
        table = value.clone()
        table[rows] = values
        return table

    def new(self, values: Tensor) -> New:
        """Of whole tables their values; else the changed rows, of tables that were zero."""
        if self.start is not None:
            return self.values
        shape = tuple(values.shape[-2:])
        rows = (self._of(index) for index in range(len(self.counts)))
        return [SparseUpdate(shape, r.numpy(force=True), v.numpy(force=True)) for r, v in rows]

    def changed_rows(self, table: Tensor) -> np.ndarray:
        width = table[:1].numel()
        if self.values.shape[-1] == width or not len(self.rows):
            return self.counts
        rows = self.rows.numpy(force=True) // width
        begins = np.concatenate([[True], rows[1:] != rows[:-1]])
        begins[self.firsts[self.counts > 0]] = True
        ends = np.concatenate([[0], np.cumsum(begins)])
        return ends[self.firsts + self.counts] - ends[self.firsts]

    def moved(self, counted: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The changes of the clients that count, `bool [C]` (None: all): rows `int64 [n]`,
        positions of their clients `int64 [n]`, and changes `[n, d]`."""
        clients = np.arange(len(self.counts))
        if counted is not None:
            clients = clients[counted.numpy(force=True)]
        counts = self.counts[clients]
        device = self.values.device
        indices = on_device(spans(self.firsts[clients], counts), device)
        owner = on_device(np.repeat(clients, counts), device)
        rows = self.rows.index_select(0, indices)
        moved = self._flat.index_select(0, indices)
        return rows, owner, moved if self.start is None else moved.sub_(rows_at(self.start, rows))

    @property
    def _flat(self) -> Tensor:
        return self.values.detach().reshape(-1, self.values.shape[-1])

    def _arrays(self) -> tuple[np.ndarray, ...]:
        start = self._flat[:0] if self.start is None else self.start
        parts = start.numpy(), self.rows.numpy()
        return *parts, self.firsts, self.counts, self._flat.numpy()

    def _of(self, index: int) -> tuple[Tensor, Tensor]:
        """One client's rows and values."""
        begin = int(self.firsts[index])
        entries = slice(begin, begin + int(self.counts[index]))
        return self.rows[entries], self._flat[entries]


@dataclass(frozen=True, eq=False)
class Factored(BlockChange):
    """Changes by the outer product of two vectors, which are summed without materialising them.

    Attributes:
        left: `[C, n]`, or sparse vectors as single numbers.
        right: `[C, m]`; None: the left one again, a symmetric matrix.
    """

    left: Tensor | ChangedRows
    right: Tensor | None

    def powers(self, order: int) -> Tensor:
        # the norm of an outer product is the product of the norms, in L1 as in L2
        left = self.left
        first = (
            left.powers(order) if isinstance(left, ChangedRows) else _norms(left, order) ** order
        )
        second = first if self.right is None else _norms(self.right, order) ** order
        return first * second.to(first.device)

    def add_to(self, total: Total, shares: Tensor) -> None:
        left = self.left
        right = self.right
        if isinstance(left, Tensor) and isinstance(total, Tensor) and right is not None:
            weights = on_device(shares, right.device)[:, None]
            weighted = torch.where(weights != 0, weights * right.double(), 0.0)
            total.addmm_(torch.where(weights != 0, left.double(), 0.0).T, weighted)
        elif (
            isinstance(left, ChangedRows)
            and isinstance(total, SparseAccumulator)
            and right is not None
        ):
            from fedrec.kernel.rows import add_shares

            rows, owner, factors = (part.numpy(force=True) for part in left.moved(shares != 0))
            amounts = shares.numpy()[owner] * factors[:, 0].astype(np.float64)
            slots = total.slots_of(rows)
            add_shares(total.values, slots, owner, amounts, right.numpy(force=True))
        elif isinstance(left, ChangedRows) and isinstance(total, Tensor) and right is None:
            from fedrec.sums.products import add_outer_products

            offsets = np.append(left.firsts, len(left.rows))
            vectors = left.rows.numpy(), left.values[:, 0].numpy()
            with summed_on_processor(total) as summed:
                add_outer_products(summed.numpy(), offsets, *vectors, shares.numpy(force=True))
        else:
            table = torch.zeros(tuple(total.shape))
            whole = torch.stack([self.whole(index, table) for index in range(len(shares))])
            Dense(whole).add_to(total, shares)

    def whole(self, index: int, table: Tensor) -> Tensor:
        if isinstance(self.left, Tensor):
            right = self.left if self.right is None else self.right
            return torch.outer(self.left[index], right[index])
        rows, values = self.left._of(index)
        change = torch.zeros_like(table)
        if self.right is None:
            rows = rows.to(table.device)
            change[rows[:, None], rows] = (values * values.T).to(change)
        else:
            change[rows] = (values * self.right[index]).to(change)
        return change

    def changed_rows(self, table: Tensor) -> np.ndarray | None:
        return self.left.counts if isinstance(self.left, ChangedRows) else None


def outer_products(factors: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, BlockChange]:
    """Changes of layers from x `[C, in]` and g `[C, out]` of each: `x^T g` of the weight, g of the
    bias."""
    changes: dict[str, BlockChange] = {}
    for layer, (inputs, outputs) in factors.items():
        changes[f"{layer}.weight"] = Factored(inputs, outputs)
        changes[f"{layer}.bias"] = Dense(outputs)
    return changes


@dataclass(frozen=True, eq=False)
class BlockUpdate:
    """The updates of a block of C clients.

    Attributes:
        start: the global parameters, without cohort dimension.
        block: the clients.
        changes: by parameter; those that are not here did not change.
        last_losses: `[C]`, mean loss of each client over its last epoch; NaN without examples or
            without a reported loss. A tensor may be on the device.
        client_params: what the clients started from instead of the global parameters, `[C, ...]`
            each.
        noise_stds: `float64 [C]`, standard deviation of the noise on every coordinate of each
            update, which is drawn for the sum of all blocks; no single update exists then.
    """

    start: Mapping[str, Tensor]
    block: Block
    changes: Mapping[str, BlockChange]
    last_losses: Sequence[float] | np.ndarray | Tensor
    client_params: Mapping[str, Tensor] = field(default_factory=dict)
    noise_stds: Tensor | None = None

    @classmethod
    def from_values(
        cls,
        start: Mapping[str, Tensor],
        block: Block,
        values: Mapping[str, Tensor],
        tables: Collection[str],
        losses: Sequence[float] | np.ndarray | Tensor,
    ) -> BlockUpdate:
        """Updates from trained values, `[C, ...]` each; of the item tables the touched rows,
        `[C, R, d]`."""
        changes = {
            name: ChangedRows.compact(block, value, start[name])
            if name in tables
            else Dense(value, start[name])
            for name, value in values.items()
        }
        return cls(start, block, changes, losses)

    @classmethod
    def from_changes(
        cls,
        start: Mapping[str, Tensor],
        block: Block,
        changes: Mapping[str, Tensor],
        tables: Collection[str],
        losses: Sequence[float] | Tensor,
        client_params: Mapping[str, Tensor],
    ) -> BlockUpdate:
        """Updates of clients that started from `client_params`, by their changes `[C, ...]`; of the
        item tables those of the touched rows, `[C, R, d]`."""
        by_name = {
            name: ChangedRows.compact(block, change) if name in tables else Dense(change)
            for name, change in changes.items()
        }
        return cls(start, block, by_name, losses, client_params)

    def values(self, name: str) -> Tensor:
        """Trained values of the clients, or their changes, `[C, ...]`; of a compact table those of
        the touched rows."""
        change = self.changes[name]
        if isinstance(change, Dense | ChangedRows):
            return change.values
        raise TypeError(f"Expected values of {name!r}, got {type(change).__name__}.")

    def losses(self) -> list[float]:
        """`last_losses` as a list."""
        losses = self.last_losses
        if isinstance(losses, np.ndarray | Tensor):
            return losses.tolist()
        return list(map(float, losses))

    @property
    def names(self) -> list[str]:
        """The parameters that have updates."""
        return [*self.start, *(name for name in self.changes if name not in self.start)]

    def norms(self, names: Collection[str] | None = None, order: int = 2) -> Tensor:
        """`float64 [C]`: norm (order 2: L2, 1: L1) of each client's update of the named parameters
        together; None: of all. It is read from the device once."""
        self._check_single()
        total = torch.zeros(len(self.block), dtype=torch.float64, device=self.block.touched.device)
        for name, change in self.changes.items():
            if names is None or name in names:
                total += change.powers(order).to(total.device)
        return (total.sqrt() if order == 2 else total).cpu()

    def add_to(self, totals: Mapping[str, Total], shares: Tensor) -> None:
        """Add share times update of every client, with `shares` `float64 [C]`, to the totals by
        parameter, which may include some that did not change."""
        for name, change in self.changes.items():
            if name in totals:
                change.add_to(totals[name], shares)

    def noise_variance(self, shares: Tensor) -> float:
        """Variance of noise that belongs on every coordinate of the sum with these shares,
        `float64 [C]`, and that `add_to` leaves to whoever adds up all blocks."""
        if self.noise_stds is None:
            return 0.0
        return float((shares.cpu() * self.noise_stds).square().sum())

    def sent_bytes(self, names: Collection[str]) -> int:
        """Bytes that the clients send of the named parameters, each as a device of its own."""
        return sum(self._bytes_of(name) for name in names)

    def _bytes_of(self, name: str) -> int:
        value = self.start[name]
        change = self.changes.get(name)
        rows = np.zeros(len(self.block), np.int64)
        if change is not None:
            rows = change.changed_rows(value)
        if rows is None or not value.ndim:
            return len(self.block) * value.nbytes
        if isinstance(change, Factored) and change.right is None:  # one half of it
            return int(bytes_of_triangle(rows, value.element_size(), value.nbytes).sum())
        row = value[:1].numel() * value.element_size()
        return int(bytes_of_rows(rows, row, value.nbytes).sum())

    def _parameter_of(self, name: str, index: int) -> Tensor:
        """One client's value of a parameter of `start`, `[1, ...]`, an item table at full size; a
        view of the shared value where the client did not change it."""
        self._check_single()
        value = self.client_params[name][index] if name in self.client_params else self.start[name]
        change = self.changes.get(name)
        if isinstance(change, ChangedRows) and change.start is not None:
            value = self.start[name]
        return (value if change is None else change.after(index, value)).unsqueeze(0)

    def parameters_of(self, index: int) -> Mapping[str, Tensor]:
        """One client's whole parameters, `[1, ...]` each, item tables at full size. Each is made
        when it is first read, as tables that nobody reads may be much larger than the others."""
        return _OneClient(self, index)

    def changes_of(self, index: int) -> dict[str, Tensor]:
        """One client's update, whole arrays."""
        self._check_single()
        return {name: self._change_of(name, index) for name in self.names}

    def _change_of(self, name: str, index: int) -> Tensor:
        change = self.changes.get(name)
        if change is None:
            return torch.zeros_like(self.start[name])
        if isinstance(change, ChangedRows) and name not in self.start:  # generated for this client
            return change.values[index]
        return change.whole(index, self.start.get(name, torch.empty(0)))

    def each(
        self, clients: Sequence[int], names: Collection[str], tables: Collection[str]
    ) -> ClientArrays:
        """The update of each client.

        Args:
            clients: `[C]`, whose updates these are.
            names: the parameters.
            tables: those of them that are item tables, of which only rows that change are given: of
                compact ones those that the clients touch.
        """
        self._check_single()
        compact = {name: change for name in tables if (change := self._compact(name)) is not None}
        stacked = {name: self._stacked(name) for name in names if name not in compact}
        if tables and len(compact) == len(tables):
            rows = {name: change.moved()[2] for name, change in compact.items()}
            return ClientArrays.of(self.block.requests(clients), stacked | rows, tables)
        stacked |= {name: self._stacked(name) for name in compact}
        moved = torch.zeros(len(self.block), 0, dtype=torch.bool)
        if tables:
            moved = torch.stack([stacked[name].flatten(2).any(2) for name in tables]).any(0)
        items = [row.nonzero()[:, 0].numpy(force=True) for row in moved]
        stacked |= {name: stacked[name][moved] for name in tables}
        return ClientArrays.of(ItemRequests.of(np.array(clients), items), stacked, tables)

    def _compact(self, name: str) -> ChangedRows | None:
        """The compact change of an item table, unless a client has all of its rows."""
        change = self.changes.get(name)
        if not isinstance(change, ChangedRows) or change.values.dim() != 3:
            return None
        whole = change.start is not None and len(change.start) in change.counts
        return None if whole else change

    def _stacked(self, name: str) -> Tensor:
        """The clients' changes of a parameter as whole arrays, `[C, ...]`."""
        change = self.changes.get(name)
        if isinstance(change, Dense):
            return change.changes
        return torch.stack([self._change_of(name, index) for index in range(len(self.block))])

    def kept(self, names: Collection[str]) -> tuple[BlockUpdate, dict[str, New]]:
        """The block without the named private parameters, and their new values."""
        private = {
            name: self.changes[name].new(
                self.client_params[name] if name in self.client_params else self.start[name]
            )
            for name in names
            if name in self.changes
        }
        shared = {name: value for name, value in self.changes.items() if name not in private}
        return replace(self, changes=shared), private

    def _check_single(self) -> None:
        """Check that single updates exist.

        Raises:
            ExperimentError: noise is drawn for their sum.
        """
        if self.noise_stds is not None:
            raise ExperimentError(
                "noise that is drawn for the sum of users gives no single update",
                expected="a strategy, privacy and attacks that see sums alone",
                got="step.noise = 'summed'",
                fix="set step.noise = 'reproducible'",
            )


class _OneClient(Mapping[str, Tensor]):
    """See `BlockUpdate.parameters_of`."""

    def __init__(self, update: BlockUpdate, index: int) -> None:
        self._update = update
        self._index = index
        self._read: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._read:
            self._read[name] = self._update._parameter_of(name, self._index)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._update.start)

    def __len__(self) -> int:
        return len(self._update.start)


def _norms(rows: Tensor, order: int) -> Tensor:
    """`float64 [n]`: the norm of each row of `[n, d]`."""
    return torch.linalg.vector_norm(rows.detach(), order, dim=1, dtype=torch.float64)


# Rows of tables by their indices: taken, and added to.
#
# PyTorch has slower operations for the same: on a processor `table[indices]` takes five times as
# long as `index_select`, and `index_add_` with a factor ten times as long as a loop in compiled
# code.


def rows_at(table: Tensor, rows: Tensor) -> Tensor:
    """Rows of a table `[R, ...]` at positions `int64 [...]`, `[..., ...]`, a copy."""
    return table.index_select(0, rows.flatten()).view(*rows.shape, *table.shape[1:])


def add_to_rows(table: Tensor, rows: Tensor, moves: Tensor, factor: float) -> None:
    """Add factor times moves to the rows of a table, in place and in their order; without autograd.

    Args:
        table: `[R, d]`, contiguous.
        rows: `int64 [N]`, in `[0, R)`; may repeat.
        moves: `[N, d]`.
        factor: of all moves.
    """
    if not table.is_cpu or table.dtype != torch.float32 or moves.dtype != torch.float32:
        table.index_add_(0, rows, moves, alpha=factor)
        return
    from fedrec.kernel.rows import add_to_rows as compiled

    given = (rows.contiguous(), moves.detach().contiguous())
    compiled(table.numpy(), *(part.numpy() for part in given), np.float32(factor))
