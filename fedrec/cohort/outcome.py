# SPDX-License-Identifier: Apache-2.0
"""The result of training a block of clients, by any path."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedrec.cohort.block import Block
from fedrec.protocol.client_arrays import ClientArrays, ItemRequests
from fedrec.protocol.compact import bytes_of_rows
from fedrec.protocol.sparse_update import SparseAccumulator, SparseUpdate


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
        own = self.last_losses
        return own.tolist() if isinstance(own, np.ndarray | Tensor) else list(map(float, own))

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
        """The same of an item table `[items, d]`, by rows, added to the running sum of its changes;
        `shares` is `float64 [C]`."""
        own = self.each(range(len(self.block)), [name], [name])
        changes = own.changes(name, self.start[name].numpy(force=True))
        for share, change in zip(shares.tolist(), changes, strict=True):
            if share and isinstance(change, SparseUpdate):
                total.add(change.rows, share * change.values.astype(np.float64))

    @abstractmethod
    def parameter_of(self, name: str, place: int) -> Tensor:
        """One client's value of a parameter of `start`, `[1, ...]`, an item table at full size; a
        view of the shared value where the client did not change it."""

    def parameters_of(self, place: int) -> Mapping[str, Tensor]:
        """One client's whole parameters, `[1, ...]` each, item tables at full size. Each is made
        when it is first read, as tables that nobody reads may be much larger than the others."""
        return _OneClient(self, place)

    def changes_of(self, place: int) -> dict[str, Tensor]:
        """One client's update, whole arrays."""
        return {
            name: self.parameter_of(name, place)[0] - value for name, value in self.start.items()
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
        for place in range(len(self.block)):
            changes = self.changes_of(place)
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

    def __init__(self, outcome: Outcome, place: int) -> None:
        self._outcome = outcome
        self._place = place
        self._read: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._read:
            self._read[name] = self._outcome.parameter_of(name, self._place)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._outcome.start)

    def __len__(self) -> int:
        return len(self._outcome.start)
