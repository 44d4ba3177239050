# SPDX-License-Identifier: Apache-2.0
"""What a trained block gives: per-client norms, a weighted sum of updates, or one client's whole parameters."""

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
        start: the global parameters, without cohort dimension.
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

    def weighted_sum(self, shares: Tensor) -> dict[str, Tensor]:
        """Sum over the clients of share times update, `float64`, in the shape of the global parameters.

        Args:
            shares: `float64 [C]`.
        """
        sums = {}
        for name, value in self.values.items():
            if name in self.item_tables:
                sums[name] = self._table_sum(name, shares)
            else:
                # Summed in float64 as it is read: a float64 copy of every client's parameters would cost more than
                # this.
                delta = (value - self.start[name]).flatten(1).mul_(shares.to(value)[:, None])
                sums[name] = delta.sum(0, dtype=torch.float64).view(self.start[name].shape)
        return sums

    def parameters_of(self, place: int) -> dict[str, Tensor]:
        """One client's whole parameters, `[1, ...]` each, item tables at full size."""
        own = {name: value[place : place + 1] for name, value in self.values.items() if name not in self.item_tables}
        items, count = self._touched(place)
        for name in self.item_tables:
            table = self.start[name] * self.untouched[place]
            table[items] = self.values[name][place, :count]
            own[name] = table.unsqueeze(0)
        return own

    def _touched(self, place: int) -> tuple[Tensor, int]:
        count = self.block.touched_counts[place]
        return self.block.touched[place, :count], count

    def _table_sum(self, name: str, shares: Tensor) -> Tensor:
        start = self.start[name].double()
        drift = self.untouched.double() - 1
        total = start * float((shares.to(drift.device) * drift).sum()) if drift.any() else torch.zeros_like(start)
        for place, share in enumerate(shares.tolist()):
            items, count = self._touched(place)
            rows = start[items]
            moved = self.values[name][place, :count].double() - rows - drift[place] * rows
            total[items] += share * moved
        return total

    def _table_square(self, name: str, place: int) -> float:
        items, count = self._touched(place)
        rows = self.start[name][items].double()
        square = (self.values[name][place, :count].double() - rows).square().sum()
        drift = float(self.untouched[place]) - 1
        if drift:
            rest = self.start[name].double().square().sum() - rows.square().sum()
            square = square + drift**2 * rest
        return float(square)
