# SPDX-License-Identifier: Apache-2.0
"""Flower records whose arrays are numpy memory: in one process as such, between the processes of a
machine as a place in shared memory, and over a network as one string of bytes.

Flower's own arrays are bytes from the start, so that every message copies every parameter several
times.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict

from fedrec.protocol import serialization
from fedrec.runtime.shared_memory import SharedArray, is_shared, kept_open, private

_NUMPY = "numpy.ndarray"  # Flower's name of numpy's file format
_PACKED = "#packed"


class ZeroCopyArray(Array):
    """A Flower array that holds numpy memory and becomes bytes only where it leaves for another
    machine.

    Args:
        live: the array; whoever gets it by `zero_copy_arrays` sees later changes of it, all others
            get copies.
    """

    live: np.ndarray

    def __init__(self, live: np.ndarray) -> None:
        # Flower's own setting of attributes looks after what is derived of them, of which there is
        # nothing yet.
        vars(self).update(
            live=live, dtype=_spelling(live.dtype), shape=tuple(live.shape), stype=_NUMPY
        )

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The array in numpy's file format, made anew at each call."""
        buffer = io.BytesIO()
        np.save(buffer, np.asarray(self.live, order="C"), allow_pickle=False)
        return buffer.getvalue()

    def numpy(self) -> np.ndarray:
        """The present values, as a writable copy in the array's shape."""
        if isinstance(self.live, SharedArray) and is_shared(self.live):
            return private(*self.live.place)
        return np.array(self.live, order="C", subok=False)

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self.live, SharedArray) and is_shared(self.live):
            return _OpenedArray, self.live.place
        return ZeroCopyArray, (np.asarray(self.live, order="C"),)


# numpy takes longer to spell a type than all else that is done with a small array
@functools.lru_cache
def _spelling(kind: np.dtype) -> str:
    return str(kind)


class _OpenedArray(ZeroCopyArray):
    """Shared memory as another process sees it; `live` is only to be read."""

    def __init__(self, *place: Any) -> None:
        self.place = place
        super().__init__(kept_open(*place))

    def numpy(self) -> np.ndarray:
        """The values, which may be written; the owner does not see it."""
        return private(*self.place)


def to_record(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Named numpy arrays as a Flower record; it holds the arrays themselves."""
    record = ArrayRecord()  # its constructor would turn all into bytes
    for name, array in arrays.items():
        record[name] = ZeroCopyArray(np.asanyarray(array))
    return record


def from_record(record: ArrayRecord) -> dict[str, np.ndarray]:
    """Named numpy arrays of a Flower record; copies that may be written (of shared memory, page by
    page as needed)."""
    return {name: array.numpy() for name, array in record.items()}


def zero_copy_arrays(record: ArrayRecord) -> dict[str, np.ndarray]:
    """Named numpy arrays of a Flower record, as little copied as possible; for the one who owns the
    record."""
    return {
        name: array.live if isinstance(array, ZeroCopyArray) else array.numpy()
        for name, array in record.items()
    }


def sent_bytes(record: ArrayRecord) -> int:
    """Bytes that a record takes on its way to another process of this machine; arrays in shared
    memory take none."""
    arrays = zero_copy_arrays(record).values()
    return sum(
        array.nbytes
        for array in arrays
        if not (isinstance(array, SharedArray) and is_shared(array))
    )


def for_the_network(content: RecordDict, made: dict[int, ArrayRecord] | None = None) -> RecordDict:
    """The same content, changed in place, with the arrays of each record as one string of bytes, in
    Flower's own class.

    Args:
        content: what leaves this machine through Flower's own connections.
        made: packed records by the identity of their record, for records that several messages
            share.
    """
    made = {} if made is None else made
    for key, record in list(content.array_records.items()):
        if len(record) and _PACKED not in record:
            if id(record) not in made:
                made[id(record)] = _packed_record(record)
            content[key] = made[id(record)]
    return content


def from_the_network(content: RecordDict) -> RecordDict:
    """What `for_the_network` was given, changed in place; bytes that are nothing of the kind are
    left as they is."""
    for key, record in list(content.array_records.items()):
        if list(record) == [_PACKED]:
            with contextlib.suppress(Exception):  # untrusted input may be anything
                parts = serialization.opened(record[_PACKED].data)
                content[key] = ArrayRecord(
                    {p.name: Array(p.dtype, p.shape, p.stype, p.data) for p in parts}
                )
    return content


def _packed_record(record: ArrayRecord) -> ArrayRecord:
    parts = [
        serialization.Part(name, a.dtype, tuple(a.shape), a.stype, a.data)
        for name, a in record.items()
    ]
    whole = serialization.packed(parts)
    return ArrayRecord({_PACKED: Array("uint8", (len(whole),), _PACKED, whole)})
