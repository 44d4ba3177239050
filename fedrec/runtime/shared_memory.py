# SPDX-License-Identifier: Apache-2.0
"""Parameters in memory that several processes of a machine see, so that a round copies nothing but
what it changes.

The process that owns an array changes it in place, between rounds. Others open it with `private`:
they read the same pages, and a write makes a copy of its page, so that no client can change what
the others see. The memory has no name in any folder and is given back when its last user ends,
however it ends.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

import numpy as np

_WORTH_SHARING = 2**16  # bytes; below, sending a copy costs less than opening


class SharedArray(np.memmap):
    """An array in shared memory, or a view of a part of it."""

    @property
    def place(self) -> tuple[str, str, tuple[int, ...]]:
        """What `private` and `kept_open` need to open the whole array."""
        return str(self.filename), self.dtype.str, self.shape


def share(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same arrays, the large ones in shared memory where the system offers it."""
    if not offered():
        return dict(arrays)
    return {
        name: _shared(array) if array.nbytes >= _WORTH_SHARING else array
        for name, array in arrays.items()
    }


def offered() -> bool:
    """Whether the system has such memory."""
    return hasattr(os, "memfd_create")


def empty(shape: tuple[int, ...], dtype: np.dtype) -> SharedArray:
    """Shared zeros, which take memory when they are first written."""
    descriptor = os.memfd_create("fedrec")
    os.ftruncate(descriptor, math.prod(shape) * dtype.itemsize)
    # Others open the memory through this process, while it lives.
    found = SharedArray(f"/proc/{os.getpid()}/fd/{descriptor}", dtype=dtype, mode="r+", shape=shape)
    weakref.finalize(found, os.close, descriptor)
    # Numpy says that every memmap's constructor gives a plain one
    return found  # type: ignore[return-value]


def is_shared(array: np.ndarray) -> bool:
    """Whether other processes can open this whole array."""
    return (
        isinstance(array, SharedArray)
        and array.base is not None
        and array.filename is not None
        and _whole(array)
    )


def private(filename: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Open a shared array of a living process: its present values, writes stay one's own."""
    return _mapped(filename, dtype, shape, "c")


def kept_open(
    filename: str, dtype: str, shape: tuple[int, ...], *, to_write: bool = False
) -> np.ndarray:
    """The same, opened once in this process: for those who only read, as what one writes all others
    here see for good.

    The memory of what was read stays mapped, where `private` has the system look up every page
    anew. Where it is opened `to_write`, the owner sees what is written too.
    """
    return _opened(filename, os.stat(filename).st_ino, dtype, shape, "r+" if to_write else "c")


@lru_cache(maxsize=64)
def _opened(
    filename: str, inode: int, dtype: str, shape: tuple[int, ...], mode: Literal["c", "r+"]
) -> np.ndarray:
    """By inode too: the owner may give a name to another array, when it has closed the first."""
    return _mapped(filename, dtype, shape, mode)


def _mapped(
    filename: str, dtype: str, shape: tuple[int, ...], mode: Literal["c", "r+"]
) -> np.ndarray:
    return np.memmap(filename, dtype=dtype, mode=mode, shape=shape).view(np.ndarray)


def _shared(array: np.ndarray) -> np.ndarray:
    if is_shared(array):
        return array
    found = empty(array.shape, array.dtype)
    found[...] = array
    return found


def _whole(array: SharedArray) -> bool:
    return array.offset == 0 and array.nbytes == array._mmap.size()  # type: ignore[attr-defined]
