# SPDX-License-Identifier: Apache-2.0
"""Freeing of unused memory of this process."""

from __future__ import annotations

import ctypes
import gc


def release_free_heap() -> None:
    """Collect reference cycles, and return freed memory to the system.

    Python would free it later, and the C library (glibc) would keep it. It takes a tenth of a
    second, so it is called only after large objects were released.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
