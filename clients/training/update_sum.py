# SPDX-License-Identifier: Apache-2.0
"""The running sums of a node: of weighted updates, or of updates that each client clips (and
noises) first.

If updates are protected, an update that is not finite counts as zero: the client is counted, and
adds nothing to the sum.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from clients.training.compressed import CompressedUpdates
from fedrec.cohort.outcome import Outcome
from fedrec.privacy.noise_source import NoiseSource
from fedrec.privacy.protection import Protection
from fedrec.protocol.compact import bytes_of_triangle
from fedrec.protocol.orders import TrainSum, Weighting
from fedrec.protocol.sparse_update import Change, SparseAccumulator, SparseUpdate


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
        self.unclipped = 0
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
            for place, client in enumerate(clients):
                whole = trained.changes_of(place)
                own = {name: whole[name].double().numpy(force=True) for name in self._sent}
                self._add_whole(client, own, shares[place])
        elif self.compressed is not None:
            self._add_compressed(self.compressed, clients, trained, shares)
        else:
            self.sent += trained.sent_bytes(self._sent)
            self._add_sums(trained, torch.tensor(shares, dtype=torch.float64))
        self._count(shares, examples, trained.losses())

    def sum(self) -> TrainSum:
        """The sums so far, in the type of the parameters; for a table with less than half of its
        rows changed, only these rows."""
        found: dict[str, Change] = {
            name: self._dense_sum(name, value.cpu().numpy()).astype(self.arrays[name].dtype)
            for name, value in self.dense.items()
        }
        found |= {name: table.change(self.arrays[name]) for name, table in self.tables.items()}
        ordered = {name: found[name] for name in self.arrays if name in found}
        if self.protection is not None and self.protection.silent:
            return TrainSum(ordered, self.clients, self.weight, 0, 0.0, 0, self.unclipped)
        return TrainSum(
            ordered,
            self.clients,
            self.weight,
            self.examples,
            self.loss,
            self.losses,
            self.unclipped,
            self.sent,
            None if self.compressed is None else self.compressed.passed_on,
        )

    @property
    def errors(self) -> Mapping[int, Mapping[str, np.ndarray]]:
        """What each client keeps of its update for the next one, by names of their own."""
        return {} if self.compressed is None else self.compressed.errors

    @property
    def _sent(self) -> list[str]:
        return list(self.arrays) if self.protection is None else list(self.protection.names)

    def _shares(self, examples: Sequence[int], norms: np.ndarray) -> list[float]:
        """Factor of each client's update."""
        if self.protection is None:
            return [1.0 if self.weighting == "uniform" else float(count) for count in examples]
        if self.protection.counted:
            self.unclipped += int((norms <= self.protection.clip_norm).sum())
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
        own = self._sent, self.tables
        for update in compressed.of_block(clients, trained, self.arrays, *own, shares, clip):
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
        finite = [loss for loss in losses if math.isfinite(loss)]
        self.loss = self.loss + sum(finite)
        self.losses = self.losses + len(finite)
