# SPDX-License-Identifier: Apache-2.0
"""Several arrays as one byte string: a length, a table of contents, and the arrays' bytes. Flower
requests every array, and every piece of a large one, in a separate call. A round of a small model
is then a few hundred calls, which cost more than their content.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from fedrec.runtime.text_files import MOST_JSON, parse_json

_LENGTH_BYTES = 8


class PackedArray(NamedTuple):
    """One array: its name, type and shape, the format of its bytes, and the bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stype: str
    data: bytes


def packed(parts: Iterable[PackedArray]) -> bytes:
    """The parts as bytes, in order."""
    parts = list(parts)
    table = [
        [part.name, part.dtype, list(part.shape), part.stype, len(part.data)] for part in parts
    ]
    header = json.dumps(table).encode()
    return b"".join(
        [len(header).to_bytes(_LENGTH_BYTES, "little"), header, *(part.data for part in parts)]
    )


def opened(data: bytes) -> list[PackedArray]:
    """The arrays from the result of `packed`, which is untrusted input.

    Raises:
        ValueError: it is truncated, too long, or names a part twice.
        Exception: the table of contents is malformed.
    """
    start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    parts: list[PackedArray] = []
    for name, dtype, shape, stype, length in parse_json(data[_LENGTH_BYTES:start], MOST_JSON):
        if not isinstance(length, int) or not 0 <= length <= len(data) - start:
            raise ValueError(
                f"array {name!r} is cut off: expected {length} bytes, got {len(data) - start}"
            )
        parts.append(
            PackedArray(
                str(name),
                str(dtype),
                tuple(map(int, shape)),
                str(stype),
                data[start : start + length],
            )
        )
        start += length
    if start != len(data) or len({part.name for part in parts}) != len(parts):
        raise ValueError(f"{len(data) - start} bytes too many, or a name twice")
    return parts
