# SPDX-License-Identifier: Apache-2.0
"""The updates of a node's clients, kept apart."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from fedrec.cohort.outcome import Outcome
from fedrec.protocol.orders import TrainEach


class EachUpdate:
    """Collects updates.

    Args:
        private: names of the parameters that stay with the clients.
        tables: names of the parameters of which clients change few rows.
    """

    def __init__(self, private: Collection[str], tables: Collection[str]) -> None:
        self.private = private
        self.tables = tables
        self._blocks: list[TrainEach] = []

    def add_block(self, clients: Sequence[int], trained: Outcome) -> None:
        """The updates of a whole block."""
        names = [name for name in trained.names if name not in self.private]
        tables = [name for name in names if name in self.tables]
        examples = np.array(trained.block.examples, dtype=np.int64)
        losses = np.array(trained.losses(), dtype=np.float64)
        self._blocks.append(TrainEach(trained.each(clients, names, tables), examples, losses))

    @property
    def errors(self) -> Mapping[int, Mapping[str, np.ndarray]]:
        """Nothing is left out of an update."""
        return {}

    def reply(self) -> TrainEach:
        """The updates so far, by client."""
        return TrainEach.joined(self._blocks)
