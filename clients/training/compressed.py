# SPDX-License-Identifier: Apache-2.0
"""Compression of the updates of a node's clients: after each one's clip, and before the sum.

What is added is what the server would decode, so a simulation learns as a deployment does, and its
bytes are those that each client would send by itself, whatever clients a node hosts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from clients.storage.private_state import PrivateState
from fedrec.cohort.outcome import Outcome
from fedrec.compression.base import row_numbers
from fedrec.compression.codec import Codec
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import Experiment
from fedrec.prefixes import add_prefix, strip_prefix
from fedrec.privacy.clipping import Clip
from fedrec.protocol.compact import network_bytes
from fedrec.protocol.orders import SentUpdate
from fedrec.protocol.sparse_update import Change, SparseUpdate, added, dense_change, scaled

_WHOLE = "compression/whole/"  # prefixes of what a client keeps of its last update: arrays,
_ROWS = "compression/rows/"  # and of tables the rows of which something was left out
_VALUES = "compression/values/"

Arrays = Mapping[str, np.ndarray]


@dataclass(eq=False)
class CompressedUpdates:
    """Compresses the updates of clients in a round.

    Attributes:
        codec: how.
        store: where clients keep what was left out; None: nowhere.
        private: names of the parameters that stay with the clients.
        passed_on: what each client sent so far, if the node sends it on; None: it sends the sum.
        bytes: of what the clients sent so far.
        errors: what each client keeps for its next update, with names of their own.
    """

    codec: Codec
    store: PrivateState | None
    private: Collection[str] = ()
    passed_on: list[SentUpdate] | None = None
    bytes: int = 0
    errors: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        round_: int,
        store: PrivateState | None,
        private: Collection[str],
        *,
        passes_on: bool = False,
    ) -> CompressedUpdates | None:
        """The compression of an experiment; None: it has none.

        Raises:
            ExperimentError: clients have to keep what was left out, and there is no place for it.
        """
        codec = Codec.of(experiment, round_)
        if codec is None or experiment.compression is None:
            return None
        if codec.compression.keeps_error and store is None:
            raise ExperimentError(
                "clients cannot keep what a compression leaves out",
                expected="a run folder, for the private state of the clients",
                got=f"compression {experiment.compression.name!r} with error feedback, and no"
                " folder",
                fix="give the run an output folder, or set compression.error-feedback = false",
            )
        return cls(codec, store, private, [] if passes_on else None)

    def of_block(
        self,
        clients: Sequence[int],
        trained: Outcome,
        arrays: Arrays,
        sent: Collection[str],
        tables: Collection[str],
        shares: Sequence[float],
        clip: Clip | None,
    ) -> list[dict[str, Change]]:
        """What each client of a block adds to the sum.

        Args:
            clients: `[C]`.
            trained: the block.
            arrays: the global parameters.
            sent: names of the parameters that may be sent.
            tables: names of item tables, of which clients change few rows.
            shares: factor of each client's update, before it is compressed under a clip, else
                after.
            clip: of an update; None: it is not clipped.
        """
        names = [n for n in trained.names if n in sent and n not in self.private]
        own = trained.each(clients, names, [name for name in names if name in tables])
        by_name = {name: own.changes(name, arrays[name]) for name in names}
        before = self._errors_before(clients, arrays)
        found = []
        for place, client in enumerate(clients):
            update = {name: changes[place] for name, changes in by_name.items()}
            share = shares[place]
            if not share or not all(map(_finite, update.values())):
                continue  # it counts as zero
            if clip is not None:
                update = {name: scaled(change, share) for name, change in update.items()}
            if before[place]:
                update = {
                    name: added(change, before[place][name], arrays[name])
                    for name, change in update.items()
                }
            decoded = self._sent(client, update, arrays, clip, share if clip is None else 1.0)
            if self._keeps_error:
                left = {name: _left(update[name], decoded[name], arrays[name]) for name in names}
                self.errors[client] = _kept(
                    {name: _in_form(one, name in tables) for name, one in left.items()}
                )
            if clip is None and share != 1:
                decoded = {name: scaled(change, share) for name, change in decoded.items()}
            found.append({name: _in_form(one, name in tables) for name, one in decoded.items()})
        return found

    def _sent(
        self,
        client: int,
        update: Mapping[str, Change],
        arrays: Arrays,
        clip: Clip | None,
        share: float,
    ) -> dict[str, Change]:
        """What the server decodes of an update; its bytes are counted."""
        shapes = {name: arrays[name].shape for name in update}
        payloads, decoded = self.codec.encoded(client, update, shapes, clip)
        self.bytes += sum(network_bytes(payload) for payload in payloads.values())
        if self.passed_on is not None:
            self.passed_on.append(SentUpdate(payloads, share))
        return decoded

    @property
    def _keeps_error(self) -> bool:
        return self.codec.compression.keeps_error

    def _errors_before(self, clients: Sequence[int], arrays: Arrays) -> list[dict[str, Change]]:
        """What each client kept of its last update."""
        if not self._keeps_error or self.store is None:
            return [{} for _ in clients]
        return [_read(one, arrays) for one in self.store.load_all(clients, self.codec.round)]


def _finite(change: Change) -> bool:
    values = change.values if isinstance(change, SparseUpdate) else change
    return bool(np.isfinite(values).all())


def _in_form(change: Change, table: bool) -> Change:
    """A change of an item table as its rows that are not zero, any other as a whole array."""
    if isinstance(change, SparseUpdate):
        return change if table else change.dense(np.zeros(0))
    if not table:
        return change
    rows = np.flatnonzero(change.any(axis=tuple(range(1, change.ndim))))
    return SparseUpdate(change.shape, rows, change[rows])


def _kept(left: Mapping[str, Change]) -> dict[str, np.ndarray]:
    """What was left out as arrays, with names of their own."""
    tables = {name: one for name, one in left.items() if isinstance(one, SparseUpdate)}
    return add_prefix(
        {
            _WHOLE: {name: one for name, one in left.items() if not isinstance(one, SparseUpdate)},
            _ROWS: {name: row_numbers(one.rows, one.shape[0]) for name, one in tables.items()},
            _VALUES: {name: one.values for name, one in tables.items()},
        }
    )


def _read(kept: Mapping[str, np.ndarray], arrays: Arrays) -> dict[str, Change]:
    """What `_kept` was made of."""
    values = strip_prefix(_VALUES, kept)
    tables = {
        name: SparseUpdate(arrays[name].shape, rows.astype(np.int64), values[name])
        for name, rows in strip_prefix(_ROWS, kept).items()
    }
    return {**strip_prefix(_WHOLE, kept), **tables}


def _left(update: Change, sent: Change, table: np.ndarray) -> np.ndarray:
    """What was left out, a whole array `float32`."""
    return (dense_change(update, table) - dense_change(sent, table)).astype(np.float32)
