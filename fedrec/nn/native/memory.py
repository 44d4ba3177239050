# SPDX-License-Identifier: Apache-2.0
"""Working memory of compiled code."""

from __future__ import annotations

import numpy as np
from numba import njit

from fedrec.runtime.compilation import FAST

LINE = 16
"""Numbers in a cache line. Rounding of products depends on the alignment of their matrices, so all
are aligned to cache lines."""


@njit(**FAST)
def matrix(vector, place, rows, columns):
    """A part of a vector as `[rows, columns]`, in the same memory."""
    return vector[place : place + rows * columns].reshape(rows, columns)


@njit(**FAST)
def whole_lines(count):
    """The smallest multiple of a cache line that holds the given number of elements."""
    return -(-count // LINE) * LINE


@njit(**FAST)
def aligned(rows, columns):
    """Memory for `float32 [rows, columns]`, aligned to a cache line."""
    room = np.empty(rows * columns + LINE, np.float32)
    start = (-room.ctypes.data // 4) % LINE
    return room[start : start + rows * columns].reshape(rows, columns)
