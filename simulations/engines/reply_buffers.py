# SPDX-License-Identifier: Apache-2.0
"""Shared memory buffers for the arrays of nodes' replies.

For a reply of a megabyte, Ray's object store takes as long as the training of a client. Here the
process that sends an order owns a pool of buffers and passes one with the order; the node writes
its reply into it. A buffer is reused when none of its arrays is in use any more, so pages are
allocated once per run instead of once per reply.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from flwr.app import ArrayRecord, RecordDict

from fedrec.protocol.serialization import to_record, zero_copy_arrays
from fedrec.runtime.shared_memory import empty, kept_open, offered

_ALIGNED = 64  # bytes: alignment of arrays
_SPARE = 2**16  # bytes of a reply in addition to its parameters
_SMALLEST = 2**16  # bytes; smaller replies are sent without a buffer
# number of buffers; those of nodes that never reply stay in use, and each has two file descriptors
_MOST = 64


class Spot(NamedTuple):
    """Position of an array: its name, first byte, type and shape."""

    name: str
    start: int
    dtype: str
    shape: tuple[int, ...]


Place: TypeAlias = tuple[str, str, tuple[int, ...]]
"""Of memory, see `SharedArray.place`."""
Spots: TypeAlias = dict[str, list[Spot]]
"""By record, the positions of its arrays."""


class ReplyBuffer:
    """A reply buffer, as its owner sees it.

    Args:
        size: in bytes; pages are allocated when they are first written.
    """

    def __init__(self, size: int) -> None:
        self._bytes = empty((size,), np.dtype(np.uint8))
        self._assigned = False
        self._read: weakref.ref[np.ndarray] | None = None

    @property
    def size(self) -> int:
        """In bytes."""
        return self._bytes.nbytes

    @property
    def free(self) -> bool:
        """Whether it is neither assigned to a node nor has arrays in use."""
        return not self._assigned and (self._read is None or self._read() is None)

    def assign(self) -> Place:
        """The place for a node to open; the buffer is assigned to it until `take_back`."""
        self._assigned = True
        return self._bytes.place

    def take_back(self, spots: Spots) -> dict[str, ArrayRecord]:
        """The records that a node wrote, read-only; the buffer is in use as long as one of them
        is."""
        # every array keeps this one alive, and nothing else does
        whole = self._bytes.view(np.ndarray)
        whole.flags.writeable = False
        self._assigned = False
        self._read = weakref.ref(whole)
        return {
            record: to_record({spot.name: _at(whole, spot) for spot in own})
            for record, own in spots.items()
        }


class BufferPool:
    """The reply buffers of one process."""

    def __init__(self) -> None:
        self._buffers: list[ReplyBuffer] = []

    def buffer(self, content: RecordDict) -> ReplyBuffer | None:
        """A buffer for a reply about as large as the parameters of an order; None: it is small, or
        too many buffers are in use."""
        size = _size(_arrays(content))
        if size < _SMALLEST or not offered():
            return None
        for buffer in self._buffers:
            if buffer.free and buffer.size >= size + _SPARE:
                return buffer
        # the free ones are too small
        self._buffers = [buffer for buffer in self._buffers if not buffer.free]
        if len(self._buffers) == _MOST:
            return None
        self._buffers.append(ReplyBuffer(size + _SPARE))
        return self._buffers[-1]


def put(content: RecordDict, place: Place) -> Spots:
    """Move the arrays of a reply into its buffer, if they all fit.

    Args:
        content: of the reply; its records of arrays are taken out.
        place: see `ReplyBuffer.assign`.

    Returns:
        For `ReplyBuffer.take_back`; nothing if nothing was moved.
    """
    memory = kept_open(*place, to_write=True)
    given = _arrays(content)
    if not _SMALLEST <= _size(given) <= memory.nbytes:
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
