# SPDX-License-Identifier: Apache-2.0
"""What a trained block gives: per-client norms, weighted sums of updates, or one client's whole parameters."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedrec.cohort.block import Block
from fedrec.cohort.compiled import add_row_updates, add_updates
from fedrec.row_sum import RowAccumulator

_SMALL = 2**13  # numbers: parameters of fewer are added up together, in one operation instead of one for each


@dataclass(frozen=True, eq=False)
class Trained:
    """The trained parameters of a block of C clients.

    Attributes:
        start: the global parameters, without cohort dimension; those that are not in `values` stayed as they are.
        block: the clients.
        values: `[C, ...]` per parameter; of an item table only the touched rows, `[C, R, d]`.
        item_tables: names of the parameters that are compact.
        untouched: `[C]`, factor between the start and the end of a row that no batch touched; 1 without weight decay.
        step_losses: `[S, C]`, mean loss of each step's batch before the step.
    """

    start: Mapping[str, Tensor]
    block: Block
    values: dict[str, Tensor]
    item_tables: tuple[str, ...]
    untouched: Tensor
    step_losses: Tensor

    def losses(self) -> list[float]:
        """Mean loss of each client over its last epoch; NaN for a client that had nothing to learn from."""
        by_client = self.step_losses.numpy().T
        own = zip(by_client, self.block.steps, self.block.last_epoch, strict=True)
        return [float(losses[end - last : end].sum()) / last if last else math.nan for losses, end, last in own]

    def norms(self, names: Collection[str] | None = None, order: int = 2) -> Tensor:
        """`float64 [C]`: norm of each client's whole update, sparse and dense parts together.

        Args:
            names: the parameters that count; None: all.
            order: 2 for the L2 norm, 1 for L1.
        """
        total = torch.zeros(len(self.block), dtype=torch.float64)
        wanted = self.values.keys() if names is None else names
        small, moved = self._small(wanted)
        total += _powers(moved, order).cpu()
        for name, value in self.values.items():
            if name not in wanted or name in small:
                continue
            if name in self.item_tables:
                total += self._table_powers(name, order).cpu()
            else:  # one by one: what fits the processor's caches is twice as fast
                start = self.start[name].flatten()
                total += torch.stack([_power(own.flatten() - start, order) for own in value]).cpu()
        return total.sqrt() if order == 2 else total

    def add_dense(self, totals: Mapping[str, Tensor], shares: Tensor) -> None:
        """Add, over the clients, share times update of parameters that are no item tables.

        Args:
            totals: `float64` by parameter, of the parameter's shape, which are added to; those that did not change may
                be among them.
            shares: `float64 [C]`; a client of share 0 adds nothing, whatever it holds.
        """
        done = add_updates(totals, self.start, self.values, shares)
        left = {name: total for name, total in totals.items() if name in self.values and name not in done}
        if left:
            self._add_one_by_one(left, shares)

    def _add_one_by_one(self, totals: Mapping[str, Tensor], shares: Tensor) -> None:
        """See `add_dense`; a float64 copy of all clients' parameters would cost more."""
        counted = [(place, share) for place, share in enumerate(shares.tolist()) if share]
        small, moved = self._small(totals)
        places = torch.tensor([place for place, _ in counted], dtype=torch.int64, device=moved.device)
        sums = moved[places].double().T @ shares.to(moved.device)[places]
        for name, own in zip(small, sums.split([totals[name].numel() for name in small]), strict=True):
            totals[name].view(-1).add_(own)
        for name in totals.keys() - small:
            totals[name].add_(self.start[name], alpha=-sum(share for _, share in counted))
            for place, share in counted:
                totals[name].add_(self.values[name][place], alpha=share)

    def add_rows(self, name: str, total: RowAccumulator, shares: Tensor) -> None:
        """The same of an item table, by rows.

        Args:
            name: the table.
            total: the running sum of its changes.
            shares: `float64 [C]`.
        """
        given = self.start[name], self.block.touched, self.block.touched_counts, self.values[name], shares
        if bool((self.untouched == 1).all()) and add_row_updates(total, *given):
            return
        drifts = torch.where(shares != 0, shares * (self.untouched.double().cpu() - 1), 0.0)
        items, client, moved = self._moved(name, shares != 0)
        change = moved.double().mul_(shares.to(client.device)[client, None])
        if drifts.any():
            change -= self.start[name][items].double() * drifts.to(client.device)[client, None]
        total.add(items.cpu().numpy(), change.cpu().numpy(), float(drifts.sum()))

    def parameters_of(self, place: int) -> dict[str, Tensor]:
        """One client's whole parameters, `[1, ...]` each, item tables at full size."""
        own = {name: value.unsqueeze(0) for name, value in self.start.items() if name not in self.values}
        own |= {name: value[place : place + 1] for name, value in self.values.items() if name not in self.item_tables}
        items, count = self._touched(place)
        for name in self.item_tables:
            table = self.start[name] * self.untouched[place]
            table[items] = self.values[name][place, :count]
            own[name] = table.unsqueeze(0)
        return own

    def _touched(self, place: int) -> tuple[Tensor, int]:
        count = self.block.touched_counts[place]
        return self.block.touched[place, :count], count

    def _small(self, names: Collection[str]) -> tuple[list[str], Tensor]:
        """Those of the named parameters that are small and no item tables; all clients' updates of them, `[C, n]`."""
        small = [
            name
            for name in self.values
            if name in names and name not in self.item_tables and self.start[name].numel() < _SMALL
        ]
        if not small:
            return [], self.untouched.new_zeros(len(self.block), 0, dtype=torch.float32)
        start = torch.cat([self.start[name].flatten() for name in small])
        return small, torch.cat([self.values[name].flatten(1) for name in small], dim=1) - start

    def _moved(self, name: str, counted: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """What clients changed in the rows they touched: items `int64 [n]`, places of clients `int64 [n]`, `[n, d]`.

        Args:
            name: an item table.
            counted: `bool [C]`, the clients that are wanted; None: all.
        """
        items, client, places = self._real(counted)
        moved = self.values[name].flatten(0, 1).index_select(0, places)
        return items, client, moved.sub_(self.start[name].index_select(0, items))

    def _real(self, counted: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of the compact tables but padding: items, places of clients, places of rows; `int64 [n]` each."""
        width = self.block.touched.shape[1]
        real = torch.arange(width) < torch.tensor(self.block.touched_counts)[:, None]
        wanted = real if counted is None else real & counted.cpu()[:, None]
        places = wanted.flatten().nonzero()[:, 0].to(self.block.touched.device)
        return self.block.touched.flatten()[places], places // width, places

    def _table_powers(self, name: str, order: int) -> Tensor:
        """`float64 [C]`: sum over a table's coordinates of the change's square (order 2) or magnitude (1)."""
        items, client, moved = self._moved(name)
        drift = (self.untouched.double() - 1).to(client.device)
        total = torch.zeros(len(self.block), dtype=torch.float64, device=client.device)
        total.index_add_(0, client, _powers(moved, order))
        if (drift != 0).any():
            rest = _powers(self.start[name], order).sum() - torch.zeros_like(total).index_add_(
                0, client, _powers(self.start[name][items], order)
            )
            total += torch.where(drift != 0, drift.abs() ** order * rest, 0.0)
        return total


def _powers(rows: Tensor, order: int) -> Tensor:
    """`float64 [n]`: sum of squares (order 2) or magnitudes (1) of each row of `[n, d]`, added in float64."""
    return torch.linalg.vector_norm(rows, order, dim=1, dtype=torch.float64) ** order


def _power(vector: Tensor, order: int) -> Tensor:
    """The same of one vector; faster than a norm that is asked for another precision than its numbers have."""
    wide = vector.double()
    return wide.dot(wide) if order == 2 else wide.abs().sum()
