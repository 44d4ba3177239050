# SPDX-License-Identifier: Apache-2.0
"""The work as a contestant sees it: the archive that `ours.py` writes, and a clock for its
rounds.

Needs numpy alone, because contestants live in environments of their own, without fedrec and some
without torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np

EPOCHS = 5
BATCH = 32
LEARNING_RATE = 0.05


class Arrays(dict[str, np.ndarray]):
    """The archive read into memory."""

    def __init__(self, path: str) -> None:
        with np.load(path) as file:
            super().__init__({name: file[name] for name in file.files})

    @property
    def clip(self) -> float:
        """The L2 norm that each user's whole update is clipped to; 0: it is not."""
        return float(self["clip"])

    def initial(self) -> dict[str, np.ndarray]:
        """The parameters that the first round starts from."""
        return {
            name.removeprefix("initial/"): value
            for name, value in self.items()
            if name.startswith("initial/")
        }

    def epochs(self, index: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Items and labels of each epoch of one user in one round; `index` counts through all
        rounds' cohorts."""
        start = self["offsets"][index]
        stop = self["offsets"][index + 1]
        length = self["lengths"][index]
        for first in range(start, stop, length):
            yield self["items"][first : first + length], self["labels"][first : first + length]


loaded = lru_cache(maxsize=1)(Arrays)
"""The work of a path, read once per process."""


class RoundClock:
    """When rounds begin and end, by the monotonic clock: all processes of a machine share it."""

    def __init__(self) -> None:
        self.rounds: list[tuple[float, float]] = []
        self._began = time.monotonic()

    def begin(self) -> None:
        """A round begins."""
        self._began = time.monotonic()

    def end(self) -> None:
        """The round is over; the next one begins, unless `begin` says otherwise."""
        now = time.monotonic()
        self.rounds.append((self._began, now))
        self._began = now

    def report(self, final: Sequence[np.ndarray], initial: Sequence[np.ndarray]) -> str:
        """What a contestant prints as its last line; the arrays of both sequences belong together
        one by one."""
        change = [
            after.astype(np.float64) - before for after, before in zip(final, initial, strict=True)
        ]
        return json.dumps(
            {
                "rounds": self.rounds,
                "squared_sum": squared_sum(final),
                "squared_change": squared_sum(change),
            }
        )


def squared_sum(arrays: Iterable[np.ndarray]) -> float:
    """Sum of the squares of all numbers of some arrays."""
    return float(sum(np.square(array.astype(np.float64)).sum() for array in arrays))
