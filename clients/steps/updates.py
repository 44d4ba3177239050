# SPDX-License-Identifier: Apache-2.0
"""Trained blocks given by their clients' updates: dense, as parts of parameters, as outer products,
or as sparse vectors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

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


class Change(ABC):
    """The change of one parameter by each of C clients, in another form than whole arrays."""

    @abstractmethod
    def powers(self, order: int) -> Tensor:
        """`float64 [C]`: sum of squares (order 2) or magnitudes (1) of each client's change."""

    @abstractmethod
    def add_to(self, total: Tensor, shares: Tensor) -> None:
        """Add share times the change of every client to a sum, `float64` in the parameter's shape,
        in place.

        Args:
            total: the sum.
            shares: `float64 [C]`; a client with share 0 adds nothing, even if its change is not
                finite.
        """

    @abstractmethod
    def applied(self, value: Tensor, index: int) -> Tensor:
        """A copy of a parameter `[...]` with one client's change added."""

    def add_rows(self, total: SparseAccumulator, shares: Tensor) -> bool:
        """Add as `add_to` does, by rows of a table, with `shares` `float64 [C]`; False: it is not
        known which rows change."""
        return False

    def changed_rows(self, table: Tensor) -> np.ndarray | None:
        """Number of rows of the parameter that each client may have changed, `int64 [C]`; None:
        all."""
        return None


@dataclass(frozen=True, eq=False)
class Updates(Outcome):
    """Updates of a block of C clients.

    Attributes:
        start: the global parameters, without cohort dimension; those that `changes` lacks did not
            change.
        block: the clients.
        changes: each client's update, `[C, ...]` per parameter, or in another form; of compact
            tables that of the touched rows, `[C, R, d]`.
        last_losses: `[C]`, mean loss of each client; NaN if it reports none.
        client_params: what the clients started from instead of the global parameters, `[C, ...]`
            each.
        item_tables: names of the parameters that are compact.
        rows: new values of the touched rows, `[C, R, d]`, of private tables that are not among the
            changes; all other rows of these tables become zero.
        noise_stds: `float64 [C]`, standard deviation of the noise on every coordinate of each
            update, which is drawn for the sum of all blocks; no single update exists then.
    """

    start: Mapping[str, Tensor]
    block: Block
    changes: Mapping[str, Tensor | Change]
    last_losses: Sequence[float] | Tensor
    client_params: Mapping[str, Tensor] = field(default_factory=dict)
    item_tables: tuple[str, ...] = ()
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    noise_stds: Tensor | None = None

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
        self._check_single()
        total = torch.zeros(len(self.block), dtype=torch.float64)
        for name, change in self.changes.items():
            if names is not None and name not in names:
                continue
            if isinstance(change, Change):
                total += change.powers(order)
            else:
                rows = change.flatten(1)
                norms = torch.linalg.vector_norm(rows, order, dim=1, dtype=torch.float64)
                total += norms.cpu() ** order
        return total.sqrt() if order == 2 else total

    def add_dense(self, totals: Mapping[str, Tensor], shares: Tensor) -> None:
        for name, change in self.changes.items():
            if name not in totals:
                continue
            if isinstance(change, Change):
                change.add_to(totals[name], shares)
                continue
            for index, share in enumerate(shares.tolist()):
                if share:  # a client of weight 0 must not add NaN
                    totals[name].add_(change[index], alpha=share)

    def add_rows(self, name: str, total: SparseAccumulator, shares: Tensor) -> None:
        change = self.changes.get(name)
        if isinstance(change, Change) and change.add_rows(total, shares):
            return
        if change is not None:
            super().add_rows(name, total, shares)

    def changed_rows(self, name: str) -> np.ndarray | None:
        change = self.changes.get(name)
        if isinstance(change, Change):
            return change.changed_rows(self.start[name])
        return self.block.changed_rows(change is not None, name in self.item_tables)

    def left_out(self, shares: Tensor) -> float:
        if self.noise_stds is None:
            return 0.0
        return float((shares.cpu() * self.noise_stds).square().sum())

    def _bytes_of(self, name: str) -> int:
        change = self.changes.get(name)
        if not (isinstance(change, SparseVectors) and change.outer):
            return super()._bytes_of(name)
        value = self.start[name]
        rows = change.changed_rows(value)
        return int(bytes_of_triangle(rows, value.element_size(), value.nbytes).sum())

    def parameter_of(self, name: str, index: int) -> Tensor:
        self._check_single()
        if name in self.rows:
            whole = self._table(name, index).dense(self.start[name].numpy(force=True))
            return torch.from_numpy(whole).to(self.rows[name]).unsqueeze(0)
        value = self.client_params[name][index] if name in self.client_params else self.start[name]
        change = self.changes.get(name)
        if isinstance(change, Change):
            value = change.applied(value, index)
        elif change is not None:
            value = value + change[index]
        return value.unsqueeze(0)

    def changes_of(self, index: int) -> dict[str, Tensor]:
        self._check_single()
        changes = {}
        for name in self.names:
            change = self.changes.get(name)
            if isinstance(change, Change):
                changes[name] = change.applied(self.start[name], index) - self.start[name]
            else:
                still = change is None
                changes[name] = torch.zeros_like(self.start[name]) if still else change[index]
        return changes

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
            name: self.dense(name)
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
            + self.dense(name)
            for name in names
            if name in self.changes
        }
        shared = {name: value for name, value in self.changes.items() if name not in private}
        for name in (name for name in self.rows if name in names):
            private[name] = [self._table(name, index) for index in range(len(self.block))]
        return replace(self, changes=shared, rows={}), private

    def dense(self, name: str) -> Tensor:
        """The changes of a parameter that are given as whole arrays, `[C, ...]`."""
        change = self.changes[name]
        if isinstance(change, Change):
            raise TypeError(f"Expected whole arrays of {name!r}, got {type(change).__name__}.")
        return change

    def _table(self, name: str, index: int) -> SparseUpdate:
        """The new values of a table of which only `rows` are not zero."""
        count = self.block.touched_counts[index]
        items = self.block.touched[index, :count].numpy(force=True)
        values = self.rows[name][index, :count].numpy(force=True)
        return SparseUpdate(tuple(self.start[name].shape), items, values)

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


