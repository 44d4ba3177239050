# SPDX-License-Identifier: Apache-2.0
"""The running sums of a node's updates, and their compression."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from clients.storage import PrivateState
from fedrec.compression.codec import Codec, row_numbers
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import Experiment
from fedrec.privacy.clipping import Clip
from fedrec.privacy.protection import Protection
from fedrec.protocol.orders import SentUpdate, TrainSum, Weighting
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
from fedrec.runtime.ragged import add_prefix, strip_prefix
from fedrec.training.results import Outcome

# Compression of the updates of a node's clients: after each one's clip, and before the sum.
#
# What is added is what the server would decode, so a simulation learns as a deployment does, and
# its bytes are those that each client would send by itself, whatever clients a node hosts.

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
        before = self._errors_before(clients, arrays)
        changes_of = []
        for index, client in enumerate(clients):
            update = {name: changes[index] for name, changes in by_name.items()}
            share = shares[index]
            if not share or not all(map(_finite, update.values())):
                continue  # it counts as zero
            if clip is not None:
                update = {name: scaled(change, share) for name, change in update.items()}
            if before[index]:
                update = {
                    name: added(change, before[index][name], arrays[name])
                    for name, change in update.items()
                }
            decoded = self._sent(client, update, arrays, clip, share if clip is None else 1.0)
            if self._keeps_error:
                left = {name: _left(update[name], decoded[name], arrays[name]) for name in names}
                self.errors[client] = _kept(
                    {name: _in_form(change, name in tables) for name, change in left.items()}
                )
            if clip is None and share != 1:
                decoded = {name: scaled(change, share) for name, change in decoded.items()}
            changes_of.append(
                {name: _in_form(change, name in tables) for name, change in decoded.items()}
            )
        return changes_of

    def _sent(
        self,
        client: int,
        update: Mapping[str, Change],
        arrays: Arrays,
        clip: Clip | None,
        share: float,
    ) -> dict[str, Change]:
        """The update as the server decodes it; its bytes are counted."""
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
        """The part of its last update that each client retained."""
        if not self._keeps_error or self.store is None:
            return [{} for _ in clients]
        before: list[dict[str, Change]] = [{} for _ in clients]
        for positions, saved in self.store.load_all(clients, self.codec.round):
            for row, position in enumerate(positions):
                left = {name: value[row] for name, value in saved.items()}
                before[position] = _read(left, arrays)
        return before


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
    """The retained part as arrays, with names of their own."""
    tables = {name: change for name, change in left.items() if isinstance(change, SparseUpdate)}
    return add_prefix(
        {
            _WHOLE: {
                name: change
                for name, change in left.items()
                if not isinstance(change, SparseUpdate)
            },
            _ROWS: {
                name: row_numbers(change.rows, change.shape[0]) for name, change in tables.items()
            },
            _VALUES: {name: change.values for name, change in tables.items()},
        }
    )


def _read(saved: Mapping[str, np.ndarray], arrays: Arrays) -> dict[str, Change]:
    """The retained part, read from the arrays of `_kept`."""
    values = strip_prefix(_VALUES, saved)
    tables = {
        name: SparseUpdate(arrays[name].shape, rows.astype(np.int64), values[name])
        for name, rows in strip_prefix(_ROWS, saved).items()
    }
    return {**strip_prefix(_WHOLE, saved), **tables}


def _left(update: Change, sent: Change, table: np.ndarray) -> np.ndarray:
    """The retained part, a whole array `float32`."""
    return (dense_change(update, table) - dense_change(sent, table)).astype(np.float32)


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
        sent = arrays if protection is None else protection.names
        self._noisy = protection is not None and protection.noise_scale > 0  # noise is on every row
        tables = [] if self._noisy else [name for name in sent if name in item_tables]
        self.tables = {name: SparseAccumulator(arrays[name].shape) for name in tables}
        self.dense = {
            name: torch.zeros(arrays[name].shape, dtype=torch.float64, device=device)
            for name in sent
            if name not in tables
        }
        self._left_out = 0.0  # variance of noise that is drawn for the sum
        self._first = -1  # client, which tells nodes apart
        self.clients = 0
        self.weight = 0.0
        self.examples = 0
        self.loss = 0.0
        self.losses = 0
        self.sent = 0

    def add_block(self, clients: Sequence[int], trained: Outcome) -> None:
        """The updates of a whole block."""
        if not self.clients:
            self._first = clients[0]
        examples = trained.block.examples
        norms = (
            trained.norms(self._sent, self.protection.order).numpy()
            if self.protection
            else np.zeros(len(clients))
        )
        shares = self._shares(examples, norms)
        if self._noisy:
            self.sent += len(clients) * sum(map(self._whole_bytes, self._sent))
            for index, client in enumerate(clients):
                whole = trained.changes_of(index)
                update = {name: whole[name].double().numpy(force=True) for name in self._sent}
                self._add_whole(client, update, shares[index])
        elif self.compressed is not None:
            self._add_compressed(self.compressed, clients, trained, shares)
        else:
            self.sent += trained.sent_bytes(self._sent)
            self._add_sums(trained, torch.tensor(shares, dtype=torch.float64))
        self._count(shares, examples, trained.losses())

    def sum(self) -> TrainSum:
        """The sums so far, in the type of the parameters; for a table with less than half of its
        rows changed, only these rows."""
        sums: dict[str, Change] = {
            name: self._dense_sum(name, value.cpu().numpy()).astype(self.arrays[name].dtype)
            for name, value in self.dense.items()
        }
        sums |= {name: table.change(self.arrays[name]) for name, table in self.tables.items()}
        ordered = {name: sums[name] for name in self.arrays if name in sums}
        if self.protection is not None and self.protection.silent:
            return TrainSum(ordered, self.clients, self.weight, 0, 0.0, 0)
        return TrainSum(
            ordered,
            self.clients,
            self.weight,
            self.examples,
            self.loss,
            self.losses,
            self.sent,
            None if self.compressed is None else self.compressed.passed_on,
        )

    @property
    def errors(self) -> Mapping[int, Mapping[str, np.ndarray]]:
        """The part of its update that each client retains for the next one, by name."""
        return {} if self.compressed is None else self.compressed.errors

    @property
    def _sent(self) -> list[str]:
        return list(self.arrays) if self.protection is None else list(self.protection.names)

    def _shares(self, examples: Sequence[int], norms: np.ndarray) -> list[float]:
        """Factor of each client's update."""
        if self.protection is None:
            return [1.0 if self.weighting == "uniform" else float(count) for count in examples]
        return self.protection.clip.factors(norms).tolist()

    def _dense_sum(self, name: str, total: np.ndarray) -> np.ndarray:
        """The sum of a parameter. The noise of clients is independent on every number; of symmetric
        matrices the symmetric part is sent, which is what the server would keep of the whole."""
        noisy = self._with_noise(name, total)
        return (noisy + noisy.T) / 2 if self._noisy and name in self.symmetric else noisy

    def _whole_bytes(self, name: str) -> int:
        """Bytes of a client's update of a parameter whose numbers all change."""
        array = self.arrays[name]
        if name not in self.symmetric:
            return array.nbytes
        return int(bytes_of_triangle(np.array([len(array)]), array.itemsize, array.nbytes)[0])

    def _with_noise(self, name: str, total: np.ndarray) -> np.ndarray:
        """The sum of a parameter with the noise that the blocks left out."""
        if not self._left_out:
            return total
        noise = self.source.gaussian(total.size, f"sum/{name}", self.round, self._first)
        return total + math.sqrt(self._left_out) * noise.reshape(total.shape)

    def _add_sums(self, trained: Outcome, shares: torch.Tensor) -> None:
        self._left_out += trained.left_out(shares)
        trained.add_dense(self.dense, shares)
        for name in self.tables:
            trained.add_rows(name, self.tables[name], shares)

    def _add_compressed(
        self,
        compressed: CompressedUpdates,
        clients: Sequence[int],
        trained: Outcome,
        shares: Sequence[float],
    ) -> None:
        clip = None if self.protection is None else self.protection.clip
        names = self._sent, self.tables
        for update in compressed.of_block(clients, trained, self.arrays, *names, shares, clip):
            for name, change in update.items():
                if isinstance(change, SparseUpdate):
                    self.tables[name].add(change.rows, change.values)
                else:
                    self.dense[name] += torch.from_numpy(change).to(self.dense[name].device)
        self.sent = compressed.bytes

    def _add_whole(self, client: int, delta: Mapping[str, np.ndarray], share: float) -> None:
        """Add one client's update as whole arrays with its noise; for a client of share 0, or whose
        update is not finite, only the noise."""
        if not all(np.isfinite(value).all() for value in delta.values()):
            share = 0.0  # its norm may be finite: a block measures only the rows that changed
        change = {
            name: share * value if share else np.zeros_like(value) for name, value in delta.items()
        }
        change = self.protection.noisy(change, self.source, self.round, client)  # type: ignore
        for name, value in change.items():
            self.dense[name] += torch.from_numpy(value).to(self.dense[name].device)

    def _count(
        self, shares: Sequence[float], examples: Sequence[int], losses: Sequence[float]
    ) -> None:
        self.clients += len(shares)
        # Protected clients all have weight 1, whatever the factor of their clip.
        self.weight += sum(shares) if self.protection is None else len(shares)
        self.examples += sum(examples)
        for loss in losses:
            if math.isfinite(loss):
                self.loss += loss
                self.losses += 1
