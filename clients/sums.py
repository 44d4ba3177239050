# SPDX-License-Identifier: Apache-2.0
"""The running sums of a node's updates, and their compression."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from clients.storage import Arrays as PrivateArrays
from clients.storage import PrivateState
from fedrec.compression.codec import Codec
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import Experiment
from fedrec.privacy.clipping import Clip, Protection
from fedrec.protocol.messages import TrainSum, Weighting
from fedrec.protocol.updates import (
    Change,
    SparseAccumulator,
    SparseUpdate,
    added,
    bytes_of_triangle,
    dense_change,
    network_bytes,
    scaled,
)
from fedrec.rng import NoiseSource
from fedrec.runtime.ragged import strip_prefix
from fedrec.training.results import BlockUpdate, Total

# Compression of the updates of a node's clients: after each one's clip, and before the sum.
#
# What is added is what a server would decode, and the bytes are those that each client would send
# by itself, whatever clients a node hosts.

_KEPT = "compression/"  # prefix of the names of what a client keeps of its last update

Arrays = Mapping[str, np.ndarray]


@dataclass(eq=False)
class CompressedUpdates:
    """Compresses the updates of clients in a round.

    Attributes:
        codec: how.
        store: where clients keep what was left out; None: nowhere.
        private: names of the parameters that stay with the clients.
        bytes: of what the clients sent so far.
        errors: what each client keeps for its next update, with names of their own, as its
            private state.
    """

    codec: Codec
    store: PrivateState | None
    private: Collection[str] = ()
    bytes: int = 0
    errors: dict[int, PrivateArrays] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        round_: int,
        store: PrivateState | None,
        private: Collection[str],
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
                got=f"compression {experiment.compression.name!r}, and no folder",
                fix="give the run an output folder, or set compression.name = 'rounding'",
            )
        return cls(codec, store, private)

    def of_block(
        self,
        clients: Sequence[int],
        trained: BlockUpdate,
        arrays: Arrays,
        sent: Collection[str],
        tables: Collection[str],
        shares: Sequence[float],
        clip: Clip | None,
    ) -> list[dict[str, Change]]:
        """The contribution of each client of a block to the sum.

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
        updates = trained.each(clients, names, [name for name in names if name in tables])
        by_name = {name: updates.changes(name, arrays[name]) for name in names}
        before = self._errors_before(clients)
        changes_of = []
        for index, client in enumerate(clients):
            update = {name: changes[index] for name, changes in by_name.items()}
            share = shares[index]
            arrays_of = (
                change.values if isinstance(change, SparseUpdate) else change
                for change in update.values()
            )
            if not share or not all(np.isfinite(array).all() for array in arrays_of):
                continue  # it counts as zero
            if clip is not None:
                update = scaled(update, share)
            if before[index]:
                update = {
                    name: added(change, _in_form(before[index][name], name in tables))
                    for name, change in update.items()
                }
            decoded = self._sent(client, update, arrays, clip)
            if self.codec.compression.keeps_error:
                left = {
                    name: dense_change(update[name]) - dense_change(decoded[name]) for name in names
                }
                self.errors[client] = {
                    f"{_KEPT}{name}": _as_state(value.astype(np.float32), name in tables)
                    for name, value in left.items()
                }
            if clip is None and share != 1:
                decoded = scaled(decoded, share)
            changes_of.append(
                {name: _in_form(change, name in tables) for name, change in decoded.items()}
            )
        return changes_of

    def _sent(
        self, client: int, update: Mapping[str, Change], arrays: Arrays, clip: Clip | None
    ) -> dict[str, Change]:
        """The update as the server decodes it; its bytes are counted."""
        shapes = {name: arrays[name].shape for name in update}
        payloads, decoded = self.codec.encoded(client, update, shapes, clip)
        self.bytes += sum(network_bytes(payload) for payload in payloads.values())
        return decoded

    def _errors_before(self, clients: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """The part of its last update that each client retained."""
        before: list[dict[str, np.ndarray]] = [{} for _ in clients]
        if not self.codec.compression.keeps_error or self.store is None:
            return before
        for positions, saved in self.store.load_all(clients, self.codec.round):
            left = strip_prefix(_KEPT, saved)
            for row, position in enumerate(positions):
                before[position] = {name: value[row] for name, value in left.items()}
        return before


def _in_form(change: Change, table: bool) -> Change:
    """A change of an item table as its rows that are not zero, any other as a whole array."""
    if isinstance(change, SparseUpdate):
        return change if table else change.dense()
    if not table:
        return change
    rows = np.flatnonzero(change.any(axis=tuple(range(1, change.ndim))))
    return SparseUpdate(change.shape, rows, change[rows])


def _as_state(left: np.ndarray, table: bool) -> np.ndarray | list[SparseUpdate]:
    """A retained part as the state of one client."""
    change = _in_form(left, table)
    return [change] if isinstance(change, SparseUpdate) else change[None]


# The running sums of a node: of weighted updates, or of updates that each client clips (and noises)
# first.
#
# If updates are protected, an update that is not finite counts as zero: the client is counted, and
# adds nothing to the sum.


class UpdateSum:
    """Sums in float64, in the order in which clients are added.

    Args:
        arrays: the global parameters.
        item_tables: names of tables of which clients change few rows.
        weighting: weight of a client's update, if it is not protected.
        protection: clip and noise of each client's update.
        source: where a client's own noise comes from.
        round_: the round, which noise is drawn for.
        device: where trained blocks are; None: the processor.
        compressed: compresses the update of each client after its clip; None: nothing does.
        symmetric: names of parameters that clients change by symmetric matrices.
    """

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        item_tables: Collection[str],
        weighting: Weighting,
        protection: Protection | None,
        source: NoiseSource,
        round_: int,
        device: torch.device | None = None,
        compressed: CompressedUpdates | None = None,
        symmetric: Collection[str] = (),
    ) -> None:
        self.arrays = arrays
        self.weighting = weighting
        self.protection = protection
        self.source = source
        self.round = round_
        self.compressed = compressed
        self.symmetric = symmetric
        self.names = list(arrays if protection is None else protection.names)
        self._noisy = protection is not None and protection.noise_scale > 0  # noise is on every row
        self.totals: dict[str, Total] = {
            name: SparseAccumulator(arrays[name].shape)
            if name in item_tables and not self._noisy
            else torch.zeros(arrays[name].shape, dtype=torch.float64, device=device)
            for name in self.names
        }
        self._left_out = 0.0  # variance of noise that is drawn for the sum
        self._first = -1  # client, which tells nodes apart
        self.clients = 0
        self.weight = 0.0
        self.examples = 0
        self.loss = 0.0
        self.losses = 0
        self.sent = 0

    def add_block(self, clients: Sequence[int], update: BlockUpdate) -> None:
        """Clip, weight and add the updates of a whole block, all parameters of all clients
        together."""
        if not self.clients:
            self._first = clients[0]
        shares = self._shares(update)
        if self._noisy:
            self._add_noisy(clients, update, shares)
        elif self.compressed is not None:
            self._add_compressed(self.compressed, clients, update, shares)
        else:
            weights = torch.from_numpy(shares)
            self.sent += update.sent_bytes(self.names)
            self._left_out += update.noise_variance(weights)
            update.add_to(self.totals, weights)
        self.clients += len(clients)
        # Protected clients all have weight 1, whatever the factor of their clip.
        self.weight += float(shares.sum()) if self.protection is None else len(clients)
        self.examples += sum(update.block.examples)
        losses = [loss for loss in update.losses() if math.isfinite(loss)]
        self.loss = sum(losses, self.loss)
        self.losses += len(losses)

    def sum(self) -> TrainSum:
        """The sums so far, in the type of the parameters; for a table with less than half of its
        rows changed, only these rows."""
        sums: dict[str, Change] = {
            name: total.change(self.arrays[name])
            if isinstance(total, SparseAccumulator)
            else self._with_noise(name, total.cpu().numpy()).astype(self.arrays[name].dtype)
            for name, total in self.totals.items()
        }
        ordered = {name: sums[name] for name in self.arrays if name in sums}
        total = partial(TrainSum, ordered, self.clients, self.weight)
        if self.protection is not None and self.protection.silent:
            return total(0, 0.0, 0)
        return total(self.examples, self.loss, self.losses, self.sent)

    @property
    def errors(self) -> Mapping[int, PrivateArrays]:
        """The part of its update that each client retains for the next one, by name."""
        return {} if self.compressed is None else self.compressed.errors

    def _shares(self, update: BlockUpdate) -> np.ndarray:
        """Factor of each client's update, `float64 [C]`."""
        if self.protection is None:
            examples = np.array(update.block.examples, dtype=np.float64)
            return np.ones_like(examples) if self.weighting == "uniform" else examples
        norms = update.norms(self.names, self.protection.order).numpy()
        return self.protection.clip.factors(norms)

    def _add_noisy(self, clients: Sequence[int], update: BlockUpdate, shares: np.ndarray) -> None:
        """Add each client's update as whole arrays with its noise; for a client of share 0, or
        whose update is not finite, only the noise."""
        self.sent += len(clients) * sum(map(self._whole_bytes, self.names))
        for index, client in enumerate(clients):
            changes = update.changes_of(index)
            whole = {name: changes[name].double().numpy(force=True) for name in self.names}
            # its norm may be finite: a block measures only the rows that changed
            finite = all(np.isfinite(value).all() for value in whole.values())
            share = shares[index] if finite else 0.0
            clipped = {
                name: share * value if share else np.zeros_like(value)
                for name, value in whole.items()
            }
            noisy = self.protection.noisy(clipped, self.source, self.round, client)  # type: ignore
            for name, value in noisy.items():
                self._add_array(name, value)

    def _add_compressed(
        self,
        compressed: CompressedUpdates,
        clients: Sequence[int],
        trained: BlockUpdate,
        shares: np.ndarray,
    ) -> None:
        clip = None if self.protection is None else self.protection.clip
        tables = [n for n, total in self.totals.items() if isinstance(total, SparseAccumulator)]
        given = self.arrays, self.names, tables, shares.tolist(), clip
        for changes in compressed.of_block(clients, trained, *given):
            for name, change in changes.items():
                self._add_array(name, change)
        self.sent = compressed.bytes

    def _add_array(self, name: str, change: Change) -> None:
        total = self.totals[name]
        if isinstance(total, SparseAccumulator) and isinstance(change, SparseUpdate):
            total.add(change.rows, change.values)
        elif isinstance(total, torch.Tensor) and isinstance(change, np.ndarray):
            total += torch.from_numpy(change).to(total.device)

    def _whole_bytes(self, name: str) -> int:
        """Bytes of a client's update of a parameter whose numbers all change."""
        array = self.arrays[name]
        if name not in self.symmetric:
            return array.nbytes
        return int(bytes_of_triangle(np.array([len(array)]), array.itemsize, array.nbytes)[0])

    def _with_noise(self, name: str, total: np.ndarray) -> np.ndarray:
        """The sum of a parameter with the noise that the blocks left out. The noise of clients is
        independent on every number; of symmetric matrices the symmetric part is sent, which is what
        the server would keep of the whole."""
        if self._left_out:
            noise = self.source.gaussian(total.size, f"sum/{name}", self.round, self._first)
            total = total + math.sqrt(self._left_out) * noise.reshape(total.shape)
        return (total + total.T) / 2 if self._noisy and name in self.symmetric else total
