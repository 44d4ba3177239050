# SPDX-License-Identifier: Apache-2.0
"""The batches of one client, padded to a rectangle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedrec.data.client_data import ClientData

_NARROW = 512  # examples; padding up to here is cheaper than blocks of fewer clients
_UNLIMITED = 1 << 40  # examples of a batch; more than any client has


@dataclass(frozen=True, eq=False)
class Batches:
    """All batches of a client's local work, in order.

    Attributes:
        items: `int64 [S, B]`, S gradient steps of at most B examples; places beyond a batch's size
            hold 0.
        labels: `float32 [S, B]`.
        sizes: `int64 [S]`, number of examples in each batch, in `[0, B]`.
        examples: number of examples in the last epoch.
        last_epoch: number of steps in the last epoch.
    """

    items: np.ndarray
    labels: np.ndarray
    sizes: np.ndarray
    examples: int
    last_epoch: int

    @classmethod
    def cut(cls, epochs: Sequence[tuple[np.ndarray, np.ndarray]], batch_size: int) -> Batches:
        """Cut each epoch's (items `int64 [n]`, labels `float32 [n]`), already in the order of
        training, into batches; the last may be smaller.

        If the batch size is far larger than the client's data, as for a step on all examples, the
        rectangle is narrower.
        """
        batch_size = _width(batch_size, max((len(items) for items, _ in epochs), default=0))
        steps = [-(-len(items) // batch_size) for items, _ in epochs]
        total = sum(steps)
        items = np.zeros(total * batch_size, dtype=np.int64)
        labels = np.zeros(total * batch_size, dtype=np.float32)
        sizes = np.full(total, batch_size, dtype=np.int64)
        end = 0
        for (epoch_items, epoch_labels), count in zip(epochs, steps, strict=True):
            start = end * batch_size
            end += count
            length = len(epoch_items)
            items[start : start + length] = epoch_items
            labels[start : start + length] = epoch_labels
            if count:
                sizes[end - 1] = length - (count - 1) * batch_size
        shape = total, batch_size
        return cls(
            items.reshape(shape),
            labels.reshape(shape),
            sizes,
            len(epochs[-1][0]) if epochs else 0,
            steps[-1] if steps else 0,
        )

    @classmethod
    def none(cls) -> Batches:
        """No batches."""
        items = np.zeros((0, 0), dtype=np.int64)
        return Batches(items, items.astype(np.float32), items.reshape(-1), 0, 0)

    @classmethod
    def whole(cls, epochs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Batches:
        """Each epoch's (items `int64 [n]`, labels `float32 [n]`) as one batch."""
        return cls.cut(epochs, _UNLIMITED)

    def references(self) -> tuple[np.ndarray, np.ndarray]:
        """The items whose rows each step needs, `int64 [S, N]`, and which of them are no padding,
        `bool [S, N]`."""
        return self.items, np.arange(self.items.shape[1]) < self.sizes[:, None]


@dataclass(frozen=True, eq=False)
class OwnData(Batches):
    """A client's data and random stream as they are, for steps that draw their batches while they
    train.

    Attributes:
        data: the client's data.
        random: its stream.
    """

    data: ClientData
    random: np.random.Generator

    @classmethod
    def of(cls, data: ClientData, random: np.random.Generator) -> OwnData:
        """No batches, and what they would be drawn from."""
        return cls(**vars(cls.none()), data=data, random=random)


def _width(batch_size: int, longest: int) -> int:
    """The width of a client's rectangle. It depends on the client's own data only, because
    otherwise rounding would depend on the other clients of the block."""
    return (
        min(batch_size, max(_NARROW, 1 << (longest - 1).bit_length()))
        if longest
        else min(batch_size, _NARROW)
    )
