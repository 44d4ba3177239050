# SPDX-License-Identifier: Apache-2.0
"""Symmetric matrices by what is on and above their diagonal, row after row."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

_Rows = TypeVar("_Rows", int, np.ndarray)


def numbers_of(rows: _Rows) -> _Rows:
    """How many numbers the triangle of so many rows has; of many numbers of rows, `int64 [n]`."""
    return rows * (rows + 1) // 2


def upper(matrix: np.ndarray) -> np.ndarray:
    """The triangle of a matrix `[n, n]`, `[n (n + 1) / 2]`."""
    return matrix[_places(len(matrix))]


def mirrored(triangle: np.ndarray, rows: int) -> np.ndarray:
    """The symmetric matrix `[rows, rows]` of a triangle `[rows (rows + 1) / 2]`."""
    found = np.empty((rows, rows), dtype=triangle.dtype)
    places = _places(rows)
    found[places] = triangle
    found.T[places] = triangle
    return found


def _places(rows: int) -> np.ndarray:
    return ~np.tri(rows, k=-1, dtype=bool)
