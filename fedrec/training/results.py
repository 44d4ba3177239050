# SPDX-License-Identifier: Apache-2.0
"""Results of a trained block: norms, weighted sums of updates, and whole parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedrec.device import on_device
from fedrec.protocol.client_arrays import ClientArrays, ItemRequests
from fedrec.protocol.updates import SparseAccumulator, SparseUpdate, bytes_of_rows
from fedrec.training.block import Block

# The result of training a block of clients, by any path.


class Outcome(ABC):
    """A block of C trained clients: norms, weighted sums and single updates.

    Attributes:
        start: the global parameters, without cohort dimension; those that a subclass does not name
            did not change.
        block: the clients.
        last_losses: `[C]`, mean loss of each client over its last epoch; NaN without examples or
            without a reported loss. A tensor may be on the device.
    """

    start: Mapping[str, Tensor]
    block: Block
    last_losses: Sequence[float] | np.ndarray | Tensor

    def losses(self) -> list[float]:
        """`last_losses` as a list."""
        losses = self.last_losses
        return (
            losses.tolist() if isinstance(losses, np.ndarray | Tensor) else list(map(float, losses))
        )

    @abstractmethod
    def norms(self, names: Collection[str] | None = None, order: int = 2) -> Tensor:
        """`float64 [C]`: norm (order 2: L2, 1: L1) of each client's update of the named parameters;
        None: of all."""

    @abstractmethod
    def add_dense(self, totals: Mapping[str, Tensor], shares: Tensor) -> None:
        """Add share times update of every client to the totals of parameters that are not item
        tables.

        Args:
            totals: `float64` by parameter, of the parameter's shape, which are added to; may
                include parameters that did not change.
            shares: `float64 [C]`; a client with share 0 adds nothing, even if its update is not
                finite.
        """

    def changed_rows(self, name: str) -> np.ndarray | None:
        """Number of rows of a parameter that each client may have changed, `int64 [C]`; None: all,
        unless a subclass knows better."""
        return None

    def sent_bytes(self, names: Collection[str]) -> int:
        """Bytes that the clients send of the named parameters, each as a device of its own."""
        return sum(self._bytes_of(name) for name in names)

    def _bytes_of(self, name: str) -> int:
        value = self.start[name]
        rows = self.changed_rows(name)
        if rows is None or not value.ndim:
            return len(self.block) * value.nbytes
        row = value[:1].numel() * value.element_size()
        return int(bytes_of_rows(rows, row, value.nbytes).sum())

    def left_out(self, shares: Tensor) -> float:
        """Variance of noise that belongs on every coordinate of the sum with these shares, `float64
        [C]`, and that `add_dense` leaves to whoever adds up all blocks; 0 by default."""
        return 0.0

    def add_rows(self, name: str, total: SparseAccumulator, shares: Tensor) -> None:
        """Add the changes of an item table `[items, d]` by rows to the running sum of its changes;
        `shares` is `float64 [C]`."""
        updates = self.each(range(len(self.block)), [name], [name])
        changes = updates.changes(name, self.start[name].numpy(force=True))
        for share, change in zip(shares.tolist(), changes, strict=True):
            if share and isinstance(change, SparseUpdate):
                total.add(change.rows, share * change.values.astype(np.float64))

    @abstractmethod
    def parameter_of(self, name: str, client: int) -> Tensor:
        """One client's value of a parameter of `start`, `[1, ...]`, an item table at full size; a
        view of the shared value where the client did not change it."""

    def parameters_of(self, client: int) -> Mapping[str, Tensor]:
        """One client's whole parameters, `[1, ...]` each, item tables at full size. Each is made
        when it is first read, as tables that nobody reads may be much larger than the others."""
        return _OneClient(self, client)

    def changes_of(self, client: int) -> dict[str, Tensor]:
        """One client's update, whole arrays."""
        return {
            name: self.parameter_of(name, client)[0] - value for name, value in self.start.items()
        }

    @property
    def names(self) -> list[str]:
        """The parameters that have updates."""
        return list(self.start)

    def each(
        self, clients: Sequence[int], names: Collection[str], tables: Collection[str]
    ) -> ClientArrays:
        """The update of each client.

        Args:
            clients: `[C]`, whose updates these are.
            names: the parameters.
            tables: those of them that are item tables, of which only rows that change are given.
        """
        items = []
        parts = []
        for client in range(len(self.block)):
            changes = self.changes_of(client)
            moved = [changes[name].flatten(1).any(1) for name in tables]
            some = torch.stack(moved).any(0) if moved else torch.zeros(0, dtype=torch.bool)
            items.append(some.nonzero()[:, 0].numpy(force=True))
            rows = {name: changes[name][some] for name in tables}
            parts.append({name: changes[name] for name in names} | rows)
        joined = {
            name: (torch.cat if name in tables else torch.stack)([part[name] for part in parts])
            for name in names
        }
        return ClientArrays.of(ItemRequests.of(np.array(clients), items), joined, tables)

    def kept(
        self, names: Collection[str]
    ) -> tuple[Outcome, Mapping[str, Tensor | Sequence[SparseUpdate]]]:
        """The block without the named private parameters, and their new values, `[C, ...]` each, or
        for each client those of a table's rows that are not zero; by default there are none."""
        return self, {}


