# SPDX-License-Identifier: Apache-2.0
"""Trained blocks given by their clients' updates, dense or as sparse vectors."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedrec.device import on_device, summed_on_processor
from fedrec.errors import ExperimentError
from fedrec.protocol.client_arrays import ClientArrays
from fedrec.protocol.updates import SparseAccumulator, SparseUpdate, bytes_of_triangle
from fedrec.runtime.ragged import distinct
from fedrec.training.block import Block
from fedrec.training.results import Outcome

# Trained blocks given by their clients' updates, for steps that compute each update at once.


@dataclass(frozen=True, eq=False)
class Updates(Outcome):
    """Updates of a block of C clients, given one by one.

    Attributes:
        start: the global parameters, without cohort dimension; those that `changes` lacks did not
            change.
        block: the clients.
        changes: `[C, ...]` per parameter, each client's update; of compact tables that of the
            touched rows, `[C, R, d]`.
        last_losses: `[C]`, mean loss of each client; NaN if it reports none.
        client_params: what the clients started from instead of the global parameters, `[C, ...]`
            each.
        item_tables: names of the parameters that are compact.
        rows: new values of the touched rows, `[C, R, d]`, of private tables that are not among the
            changes; all other rows of these tables become zero.
    """

    start: Mapping[str, Tensor]
    block: Block
    changes: dict[str, Tensor]
    last_losses: Sequence[float] | Tensor
    client_params: Mapping[str, Tensor] = field(default_factory=dict)
    item_tables: tuple[str, ...] = ()
    rows: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def none(
        cls,
        start: Mapping[str, Tensor],
        block: Block,
        client_params: Mapping[str, Tensor],
        item_tables: Collection[str] = (),
    ) -> Updates:
        """Clients that do not train: zero for everything that they start from."""
        still = {name: torch.zeros_like(value) for name, value in client_params.items()}
        tables = tuple(name for name in item_tables if name in client_params)
        return cls(start, block, still, [math.nan] * len(block), client_params, tables)

    def norms(self, names: Collection[str] | None = None, order: int = 2) -> Tensor:
        total = torch.zeros(len(self.block), dtype=torch.float64)
        for name, change in self.changes.items():
            if names is None or name in names:
                rows = change.flatten(1)
                norms = torch.linalg.vector_norm(rows, order, dim=1, dtype=torch.float64)
                total += norms.cpu() ** order
        return total.sqrt() if order == 2 else total

    def add_dense(self, totals: Mapping[str, Tensor], shares: Tensor) -> None:
        for name in (name for name in self.changes if name in totals):
            for index, share in enumerate(shares.tolist()):
                if share:  # a client of weight 0 must not add NaN
                    totals[name].add_(self.changes[name][index], alpha=share)

    def changed_rows(self, name: str) -> np.ndarray | None:
        return self.block.changed_rows(name in self.changes, name in self.item_tables)

    def parameter_of(self, name: str, index: int) -> Tensor:
        if name in self.rows:
            whole = self._table(name, index).dense(self.start[name].numpy(force=True))
            return torch.from_numpy(whole).to(self.rows[name]).unsqueeze(0)
        before = self.client_params[name][index] if name in self.client_params else self.start[name]
        if name in self.changes:
            before = before + self.changes[name][index]
        return before.unsqueeze(0)

    def changes_of(self, index: int) -> dict[str, Tensor]:
        still = {n: torch.zeros_like(v) for n, v in self.start.items() if n not in self.changes}
        return still | {name: change[index] for name, change in self.changes.items()}

    @property
    def names(self) -> list[str]:
        return [*self.start, *(name for name in self.changes if name not in self.start)]

    def each(
        self, clients: Sequence[int], names: Collection[str], tables: Collection[str]
    ) -> ClientArrays:
        if not self.item_tables:
            return super().each(clients, names, tables)
        cohort = len(self.block)
        rows = torch.arange(self.block.touched.shape[1])
        real = rows < torch.tensor(self.block.touched_counts)[:, None]
        changes = {
            name: self.changes[name]
            if name in self.changes
            else torch.zeros(cohort, *self.start[name].shape)
            for name in names
        }
        changes |= {name: changes[name][real.to(changes[name].device)] for name in tables}
        return ClientArrays.of(self.block.requests(clients), changes, tables)

    def kept(
        self, names: Collection[str]
    ) -> tuple[Updates, dict[str, Tensor | Sequence[SparseUpdate]]]:
        """The block without the named private parameters, and their new values, `[C, ...]` each, or
        for each client the rows that are not zero."""
        private: dict[str, Tensor | Sequence[SparseUpdate]] = {
            name: (self.client_params[name] if name in self.client_params else self.start[name])
            + self.changes[name]
            for name in names
            if name in self.changes
        }
        shared = {name: value for name, value in self.changes.items() if name not in private}
        for name in (name for name in self.rows if name in names):
            private[name] = [self._table(name, index) for index in range(len(self.block))]
        return replace(self, changes=shared, rows={}), private

    def _table(self, name: str, index: int) -> SparseUpdate:
        """The new values of a table of which only `rows` are not zero."""
        count = self.block.touched_counts[index]
        items = self.block.touched[index, :count].numpy(force=True)
        values = self.rows[name][index, :count].numpy(force=True)
        return SparseUpdate(tuple(self.start[name].shape), items, values)


@dataclass(frozen=True, eq=False)
class ChangedPart:
    """The change of a part of a parameter by one client.

    Attributes:
        rows: `int64 [n]`, distinct.
        columns: `int64 [k]`, distinct; None: all.
        values: `float64 [n, k]`, the change of these rows and columns.
    """

    rows: Tensor
    columns: Tensor | None
    values: Tensor

    def add_to(self, table: Tensor, share: float) -> None:
        """Add share times the change to a table `[rows, columns]`, in place."""
        values = (share * self.values).to(table)
        if self.columns is None:
            table.index_add_(0, self.rows.to(table.device), values)
        else:
            table[self.rows[:, None], self.columns] += values


@dataclass(frozen=True, eq=False)
class PartialUpdates(Outcome):
    """Updates of a block of C clients, each a part of some parameters; an `Outcome` without compact
    tables.

    Attributes:
        start: the global parameters, without cohort dimension.
        block: the clients.
        changes: by client the parts of the parameters that it changes; none of the others.
        last_losses: mean loss of each client; NaN if it reports none.
    """

    start: Mapping[str, Tensor]
    block: Block
    changes: Sequence[Mapping[str, ChangedPart]]
    last_losses: tuple[float, ...]

    def norms(self, names: Collection[str] | None = None, order: int = 2) -> Tensor:
        powers = [
            sum(
                float(torch.linalg.vector_norm(part.values, order)) ** order
                for name, part in parts.items()
                if names is None or name in names
            )
            for parts in self.changes
        ]
        total = torch.tensor(powers, dtype=torch.float64)
        return total.sqrt() if order == 2 else total

    def add_dense(self, totals: Mapping[str, Tensor], shares: Tensor) -> None:
        for name in dict.fromkeys(
            name for parts in self.changes for name in parts if name in totals
        ):
            with summed_on_processor(totals[name]) as total:
                for parts, share in zip(self.changes, shares.tolist(), strict=True):
                    if name in parts and share:
                        parts[name].add_to(total, share)

    def add_rows(self, name: str, total: SparseAccumulator, shares: Tensor) -> None:
        """Add the changes of an item table, weighted by `shares` `float64 [C]`, to the running sum
        of its rows.

        Raises:
            ValueError: some columns of an item table change, and others do not.
        """
        for parts, share in zip(self.changes, shares.tolist(), strict=True):
            if name in parts and share:
                part = parts[name]
                if part.columns is not None:
                    raise ValueError(f"Expected whole rows of {name!r}, got some columns.")
                total.add(part.rows.cpu().numpy(), (share * part.values).cpu().numpy())

    def changed_rows(self, name: str) -> np.ndarray:
        counts = [len(parts[name].rows) if name in parts else 0 for parts in self.changes]
        return np.array(counts, dtype=np.int64)

    def parameter_of(self, name: str, index: int) -> Tensor:
        value = self.start[name]
        if name in self.changes[index]:
            value = value.clone()
            self.changes[index][name].add_to(value, 1.0)
        return value.unsqueeze(0)


@dataclass(frozen=True, eq=False)
class FactoredUpdates(Outcome):
    """Updates of a block of C clients that are outer products; an `Outcome` that sums them without
    materialising them.

    Attributes:
        start: the global parameters, without cohort dimension; those of no layer stay as they are.
        block: the clients.
        factors: by layer x `[C, in]` and g `[C, out]`, `float32`: the weight changes by `x^T g`,
            the bias by g.
        last_losses: mean loss of each client; NaN if it reports none.
    """

    start: Mapping[str, Tensor]
    block: Block
    factors: dict[str, tuple[Tensor, Tensor]]
    last_losses: tuple[float, ...]

    def norms(self, names: Collection[str] | None = None, order: int = 2) -> Tensor:
        # the norm of an outer product is the product of the norms, in L1 as in L2
        total = torch.zeros(len(self.block), dtype=torch.float64)
        for layer, (inputs, outputs) in self.factors.items():
            inner, outer = (
                torch.linalg.vector_norm(part.double(), order, dim=1).cpu()
                for part in (inputs, outputs)
            )
            if names is None or f"{layer}.weight" in names:
                total += (inner * outer) ** order
            if names is None or f"{layer}.bias" in names:
                total += outer**order
        return total.sqrt() if order == 2 else total

    def add_dense(self, totals: Mapping[str, Tensor], shares: Tensor) -> None:
        for layer, (inputs, outputs) in self.factors.items():
            weights = on_device(shares, outputs.device)[:, None]
            # a client of weight 0 must not add NaN
            weighted = torch.where(weights != 0, weights * outputs.double(), 0.0)
            if f"{layer}.weight" in totals:
                totals[f"{layer}.weight"].addmm_(
                    torch.where(weights != 0, inputs.double(), 0.0).T, weighted
                )
            if f"{layer}.bias" in totals:
                totals[f"{layer}.bias"].add_(weighted.sum(0))

    def parameter_of(self, name: str, index: int) -> Tensor:
        layer, _, part = name.rpartition(".")
        value = self.start[name].unsqueeze(0)
        if layer not in self.factors:
            return value
        inputs, outputs = self.factors[layer]
        change = outputs[index]
        return value + (torch.outer(inputs[index], change) if part == "weight" else change)


@dataclass(frozen=True, eq=False)
class SummedNoiseUpdates(FactoredUpdates):
    """Updates of a block of C clients to each of which noise of its own would be added; the noise
    is drawn for the sum of all blocks, and no single update exists.

    Attributes:
        stds: `float64 [C]`, standard deviation of the noise on every coordinate of each update.
    """

    stds: Tensor

    def left_out(self, shares: Tensor) -> float:
        return float((shares.cpu() * self.stds).square().sum())

    def norms(self, names: Collection[str] | None = None, order: int = 2) -> Tensor:
        raise self._no_single_update()

    def parameter_of(self, name: str, index: int) -> Tensor:
        raise self._no_single_update()

    def _no_single_update(self) -> ExperimentError:
        return ExperimentError(
            "noise that is drawn for the sum of users gives no single update",
            expected="a strategy, privacy and attacks that see sums alone",
            got="step.noise = 'summed'",
            fix="set step.noise = 'reproducible'",
        )


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
        norms = np.bincount(self._places, np.abs(self.values) ** order, clients)
        if order == 2 and not self.outer:
            norms = np.sqrt(norms)
        elif order == 1 and self.outer:
            norms **= 2
        return torch.from_numpy(norms)

    def add_dense(self, totals: Mapping[str, Tensor], shares: Tensor) -> None:
        if self.name not in totals:
            return
        with summed_on_processor(totals[self.name]) as total:
            if self.outer:
                from fedrec.sums.products import add_outer_products  # imports Numba

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

    def parameter_of(self, name: str, index: int) -> Tensor:
        if name != self.name:
            return self.start[name].unsqueeze(0)
        entries = slice(*self.offsets[index : index + 2].tolist())
        given = self.rows[entries], self.values[entries], self.outer
        return changed(self.start[name], *given).unsqueeze(0)

    @cached_property
    def _places(self) -> np.ndarray:
        """The client of each entry, by its place."""
        return np.repeat(np.arange(len(self.block)), np.diff(self.offsets))

    def _weighted_sum(self, shares: Tensor, size: int) -> np.ndarray:
        """Sum of the vectors, `float64 [size]`."""
        weights = shares.numpy(force=True)[self._places]
        return np.bincount(self.rows, weights * self.values, size)


def changed(table: Tensor, rows: np.ndarray, values: np.ndarray, outer: bool) -> Tensor:
    """A copy of a parameter with one client's vector, or outer product, added.

    Args:
        table: `[rows, 1]`, or `[rows, rows]` for an outer product or places in a matrix.
        rows: `int64 [n]`, distinct.
        values: `float64 [n]`.
        outer: whether the outer product is added.
    """
    result = table.clone()
    indices = torch.from_numpy(rows).to(table.device)
    if outer:
        result[indices[:, None], indices] += torch.from_numpy(np.outer(values, values)).to(result)
    else:
        result.view(-1)[indices] += torch.from_numpy(values).to(result)
    return result
