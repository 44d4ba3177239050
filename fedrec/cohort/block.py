# SPDX-License-Identifier: Apache-2.0
"""A block of clients that are trained together: their batches padded to one rectangle, built once before the loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedrec.cohort.batches import Batches


@dataclass(frozen=True, eq=False)
class Block:
    """C clients, those with the most steps first.

    Attributes:
        users: per user feature the clients' category codes, `int64 [C, width]`.
        active: `active[t]` is the number of clients that still train in step t; they are the first ones.
        items: `int64 [S, C, B]`, items of the examples.
        places: `int64 [S, C, N]`, rows in the compact item tables of all clients laid end to end, `[C * R]`, of every
            item that a step needs: those of its examples, in their order, and then any others (`Batches.references`).
        labels: `float32 [S, C, B]`.
        weights: `float32 [S, C, B]`, one over the size of the batch, 0 for padding: the loss is a weighted sum.
        touched: `int64 [C, R]`, the item of each row of the compact tables; padded with item 0.
        touched_counts: number of real rows of each client.
        examples: `[C]`, number of examples of each client in an epoch.
        last_epoch: `[C]`, number of steps in the last epoch.
    """

    users: tuple[Tensor, ...]
    active: tuple[int, ...]
    items: Tensor
    places: Tensor
    labels: Tensor
    weights: Tensor
    touched: Tensor
    touched_counts: tuple[int, ...]
    examples: tuple[int, ...]
    last_epoch: tuple[int, ...]

    @classmethod
    def of(cls, users: Sequence[tuple[np.ndarray, ...]], batches: Sequence[Batches], device: torch.device) -> Block:
        """Put clients together.

        Args:
            users: the features of each client.
            batches: the batches of each client, most steps first.
            device: where the tensors live.
        """
        steps = np.array([len(batch.sizes) for batch in batches])
        width = batches[0].items.shape[1]
        shape = (int(steps.max(initial=0)), len(batches), width)
        needed = [batch.references() for batch in batches]
        items = np.zeros(shape, dtype=np.int64)
        rows = np.zeros((*shape[:2], max(own.shape[1] for own, _ in needed)), dtype=np.int64)
        labels, weights = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
        places, touched = np.arange(width), []
        for place, batch in enumerate(batches):
            real = places < batch.sizes[:, None]
            references, named = needed[place]
            own, index = np.unique(references[named], return_inverse=True)
            items[: steps[place], place] = batch.items
            rows[: steps[place], place, : references.shape[1]][named] = index
            labels[: steps[place], place] = batch.labels
            weights[: steps[place], place] = real / np.maximum(batch.sizes, 1)[:, None]
            touched.append(own)
        table = np.zeros((len(batches), max(1, max(map(len, touched)))), dtype=np.int64)
        for place, own in enumerate(touched):
            table[place, : len(own)] = own
        rows += (np.arange(len(batches)) * table.shape[1])[:, None]
        codes = tuple(torch.from_numpy(np.stack(feature)).to(device) for feature in zip(*users, strict=True))
        items, rows, labels, weights, table = (
            torch.from_numpy(array).to(device) for array in (items, rows, labels, weights, table)
        )
        active = tuple(int((steps > step).sum()) for step in range(shape[0]))
        return cls(
            users=codes,
            active=active,
            items=items,
            places=rows,
            labels=labels,
            weights=weights,
            touched=table,
            touched_counts=tuple(map(len, touched)),
            examples=tuple(batch.examples for batch in batches),
            last_epoch=tuple(batch.last_epoch for batch in batches),
        )

    def steps_of(self, active: int) -> range:
        """The steps in which exactly the first `active` clients train."""
        first = self.active.index(active)
        return range(first, first + self.active.count(active))

    @cached_property
    def steps(self) -> list[int]:
        """Number of steps of each client."""
        return (np.array(self.active)[:, None] > np.arange(len(self))).sum(0).tolist()

    def beginning(self) -> Block:
        """The first step of the first client, which has one."""
        return Block(
            users=tuple(codes[:1] for codes in self.users),
            active=(1,),
            items=self.items[:1, :1],
            places=self.places[:1, :1],
            labels=self.labels[:1, :1],
            weights=self.weights[:1, :1],
            touched=self.touched[:1],
            touched_counts=self.touched_counts[:1],
            examples=self.examples[:1],
            last_epoch=(1,),
        )

    def __len__(self) -> int:
        return len(self.examples)
