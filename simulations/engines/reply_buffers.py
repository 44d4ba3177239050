# SPDX-License-Identifier: Apache-2.0
"""Memory that is lent to a node along with an order, for the arrays of its answer.

Ray's own way with an answer of a megabyte, over its object store, takes as long as the training of
a client. The process that sends the orders owns the memory, lends it, and lends it again when
nothing that came in it is in use any more; so pages are asked of the system once per run, and not
once per answer.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from flwr.app import ArrayRecord, RecordDict

from fedrec.protocol.zero_copy import to_record, zero_copy_arrays
from fedrec.runtime.shared_memory import empty, kept_open, offered

_ALIGNED = 64  # bytes: where arrays begin
_SPARE = 2**16  # bytes beside the parameters that an answer may take
_WORTH_LENDING = 2**16  # bytes; less comes along with the answer
# memories; nodes that never answer do not give theirs back, and each takes two file descriptors
_MOST = 64


class Spot(NamedTuple):
    """Where an array lies: its name, first byte, type and shape."""

    name: str
    start: int
    dtype: str
    shape: tuple[int, ...]


Place: TypeAlias = tuple[str, str, tuple[int, ...]]
"""Of memory, see `SharedArray.place`."""
Spots: TypeAlias = dict[str, list[Spot]]
"""By record, where its arrays lie."""


class Memory:
    """Lent memory, as its owner sees it.

    Args:
        size: in bytes; they take room when they are first written.
    """

    def __init__(self, size: int) -> None:
        self._bytes = empty((size,), np.dtype(np.uint8))
        self._lent = False
        self._read: weakref.ref[np.ndarray] | None = None

    @property
    def size(self) -> int:
        """In bytes."""
        return self._bytes.nbytes

    @property
    def free(self) -> bool:
        """Whether it is neither lent nor holds anything that is in use."""
        return not self._lent and (self._read is None or self._read() is None)

    def lend(self) -> Place:
        """What a node opens it with; it is lent until `take_back`."""
        self._lent = True
        return self._bytes.place

    def take_back(self, spots: Spots) -> dict[str, ArrayRecord]:
        """The records that a node put there, which are only to be read; it is in use as long as one
        of them is."""
        whole = self._bytes.view(
            np.ndarray
        )  # every array keeps this one alive, and nothing else does
        whole.flags.writeable = False
        self._lent, self._read = False, weakref.ref(whole)
        return {
            record: to_record({spot.name: _at(whole, spot) for spot in own})
            for record, own in spots.items()
        }


class BufferPool:
    """All memory that an owner lends."""

    def __init__(self) -> None:
        self._memories: list[Memory] = []

    def memory(self, content: RecordDict) -> Memory | None:
        """Memory for an answer about as large as the parameters of an order; None: it is small, or
        too much is lent."""
        size = _size(_arrays(content))
        if size < _WORTH_LENDING or not offered():
            return None
        for memory in self._memories:
            if memory.free and memory.size >= size + _SPARE:
                return memory
        self._memories = [
            memory for memory in self._memories if not memory.free
        ]  # the free ones are too small
        if len(self._memories) == _MOST:
            return None
        self._memories.append(Memory(size + _SPARE))
        return self._memories[-1]


def put(content: RecordDict, place: Place) -> Spots:
    """Move the arrays of an answer into memory that was lent for it, if they all fit.

    Args:
        content: of the answer; its records of arrays are taken out.
        place: see `Memory.lend`.

    Returns:
        For `Memory.take_back`; nothing if nothing was moved.
    """
    memory, given = kept_open(*place, to_write=True), _arrays(content)
    if not _WORTH_LENDING <= _size(given) <= memory.nbytes:
        return {}
    found: Spots = {}
    start = 0
    for record, arrays in given.items():
        found[record] = []
        for name, array in arrays.items():
            spot = Spot(name, start, array.dtype.str, array.shape)
            _at(memory, spot)[...] = array
            found[record].append(spot)
            start += _room(array)
        del content[record]
    return found


def _arrays(content: RecordDict) -> dict[str, dict[str, np.ndarray]]:
    return {name: zero_copy_arrays(record) for name, record in content.array_records.items()}


def _size(arrays: Mapping[str, Mapping[str, np.ndarray]]) -> int:
    """Bytes that the arrays of some records take."""
    return sum(_room(array) for record in arrays.values() for array in record.values())


def _room(array: np.ndarray) -> int:
    return -(-array.nbytes // _ALIGNED) * _ALIGNED


def _at(memory: np.ndarray, spot: Spot) -> np.ndarray:
    return np.ndarray(spot.shape, spot.dtype, buffer=memory, offset=spot.start)