class ChangedPart(NamedTuple):
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
class Parts(Change):
    """Changes of a part of a parameter each.

    Attributes:
        parts: by client; None: it changes nothing.
    """

    parts: Sequence[ChangedPart | None]

    def powers(self, order: int) -> Tensor:
        norms = [
            0.0 if part is None else float(torch.linalg.vector_norm(part.values, order))
            for part in self.parts
        ]
        return torch.tensor([norm**order for norm in norms], dtype=torch.float64)

    def add_to(self, total: Tensor, shares: Tensor) -> None:
        with summed_on_processor(total) as summed:
            for part, share in zip(self.parts, shares.tolist(), strict=True):
                if part is not None and share:
                    part.add_to(summed, share)

    def applied(self, value: Tensor, index: int) -> Tensor:
        part = self.parts[index]
        value = value.clone()
        if part is not None:
            part.add_to(value, 1.0)
        return value

    def add_rows(self, total: SparseAccumulator, shares: Tensor) -> bool:
        for part, share in zip(self.parts, shares.tolist(), strict=True):
            if part is not None and share:
                if part.columns is not None:
                    raise ValueError("Expected whole rows of an item table, got some columns.")
                total.add(part.rows.cpu().numpy(), (share * part.values).cpu().numpy())
        return True

    def changed_rows(self, table: Tensor) -> np.ndarray:
        counts = [0 if part is None else len(part.rows) for part in self.parts]
        return np.array(counts, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class OuterProducts(Change):
    """Changes `x^T g` of a layer's weight or, without x, changes g of its bias, which are summed
    without materialising them.

    Attributes:
        inputs: x, `float32 [C, in]`; None: of a bias.
        outputs: g, `float32 [C, out]`.
    """

    inputs: Tensor | None
    outputs: Tensor

    def powers(self, order: int) -> Tensor:
        # the norm of an outer product is the product of the norms, in L1 as in L2
        factors = [part for part in (self.inputs, self.outputs) if part is not None]
        norms = [torch.linalg.vector_norm(f.double(), order, dim=1).cpu() for f in factors]
        return math.prod(norms[1:], start=norms[0]) ** order

    def add_to(self, total: Tensor, shares: Tensor) -> None:
        weights = on_device(shares, self.outputs.device)[:, None]
        # a client of weight 0 must not add NaN
        weighted = torch.where(weights != 0, weights * self.outputs.double(), 0.0)
        if self.inputs is None:
            total.add_(weighted.sum(0))
        else:
            total.addmm_(torch.where(weights != 0, self.inputs.double(), 0.0).T, weighted)

    def applied(self, value: Tensor, index: int) -> Tensor:
        change = self.outputs[index]
        return value + (change if self.inputs is None else torch.outer(self.inputs[index], change))


def outer_products(factors: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor | Change]:
    """Changes of layers from x `[C, in]` and g `[C, out]` of each: `x^T g` of the weight, g of the
    bias."""
    changes: dict[str, Tensor | Change] = {}
    for layer, (inputs, outputs) in factors.items():
        changes[f"{layer}.weight"] = OuterProducts(inputs, outputs)
        changes[f"{layer}.bias"] = OuterProducts(None, outputs)
    return changes


@dataclass(frozen=True, eq=False)
class SparseVectors(Change):
    """Changes by sparse vectors.

    Attributes:
        offsets: `int64 [C + 1]`: the entries of client c are those from `offsets[c]` up to
            `offsets[c + 1]`.
        rows: `int64 [n]`, the row of each entry; distinct within a client. Of single entries of a
            matrix, the rows are positions in it, row after row.
        values: `float64 [n]`.
        outer: whether a client changes the parameter, `[rows, rows]`, by the outer product of its
            vector with itself.
    """

    offsets: np.ndarray
    rows: np.ndarray
    values: np.ndarray
    outer: bool

    def powers(self, order: int) -> Tensor:
        # the norm of an outer product is the product of the norms, in L1 as in L2
        powers = np.bincount(self._owners, np.abs(self.values) ** order, len(self.offsets) - 1)
        return torch.from_numpy(powers**2 if self.outer else powers)

    def add_to(self, total: Tensor, shares: Tensor) -> None:
        with summed_on_processor(total) as summed:
            if self.outer:
                from fedrec.sums.products import add_outer_products  # imports Numba

                vectors = (self.offsets, self.rows, self.values)
                add_outer_products(summed.numpy(), *vectors, shares.numpy(force=True))
            else:
                summed.view(-1).add_(torch.from_numpy(self._weighted_sum(shares, summed.numel())))

    def applied(self, value: Tensor, index: int) -> Tensor:
        entries = slice(*self.offsets[index : index + 2].tolist())
        rows = torch.from_numpy(self.rows[entries]).to(value.device)
        values = self.values[entries]
        result = value.clone()
        if self.outer:
            result[rows[:, None], rows] += torch.from_numpy(np.outer(values, values)).to(result)
        else:
            result.view(-1)[rows] += torch.from_numpy(values).to(result)
        return result

    def add_rows(self, total: SparseAccumulator, shares: Tensor) -> bool:
        if self.outer:
            raise ValueError("Expected whole rows of an item table, got outer products.")
        changed = distinct(self.rows)
        summed = self._weighted_sum(shares, int(changed.max(initial=-1)) + 1)
        total.add(changed, summed[changed, None])
        return True

    def changed_rows(self, table: Tensor) -> np.ndarray:
        rows = self.rows if self.outer else self.rows // max(1, table[:1].numel())
        pairs = distinct(self._owners * len(table) + rows)
        return np.bincount(pairs // len(table), minlength=len(self.offsets) - 1)

    @cached_property
    def _owners(self) -> np.ndarray:
        """The index of the client of each entry."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def _weighted_sum(self, shares: Tensor, size: int) -> np.ndarray:
        """Sum of the vectors, `float64 [size]`."""
        weights = shares.numpy(force=True)[self._owners]
        return np.bincount(self.rows, weights * self.values, size)
