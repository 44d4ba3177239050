# SPDX-License-Identifier: Apache-2.0
"""Memory of this process that nothing uses any more."""

from __future__ import annotations

import ctypes
import gc


def release_free_heap() -> None:
    """Free what only a cycle of references holds, and give freed memory back to the system.

    Python would free it sometime, and the C library (glibc) would keep it for later. Worth its
    time, a tenth of a second, where something large has just come to its end.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
