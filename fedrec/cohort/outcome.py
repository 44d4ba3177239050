# SPDX-License-Identifier: Apache-2.0
"""The result of training a block of clients, by any path."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedrec.cohort.block import Block
from fedrec.protocol.sparse_update import SparseAccumulator


@dataclass(frozen=True, eq=False)
class ClientUpdate:
    """One client's update, `theta_local - theta_global`.

    Attributes:
        values: by parameter, in its shape.
        items: `int64 [n]`, ascending: the items whose rows may have changed.
        rows: by item table, `[n, ...]`, the change of these rows.
    """

    values: dict[str, Tensor]
    items: np.ndarray
    rows: dict[str, Tensor]


class Outcome(ABC):
    """A block of C trained clients: norms, weighted sums and single updates.

    Attributes:
        start: the global parameters, without cohort dimension; those that a subclass does not name
            did not change.
        block: the clients.
        last_losses: `[C]`, mean loss of each client over its last epoch; NaN without examples or
            without a reported loss.
    """

    start: Mapping[str, Tensor]
    block: Block
    last_losses: Sequence[float] | np.ndarray

    def losses(self) -> list[float]:
        """`last_losses` as a list."""
        return [float(loss) for loss in self.last_losses]

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

    def add_rows(self, name: str, total: SparseAccumulator, shares: Tensor) -> None:
        """The same of an item table `[items, d]`, by rows, added to the running sum of its changes;
        `shares` is `float64 [C]`."""
        for place, share in enumerate(shares.tolist()):
            if share:
                update = self.update_of(place, [name], [name])
                values = share * update.rows[name].double()
                total.add(update.items, values.numpy(force=True))

    @abstractmethod
    def parameters_of(self, place: int) -> dict[str, Tensor]:
        """One client's whole parameters, `[1, ...]` each, item tables at full size."""

    def changes_of(self, place: int) -> dict[str, Tensor]:
        """One client's update, whole arrays."""
        own = self.parameters_of(place)
        return {name: own[name][0] - value for name, value in self.start.items()}

    def update_of(
        self, place: int, names: Collection[str], tables: Collection[str]
    ) -> ClientUpdate:
        """One client's update of some parameters.

        Args:
            place: the client's place in the block.
            names: the parameters.
            tables: those of them that are item tables, of which only rows that change are given.
        """
        changes = self.changes_of(place)
        moved = [changes[name].flatten(1).any(1) for name in tables]
        some = torch.stack(moved).any(0) if moved else torch.zeros(0, dtype=torch.bool)
        items = some.nonzero()[:, 0]
        rows = {name: changes[name][items] for name in tables}
        values = {name: changes[name] for name in names if name not in rows}
        return ClientUpdate(values, items.numpy(force=True), rows)

    def kept(self, names: Collection[str]) -> tuple[Outcome, dict[str, Tensor]]:
        """The block without the named private parameters, and their new values, `[C, ...]` each; by
        default there are none."""
        return self, {}