class _OneClient(Mapping[str, Tensor]):
    """See `Outcome.parameters_of`."""

    def __init__(self, outcome: Outcome, client: int) -> None:
        self._outcome = outcome
        self._client = client
        self._read: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._read:
            self._read[name] = self._outcome.parameter_of(name, self._client)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._outcome.start)

    def __len__(self) -> int:
        return len(self._outcome.start)


# Results of a trained block: per-client norms, weighted sums of updates, one client's whole
# parameters.


@dataclass(frozen=True, eq=False)
class Trained(Outcome):
    """The trained parameters of a block of C clients.

    Attributes:
        start: the global parameters, without cohort dimension; those that are not in `values` did
            not change.
        block: the clients.
        values: `[C, ...]` per parameter; of an item table only the touched rows, `[C, R, d]`.
        item_tables: names of the parameters that are compact.
        untouched: `[C]`, factor between the start and the end of a row that no batch touched; 1
            without weight decay, and then on the processor.
        last_losses: `float64 [C]`, mean loss over each client's last epoch; NaN without examples.
    """

    start: Mapping[str, Tensor]
    block: Block
    values: dict[str, Tensor]
    item_tables: tuple[str, ...]
    untouched: Tensor
    last_losses: np.ndarray | Tensor

    def norms(self, names: Collection[str] | None = None, order: int = 2) -> Tensor:
        # one wait for a GPU, when all are added
        total = torch.zeros(len(self.block), dtype=torch.float64, device=self.block.touched.device)
        for name, value in self.values.items():
            if names is not None and name not in names:
                continue
            table = name in self.item_tables
            total += (
                self._table_powers(name, order)
                if table
                else _powers(value, self.start[name], order)
            )
        return (total.sqrt() if order == 2 else total).cpu()

    def add_dense(self, totals: Mapping[str, Tensor], shares: Tensor) -> None:
        moved = {name: total for name, total in totals.items() if name in self.values}
        if self.block.touched.is_cpu:
            self._add_on_processor(moved, shares)
        else:
            self._add_on_device(moved, shares)

    def _add_on_processor(self, totals: Mapping[str, Tensor], shares: Tensor) -> None:
        from fedrec.kernel.rows import (
            add_dense,  # imports Numba, which is slow and not always needed
        )

        for name, total in totals.items():
            start = self.start[name].reshape(-1).numpy()
            values = _end_to_end(self.values[name])
            add_dense(total.view(-1).numpy(), start, *values, shares.numpy())

    def _add_on_device(self, totals: Mapping[str, Tensor], shares: Tensor) -> None:
        # a client of weight 0 must not add NaN; its place is known here, without waiting for a GPU
        counted = (shares != 0).nonzero()[:, 0]
        device = self.block.touched.device
        clients, weights = (on_device(part, device) for part in (counted, shares[counted]))
        for name, total in totals.items():
            moved = self.values[name].index_select(0, clients).double() - self.start[name]
            total.add_(torch.tensordot(weights, moved, dims=1))

    def add_rows(self, name: str, total: SparseAccumulator, shares: Tensor) -> None:
        if name not in self.values:
            return
        if self._by_touched_rows(name):
            self._add_touched_rows(name, total, shares)
            return
        drifts = torch.where(shares != 0, shares * (self.untouched.double().cpu() - 1), 0.0)
        items, client, moved = self._moved(name, shares != 0)
        change = moved.double().mul_(on_device(shares, client.device)[client, None])
        if drifts.any():
            change -= (
                self.start[name][items].double() * on_device(drifts, client.device)[client, None]
            )
        if not items.is_cpu:  # to copy the rows of all clients takes longer than to add them there
            items, positions = items.unique(return_inverse=True)
            change = change.new_zeros(len(items), change.shape[1]).index_add_(0, positions, change)
        total.add(items.cpu().numpy(), change.cpu().numpy(), float(drifts.sum()))

    def _add_touched_rows(self, name: str, total: SparseAccumulator, shares: Tensor) -> None:
        """Add as `add_rows` does if only touched rows changed."""
        from fedrec.kernel.rows import add_changed_rows

        total.reserve(sum(self.block.touched_counts))
        sums = (total.values, total.slots, total.rows)
        rows = self._touched_rows(name)
        total.used = add_changed_rows(*sums, total.used, *rows, shares.numpy())

    def _by_touched_rows(self, name: str) -> bool:
        """True if compiled code finds all changes of a table in its touched rows."""
        return bool((self.untouched == 1).all()) and self.values[name].is_cpu

    def _touched_rows(self, name: str) -> tuple[np.ndarray, ...]:
        """A table at the start, the clients' touched rows, their counts and values."""
        counts = np.array(self.block.touched_counts, dtype=np.int64)
        touched = self.block.touched.numpy()
        return self.start[name].numpy(), touched, counts, self.values[name].numpy()

    def changed_rows(self, name: str) -> np.ndarray | None:
        return self.block.changed_rows(name in self.values, name in self.item_tables)

    def parameter_of(self, name: str, client: int) -> Tensor:
        if name not in self.values:
            return self.start[name].unsqueeze(0)
        if name not in self.item_tables:
            return self.values[name][client : client + 1]
        count = self.block.touched_counts[client]
        if not count and self.untouched[client] == 1:
            return self.start[name].unsqueeze(0)
        table = self.start[name] * self.untouched[client]
        table[self.block.touched[client, :count]] = self.values[name][client, :count]
        return table.unsqueeze(0)

    def each(
        self, clients: Sequence[int], names: Collection[str], tables: Collection[str]
    ) -> ClientArrays:
        """The update of each client: of item tables its touched rows, and of whole ones those that
        changed."""
        counts = self.block.touched_counts
        whole = any(len(self.start[name]) in counts for name in tables)
        if whole or not set(tables) <= set(self.item_tables) or bool((self.untouched != 1).any()):
            return super().each(clients, names, tables)
        changes = {
            name: self.values[name] - self.start[name]
            if name in self.values
            else torch.zeros(len(self.block), *self.start[name].shape)
            for name in names
            if name not in tables
        }
        changes |= {name: self._moved(name)[2] for name in tables}
        return ClientArrays.of(self.block.requests(clients), changes, tables)

    def kept(self, names: Collection[str]) -> tuple[Trained, dict[str, Tensor]]:
        """The block without the named private parameters, and their new values, `[C, ...]`."""
        private = {name: self.values[name] for name in names if name in self.values}
        shared = {name: value for name, value in self.values.items() if name not in private}
        tables = tuple(name for name in self.item_tables if name in shared)
        return replace(self, values=shared, item_tables=tables), private

    def _moved(self, name: str, counted: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The clients' changes of touched rows: items `int64 [n]`, client positions `int64 [n]`,
        changes `[n, d]`.

        Args:
            name: an item table.
            counted: `bool [C]`, the clients that count; None: all.
        """
        touched = self.block.touched
        width = self.block.touched.shape[1]
        real = torch.arange(width) < torch.tensor(self.block.touched_counts)[:, None]
        counted_rows = real if counted is None else real & counted.cpu()[:, None]
        positions = on_device(counted_rows.flatten().nonzero()[:, 0], touched.device)
        items = touched.flatten()[positions]
        moved = self.values[name].flatten(0, 1).index_select(0, positions)
        return items, positions // width, moved.sub_(self.start[name].index_select(0, items))

    def _table_powers(self, name: str, order: int) -> Tensor:
        """`float64 [C]`: sum over a table's coordinates of the change's square (order 2) or
        magnitude (1)."""
        if self._by_touched_rows(name):
            from fedrec.kernel.rows import row_powers

            return torch.from_numpy(row_powers(*self._touched_rows(name), order))
        items, client, moved = self._moved(name)
        drift = (self.untouched.double() - 1).to(client.device)
        total = torch.zeros(len(self.block), dtype=torch.float64, device=client.device)
        total.index_add_(0, client, _norms(moved, order) ** order)
        if (drift != 0).any():
            whole = _norms(self.start[name], order) ** order
            rest = whole.sum() - torch.zeros_like(total).index_add_(0, client, whole[items])
            total += torch.where(drift != 0, drift.abs() ** order * rest, 0.0)
        return total


def _powers(values: Tensor, start: Tensor, order: int) -> Tensor:
    """`float64 [C]`: sum of squares (order 2) or magnitudes (1) of `[C, ...]` minus the start,
    summed in float64."""
    if not values.is_cpu:
        return _norms(values.flatten(1) - start.flatten(), order) ** order
    from fedrec.kernel.rows import powers

    flat = start.reshape(-1).numpy()
    return torch.from_numpy(powers(flat, *_end_to_end(values), len(values), order))


def _end_to_end(values: Tensor) -> tuple[np.ndarray, int]:
    """Values `[C, ...]` of one client after those of the one before with what is between them,
    `float32 [n]`, in the same memory, and how far apart the first ones of clients are."""
    rows = values.view(len(values), -1)
    stride = rows.stride(0)
    size = (len(rows) - 1) * stride + rows.shape[1]
    return rows.as_strided((size,), (1,)).numpy(), stride


def _norms(rows: Tensor, order: int) -> Tensor:
    """`float64 [n]`: the norm of each row of `[n, d]`."""
    return torch.linalg.vector_norm(rows, order, dim=1, dtype=torch.float64)


# Rows of tables by their places: taken, and added to.
#
# PyTorch has slower operations for the same: on a processor `table[places]` takes five times as
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
    from fedrec.kernel.rows import (
        add_to_rows as compiled,  # imports Numba, which is slow and not always needed
    )

    given = (rows.contiguous(), moves.detach().contiguous())
    compiled(table.numpy(), *(part.numpy() for part in given), np.float32(factor))
