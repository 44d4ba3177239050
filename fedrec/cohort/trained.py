# SPDX-License-Identifier: Apache-2.0
"""What a trained block gives: per-client norms, weighted sums of updates, or one client's whole parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedrec.cohort.block import Block


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
        counts = torch.tensor(self.block.active)[:, None] > torch.arange(len(self.block))
        steps = counts.sum(0).tolist()
        ends = zip(steps, self.block.last_epoch, strict=True)
        return [float(self.step_losses[end - last : end, place].mean()) for place, (end, last) in enumerate(ends)]

    def norms(self) -> Tensor:
        """`float64 [C]`: L2 norm of each client's whole update, sparse and dense parts together."""
        square = torch.zeros(len(self.block), dtype=torch.float64)
        for name, value in self.values.items():
            if name in self.item_tables:
                for place in range(len(self.block)):
                    square[place] += self._table_square(name, place)
            else:
                square += (value - self.start[name]).double().square().flatten(1).sum(1).cpu()
        return square.sqrt()

    def dense_sums(self, shares: Tensor) -> dict[str, Tensor]:
        """Sum over the clients of share times update, `float64`, of the parameters that are no item tables.

        Args:
            shares: `float64 [C]`.
        """
        sums = {}
        for name, value in self.values.items():
            if name not in self.item_tables:
                total = self.start[name].double() * -float(shares.sum())
                for place, share in enumerate(shares.tolist()):
                    total.add_(value[place], alpha=share)  # client by client: a float64 copy of all would cost more
                sums[name] = total
        return sums

    def row_sums(self, name: str, shares: Tensor) -> tuple[Tensor, Tensor, float]:
        """The same of an item table, by rows.

        Args:
            name: the table.
            shares: `float64 [C]`.

        Returns:
            Items `int64 [n]`, which may repeat; what to add to their rows, `float64 [n, d]`; and the sum of shares
            times drifts, which is how often the table itself is to be added, to every row.
        """
        drifts = shares * (self.untouched.double().cpu() - 1)
        real = torch.arange(self.block.touched.shape[1]) < torch.tensor(self.block.touched_counts)[:, None]
        real = real.to(self.block.touched.device)
        items = self.block.touched[real]
        rows = self.start[name][items].double()
        client = real.nonzero()[:, 0]
        moved = (self.values[name][real].double() - rows) * shares.to(client.device)[client, None]
        return items, moved - rows * drifts.to(client.device)[client, None], float(drifts.sum())

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

    def _table_square(self, name: str, place: int) -> float:
        items, count = self._touched(place)
        rows = self.start[name][items].double()
        square = (self.values[name][place, :count].double() - rows).square().sum()
        drift = float(self.untouched[place]) - 1
        if drift:
            rest = self.start[name].double().square().sum() - rows.square().sum()
            square = square + drift**2 * rest
        return float(square)
