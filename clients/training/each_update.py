# SPDX-License-Identifier: Apache-2.0
"""The updates of a node's clients, kept apart."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from torch import Tensor

from fedrec.cohort.outcome import ClientUpdate, Outcome
from fedrec.protocol.client_arrays import ClientArrays, ItemRequests
from fedrec.protocol.orders import TrainEach


class EachUpdate:
    """Collects updates.

    Args:
        names: the parameters that are sent; None: all that an update has and are not private.
        private: names of the parameters that stay with the clients.
        tables: names of those of which clients change few rows.
    """

    def __init__(
        self, names: Collection[str] | None, private: Collection[str], tables: Collection[str]
    ) -> None:
        self.names = names
        self.private = private
        self.tables = tables
        self._found: dict[int, tuple[ClientUpdate, int, float]] = {}

    def add_block(self, clients: Sequence[int], trained: Outcome) -> None:
        """The updates of a whole block."""
        said = zip(clients, trained.block.examples, trained.losses(), strict=True)
        named = trained.changes_of(0) if self.names is None else self.names
        names = [name for name in named if name not in self.private]
        tables = [name for name in names if name in self.tables]
        for place, (client, examples, loss) in enumerate(said):
            update = trained.update_of(place, names, tables)
            self._found[client] = update, examples, loss

    def reply(self) -> TrainEach:
        """The updates so far, by client."""
        clients = sorted(self._found)
        found = [self._found[client] for client in clients]
        updates = [update for update, _, _ in found]
        requests = ItemRequests.of(np.array(clients), [update.items for update in updates])
        values = _together([update.values for update in updates], np.stack)
        rows = _together([update.rows for update in updates], np.concatenate)
        examples = np.array([count for _, count, _ in found], dtype=np.int64)
        losses = np.array([loss for _, _, loss in found], dtype=np.float64)
        return TrainEach(ClientArrays(requests, values, rows), examples, losses)


def _together(
    parts: Sequence[Mapping[str, Tensor]], join: Callable[[list[np.ndarray]], np.ndarray]
) -> dict[str, np.ndarray]:
    names = parts[0] if parts else {}
    return {name: join([part[name].numpy(force=True) for part in parts]) for name in names}
