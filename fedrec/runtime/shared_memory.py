# SPDX-License-Identifier: Apache-2.0
"""Parameters in memory shared by several processes of a machine, so that a round copies only what
it changes.

The process that owns an array changes it in place, between rounds. Others open it with `private`:
they read the same pages, and a write makes a copy of its page, so that no client can change what
the others see. The memory has no name in the file system and is freed when its last user exits,
even after a crash.
"""

import os
import weakref
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

_WORTH_SHARING = 2**16  # bytes; below, sending a copy costs less than opening


class SharedArray(np.memmap):
    """Array in shared memory, or a view of a part."""

    @property
    def place(self) -> tuple[str, str, tuple[int, ...]]:
        """Address with which `private` and `kept_open` open the whole array."""
        return str(self.filename), self.dtype.str, self.shape


def share(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Copy large arrays to shared memory, if the system supports it."""
    if not hasattr(os, "memfd_create"):
        return dict(arrays)
    return {
        name: _shared(array) if array.nbytes >= _WORTH_SHARING else array
        for name, array in arrays.items()
    }


def is_shared(array: np.ndarray) -> bool:
    """True if other processes can open this array `[...]` as a whole."""
    return (
        isinstance(array, SharedArray)
        and array.base is not None
        and array.filename is not None
        and array.offset == 0
        and array.nbytes == array._mmap.size()  # type: ignore[attr-defined]
    )


def private(filename: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Open a shared array `[...]` of a running process with copy-on-write: writes are not visible
    to others."""
    return np.memmap(filename, dtype=dtype, mode="c", shape=shape).view(np.ndarray)


def kept_open(filename: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Open a shared array `[...]` once per process, for reading only, because writes are visible to
    all users in this process.

    Pages that were read stay mapped, while `private` maps every page again.
    """
    return _opened(filename, os.stat(filename).st_ino, dtype, shape)


@lru_cache(maxsize=64)
def _opened(filename: str, _inode: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Open an array; cached by inode too, as the owner may reuse a name after closing an array."""
    return private(filename, dtype, shape)


def _shared(array: np.ndarray) -> np.ndarray:
    if is_shared(array):
        return array
    descriptor = os.memfd_create("fedrec")
    os.ftruncate(descriptor, array.nbytes)
    # Others open the memory through this process while it is running.
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    shared = SharedArray(path, dtype=array.dtype, mode="r+", shape=array.shape)
    weakref.finalize(shared, os.close, descriptor)
    shared[...] = array
    return shared
