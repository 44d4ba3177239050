# SPDX-License-Identifier: Apache-2.0
"""Freeing of unused memory of this process, and using it again."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_COLLECTIONS = (50_000, 20, 20)  # thresholds of the three generations; Python's: 700, 10, 10
_IN_IMPORTS = (1_000_000, 20, 20)
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_MMAP_MAX = -4
_DURING = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**30))
# arrays above 32 MiB are returned, as by glibc; of others 256 MiB are kept: updates of all clients
# of a round take tens to hundreds, and are freed at its end
_AFTER = ((_MMAP_MAX, 65_536), (_MMAP_THRESHOLD, 2**25), (_TRIM_THRESHOLD, 2**28))


def collect_rarely() -> None:
    """Look for reference cycles less often.

    Each time Python goes over the newest objects and sometimes over all.
    """
    gc.set_threshold(*_COLLECTIONS)


def collect_after_imports() -> None:
    """Look for reference cycles only among a million objects, for the start of a command.

    Modules that are imported make half a million, and few cycles: to look for them takes a tenth of
    the time of the imports. `exclude_modules` ends it.
    """
    gc.set_threshold(*_IN_IMPORTS)


def exclude_modules() -> None:
    """Exclude all objects that exist, such as those of modules, from the search for cycles, which
    goes on as by `collect_rarely`.

    For a command, before its work: a full search then takes milliseconds in place of a tenth of a
    second. Cycles that exist are never freed, so a library must not do it to other programs.
    """
    gc.freeze()
    collect_rarely()


def collect_messages() -> None:
    """Collect the messages of a round.

    Flower's records contain themselves, so that Python frees them, with their arrays, only when it
    looks for reference cycles, which may be many rounds later. This looks at the objects made since
    it last did; it takes milliseconds.
    """
    gc.collect(1)


def release_free_heap() -> None:
    """Collect reference cycles, and return freed memory to the system.

    Python would free it later, and the C library (glibc) would keep it. It takes up to a tenth of a
    second, so it is called only after large objects were released.
    """
    gc.collect()
    return_free_heap()


def return_free_heap() -> None:
    """Return freed memory to the system, which takes milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_free_heap() -> None:
    """Use what a round frees again in the next, up to 256 MiB, which the system would clear
    anew."""
    _set(_AFTER)


@contextmanager
def reused_heap() -> Iterator[None]:
    """Arrays that are freed in the block are used again for new ones.

    Large ones are otherwise returned to the system each time, which clears the memory of the next
    one: for arrays as long as a million items, that takes longer than what is done with them.
    """
    _set(_DURING)
    try:
        yield
    finally:
        keep_free_heap()
        release_free_heap()


def _set(options: Iterable[tuple[int, int]]) -> None:
    """Set options of glibc's heap; nothing with another C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for option in options:
        mallopt(*option)
