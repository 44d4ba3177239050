# SPDX-License-Identifier: Apache-2.0
"""The result of training a block of clients, by any path."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from fedrec.cohort.block import Block
from fedrec.protocol.sparse_update import SparseAccumulator


@runtime_checkable
class Outcome(Protocol):
    """Norms, weighted sums and single clients' parameters of a block of C trained clients; see
    `Trained`."""

    @property
    def start(self) -> Mapping[str, Tensor]:
        """The global parameters, without cohort dimension."""
        ...

    @property
    def block(self) -> Block:
        """The clients."""
        ...

    def losses(self) -> list[float]:
        """Mean loss of each client over its last epoch; NaN without examples or without a reported
        loss."""
        ...

    def norms(self, names: Collection[str] | None = None, order: int = 2) -> Tensor:
        """`float64 [C]`: norm (order 2: L2, 1: L1) of each client's update of the named parameters;
        None: of all."""
        ...

    def add_dense(self, totals: Mapping[str, Tensor], shares: Tensor) -> None:
        """Add share times update of every client to the totals of parameters that are not item
        tables, `float64` in their shapes; `shares` is `float64 [C]`."""
        ...

    def add_rows(self, name: str, total: SparseAccumulator, shares: Tensor) -> None:
        """The same for an item table, added to the running sum of its changes; `shares` is `float64
        [C]`."""
        ...

    def parameters_of(self, place: int) -> dict[str, Tensor]:
        """One client's whole parameters, `[1, ...]` each."""
        ...
