# SPDX-License-Identifier: Apache-2.0
"""Results of a trained block: per-client norms, weighted sums of updates, one client's whole
parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedrec.cohort.block import Block
from fedrec.cohort.outcome import Outcome
from fedrec.device import on_device
from fedrec.protocol.client_arrays import ClientArrays
from fedrec.protocol.sparse_update import SparseAccumulator


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
        from fedrec.nn.update_sums import (
            add_dense,  # imports Numba, which is slow and not always needed
        )

        for name, total in totals.items():
            start = self.start[name].reshape(-1).numpy()
            own = _end_to_end(self.values[name])
            add_dense(total.view(-1).numpy(), start, *own, shares.numpy())

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
        if bool((self.untouched == 1).all()) and self.values[name].is_cpu:
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
            items, places = items.unique(return_inverse=True)
            change = change.new_zeros(len(items), change.shape[1]).index_add_(0, places, change)
        total.add(items.cpu().numpy(), change.cpu().numpy(), float(drifts.sum()))

    def _add_touched_rows(self, name: str, total: SparseAccumulator, shares: Tensor) -> None:
        """The same as `add_rows` if only touched rows changed."""
        from fedrec.nn.update_sums import add_rows

        counts = np.array(self.block.touched_counts, dtype=np.int64)
        total.reserve(int(counts.sum()))
        sums = (total.values, total.slots, total.rows)
        block = self.block.touched.numpy()
        given = self.start[name].numpy(), block, counts, self.values[name].numpy(), shares.numpy()
        total.used = add_rows(*sums, total.used, *given)

    def changed_rows(self, name: str) -> np.ndarray | None:
        return self.block.changed_rows(name in self.values, name in self.item_tables)

    def parameter_of(self, name: str, place: int) -> Tensor:
        if name not in self.values:
            return self.start[name].unsqueeze(0)
        if name not in self.item_tables:
            return self.values[name][place : place + 1]
        count = self.block.touched_counts[place]
        if not count and self.untouched[place] == 1:
            return self.start[name].unsqueeze(0)
        table = self.start[name] * self.untouched[place]
        table[self.block.touched[place, :count]] = self.values[name][place, :count]
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
        """The clients' changes of touched rows: items `int64 [n]`, places of clients `int64 [n]`,
        changes `[n, d]`.

        Args:
            name: an item table.
            counted: `bool [C]`, the clients that count; None: all.
        """
        touched = self.block.touched
        width = self.block.touched.shape[1]
        real = torch.arange(width) < torch.tensor(self.block.touched_counts)[:, None]
        kept = real if counted is None else real & counted.cpu()[:, None]
        places = on_device(kept.flatten().nonzero()[:, 0], touched.device)
        items = touched.flatten()[places]
        moved = self.values[name].flatten(0, 1).index_select(0, places)
        return items, places // width, moved.sub_(self.start[name].index_select(0, items))

    def _table_powers(self, name: str, order: int) -> Tensor:
        """`float64 [C]`: sum over a table's coordinates of the change's square (order 2) or
        magnitude (1)."""
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
    from fedrec.nn.update_sums import powers

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
