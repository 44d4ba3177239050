# SPDX-License-Identifier: Apache-2.0
"""Trained blocks in which each client's update is one sparse vector, or the outer product of one
with itself. The sums are taken without materialising the updates."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedrec.cohort.block import Block
from fedrec.cohort.outcome import Outcome
from fedrec.device import summed_on_processor
from fedrec.protocol.compact import bytes_of_triangle
from fedrec.protocol.sparse_update import SparseAccumulator
from fedrec.runtime.grouping import distinct


@dataclass(frozen=True, eq=False)
class VectorUpdates(Outcome):
    """Updates of a block of C clients that all change one parameter; an `Outcome` without compact
    tables.

    Attributes:
        start: the global parameters, without cohort dimension; those of other names stay as they
            are.
        block: the clients.
        name: the parameter, `[rows, 1]`, or `[rows, rows]` for outer products; of single entries
            of a matrix, the rows are places in it, row after row.
        offsets: `int64 [C + 1]`: the entries of client c are those from `offsets[c]` up to
            `offsets[c + 1]`.
        rows: `int64 [n]`, the row of each entry; distinct within a client.
        values: `float64 [n]`.
        outer: whether a client changes the parameter by the outer product of its vector with
            itself.
    """

    start: Mapping[str, Tensor]
    block: Block
    name: str
    offsets: np.ndarray
    rows: np.ndarray
    values: np.ndarray
    outer: bool

    @property
    def last_losses(self) -> list[float]:
        """NaN for each client: nothing is trained."""
        return [math.nan] * len(self.block)

    def norms(self, names: Collection[str] | None = None, order: int = 2) -> Tensor:
        # the norm of an outer product is the product of the norms, in L1 as in L2
        clients = len(self.block)
        if names is not None and self.name not in names:
            return torch.zeros(clients, dtype=torch.float64)
        found = np.bincount(self._places, np.abs(self.values) ** order, clients)
        if order == 2 and not self.outer:
            found = np.sqrt(found)
        elif order == 1 and self.outer:
            found **= 2
        return torch.from_numpy(found)

    def add_dense(self, totals: Mapping[str, Tensor], shares: Tensor) -> None:
        if self.name not in totals:
            return
        with summed_on_processor(totals[self.name]) as total:
            if self.outer:
                from fedrec.factors.outer_products import add_outer_products  # imports Numba

                vectors = (self.offsets, self.rows, self.values)
                add_outer_products(total.numpy(), *vectors, shares.numpy(force=True))
            else:
                total.view(-1).add_(torch.from_numpy(self._weighted_sum(shares, total.numel())))

    def add_rows(self, name: str, total: SparseAccumulator, shares: Tensor) -> None:
        """Add the changes of an item table, weighted by `shares` `float64 [C]`, to the running sum
        of its rows.

        Raises:
            ValueError: the table changes by outer products, which are no rows.
        """
        if name != self.name:
            return
        if self.outer:
            raise ValueError(f"Expected whole rows of {name!r}, got outer products.")
        changed = distinct(self.rows)
        summed = self._weighted_sum(shares, int(changed.max(initial=-1)) + 1)
        total.add(changed, summed[changed, None])

    def changed_rows(self, name: str) -> np.ndarray:
        if name != self.name or not len(self.rows):
            return np.zeros(len(self.block), dtype=np.int64)
        table = self.start[name]
        rows = self.rows if self.outer else self.rows // max(1, table[:1].numel())
        pairs = distinct(self._places * len(table) + rows)
        return np.bincount(pairs // len(table), minlength=len(self.block))

    def _bytes_of(self, name: str) -> int:
        if not self.outer:
            return super()._bytes_of(name)
        number = self.start[name].element_size()
        rows = self.changed_rows(name)
        return int(bytes_of_triangle(rows, number, self.start[name].nbytes).sum())

    def parameter_of(self, name: str, place: int) -> Tensor:
        if name != self.name:
            return self.start[name].unsqueeze(0)
        own = slice(*self.offsets[place : place + 2].tolist())
        given = self.rows[own], self.values[own], self.outer
        return changed(self.start[name], *given).unsqueeze(0)

    @cached_property
    def _places(self) -> np.ndarray:
        """The client of each entry, by its place."""
        return np.repeat(np.arange(len(self.block)), np.diff(self.offsets))

    def _weighted_sum(self, shares: Tensor, size: int) -> np.ndarray:
        """Sum of the vectors, `float64 [size]`."""
        own = shares.numpy(force=True)[self._places]
        return np.bincount(self.rows, own * self.values, size)


def changed(table: Tensor, rows: np.ndarray, values: np.ndarray, outer: bool) -> Tensor:
    """A copy of a parameter with one client's vector, or outer product, added.

    Args:
        table: `[rows, 1]`, or `[rows, rows]` for an outer product or places in a matrix.
        rows: `int64 [n]`, distinct.
        values: `float64 [n]`.
        outer: whether the outer product is added.
    """
    found = table.clone()
    places = torch.from_numpy(rows).to(table.device)
    if outer:
        found[places[:, None], places] += torch.from_numpy(np.outer(values, values)).to(found)
    else:
        found.view(-1)[places] += torch.from_numpy(values).to(found)
    return found
