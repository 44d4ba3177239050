# SPDX-License-Identifier: Apache-2.0
"""Arrays of Flower records: as numpy memory within a machine, and several as one byte string.

Flower records whose arrays are numpy memory: within a process by reference, between processes of
a machine by their address in shared memory, and over a network as one byte string.

Flower's own arrays are bytes from the start, so that every message copies every parameter several
times.
"""

import contextlib
import io
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict

from fedrec.protocol import updates
from fedrec.protocol.secure import listed, unlisted
from fedrec.runtime.files import MOST_JSON, parse_json
from fedrec.runtime.shared_memory import SharedArray, is_shared, kept_open, private

# Several arrays as one byte string: a table of contents, and the arrays' bytes. Flower requests
# every array, and every piece of a large one, in a separate call. A round of a small model is then
# a few hundred calls, which cost more than their content.


class PackedArray(NamedTuple):
    """One array: its name, type and shape, the format of its bytes, and the bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stype: str
    data: bytes


def packed(parts: Iterable[PackedArray]) -> bytes:
    """Pack arrays into bytes, in order."""
    parts = list(parts)
    table = json.dumps([part[:-1] for part in parts]).encode()
    return listed([table, *(part.data for part in parts)])


def opened(data: bytes) -> list[PackedArray]:
    """Unpack the arrays from the result of `packed`, which is untrusted input.

    Raises:
        ValueError: it is truncated, has excess arrays, or names an array twice.
        Exception: the table of contents is malformed.
    """
    header, *contents = unlisted(data)
    parts = [
        PackedArray(str(name), str(dtype), tuple(map(int, shape)), str(stype), content)
        for (name, dtype, shape, stype), content in zip(
            parse_json(header, MOST_JSON), contents, strict=True
        )
    ]
    if len({part.name for part in parts}) != len(parts):
        raise ValueError("a duplicate name")
    return parts


_NUMPY = "numpy.ndarray"  # Flower's name of numpy's file format
_PACKED = "#packed"


class _ZeroCopyArray(Array):
    """Flower array that holds numpy memory and becomes bytes only when sent to another machine.

    Args:
        live: the array; `float [...]` or another type of any shape; `zero_copy_arrays` returns the
            array itself, all other functions return copies.
    """

    live: np.ndarray

    def __init__(self, live: np.ndarray) -> None:
        # Flower's own attribute setter updates derived values, which do not exist yet.
        vars(self).update(live=live, dtype=str(live.dtype), shape=tuple(live.shape), stype=_NUMPY)

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """Serialise the array in numpy's file format, at each call."""
        buffer = io.BytesIO()
        np.save(buffer, np.asarray(self.live, order="C"), allow_pickle=False)
        return buffer.getvalue()

    def numpy(self) -> np.ndarray:
        """Copy the current values, `[...]` in the array's shape; the copy is writable."""
        if isinstance(self.live, SharedArray) and is_shared(self.live):
            return private(*self.live.place)
        return np.array(self.live, order="C", subok=False)

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self.live, SharedArray) and is_shared(self.live):
            return _OpenedArray, self.live.place
        return _ZeroCopyArray, (np.asarray(self.live, order="C"),)


class _OpenedArray(_ZeroCopyArray):
    """Shared memory of another process; `live` is read-only."""

    def __init__(self, *address: Any) -> None:
        self.address = address
        super().__init__(kept_open(*address))

    def numpy(self) -> np.ndarray:
        """Copy the values, `[...]`; the copy is writable, and the owner does not see changes."""
        return private(*self.address)


def to_record(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Make a Flower record of named numpy arrays; it holds the arrays themselves."""
    record = ArrayRecord()  # its constructor would turn all into bytes
    for name, array in arrays.items():
        record[name] = _ZeroCopyArray(np.asanyarray(array))
    return record


def from_record(record: ArrayRecord) -> dict[str, np.ndarray]:
    """Copy the named numpy arrays of a Flower record; copies are writable (shared memory is copied
    page by page as needed)."""
    return {name: array.numpy() for name, array in record.items()}


def zero_copy_arrays(record: ArrayRecord) -> dict[str, np.ndarray]:
    """Return the named numpy arrays of a Flower record, with as few copies as possible; for the
    record's owner."""
    return {
        name: array.live if isinstance(array, _ZeroCopyArray) else array.numpy()
        for name, array in record.items()
    }


def sent_bytes(record: ArrayRecord) -> int:
    """Number of bytes sent for a record to another process of this machine; arrays in shared memory
    count 0."""
    arrays = zero_copy_arrays(record).values()
    return sum(
        array.nbytes
        for array in arrays
        if not (isinstance(array, SharedArray) and is_shared(array))
    )


def for_the_network(content: RecordDict, made: dict[int, ArrayRecord] | None = None) -> RecordDict:
    """Pack the arrays of each record into one byte string, in Flower's own class; changes the
    content in place.

    Args:
        content: content sent to another machine through Flower's connections.
        made: cache of packed records by the identity of their record, for records shared by several
            messages.
    """
    made = {} if made is None else made
    for key, record in list(content.array_records.items()):
        if len(record) and _PACKED not in record:
            if id(record) not in made:
                made[id(record)] = _packed_record(record)
            content[key] = made[id(record)]
    return content


def from_the_network(content: RecordDict) -> RecordDict:
    """Invert `for_the_network`, in place; other bytes are not changed."""
    for key, record in list(content.array_records.items()):
        if list(record) == [_PACKED]:
            with contextlib.suppress(Exception):  # untrusted input may be anything
                parts = opened(record[_PACKED].data)
                content[key] = to_record({part.name: _opened(part) for part in parts})
    return content


def _packed_record(record: ArrayRecord) -> ArrayRecord:
    parts = [
        PackedArray(name, array.dtype.str, array.shape, *updates.compacted(array))
        for name, array in zero_copy_arrays(record).items()
    ]
    data = packed(parts)
    return ArrayRecord({_PACKED: Array("uint8", (len(data),), _PACKED, data)})


def _opened(part: PackedArray) -> np.ndarray:
    return updates.expanded(part.stype, part.data, np.dtype(part.dtype), part.shape)
