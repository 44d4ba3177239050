# SPDX-License-Identifier: Apache-2.0
"""Large arrays of a checkpoint as their difference from an earlier one, the base, which has them
whole.

A round changes few rows of the tables of a large catalogue, and the difference is these rows, to
the bit. The checksum of the base's array is part of a difference, so that a base that was written
anew does not count as the same.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

LARGE = 1 << 22
"""Bytes of an array from which on it may be a difference."""
_AT_ONCE = 1 << 24  # bytes that are compared at once
_ROWS = "/rows"
_VALUES = "/values"


def without_unchanged(
    arrays: Mapping[str, np.ndarray], base: Path
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Arrays with `NAME/rows` and `NAME/values` instead of each large one, if of none of these more
    than a quarter of the rows differ from those in the base; else the arrays as they are.

    Returns:
        These arrays, and the checksum of the base's array for each name that is a difference.

    Raises:
        OSError, ValueError, zipfile.BadZipFile: the base is missing or damaged.
    """
    found: dict[str, np.ndarray] = {}
    checksums: dict[str, int] = {}
    with zipfile.ZipFile(base) as archive:
        members = set(archive.namelist())
        for name, array in arrays.items():
            if not array.ndim or array.nbytes < LARGE:
                found[name] = array
                continue
            rows = _changed(archive, name, array) if f"{name}.npy" in members else None
            if rows is None or 4 * len(rows) > len(array):
                return dict(arrays), {}
            found[name + _ROWS] = rows
            found[name + _VALUES] = array[rows]
            checksums[name] = archive.getinfo(f"{name}.npy").CRC
    return found, checksums


def with_unchanged(
    arrays: Mapping[str, np.ndarray], checksums: Mapping[str, Any], base: Path
) -> dict[str, np.ndarray]:
    """The reverse of `without_unchanged`, in another order.

    Raises:
        OSError, ValueError, KeyError, zipfile.BadZipFile: the base is missing, damaged or another
            one, or the arrays are not a difference.
    """
    found = dict(arrays)
    with zipfile.ZipFile(base) as archive, np.load(base, allow_pickle=False) as file:
        for name, checksum in checksums.items():
            if checksum != archive.getinfo(f"{name}.npy").CRC:
                raise ValueError(f"{base.name} is not the one that was written before")
            whole = file[name]
            whole[found.pop(name + _ROWS)] = found.pop(name + _VALUES)
            found[name] = whole
    return found


def _changed(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> np.ndarray | None:
    """`int64 [n]`: the rows of an array whose bits differ from those in an archive; None: it has
    another shape or type there."""
    with archive.open(f"{name}.npy") as member:
        npy.read_magic(member)
        shape, by_column, kind = npy.read_array_header_2_0(member)
        if (shape, by_column, kind) != (array.shape, False, array.dtype):
            return None
        own = np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)
        step = max(1, _AT_ONCE // own.shape[1])
        rows = []
        for start in range(0, len(own), step):
            part = own[start : start + step]
            before = np.frombuffer(member.read(part.nbytes), np.uint8).reshape(part.shape)
            rows.append(start + np.flatnonzero((part != before).any(1)))
    return np.concatenate(rows)
