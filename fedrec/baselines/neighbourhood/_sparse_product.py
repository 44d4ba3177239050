# SPDX-License-Identifier: Apache-2.0
"""Products of two sparse matrices into a dense one, in native code.

scipy computes a sparse product first, whose non-zero entries it has to count, and converts it to a
dense one. If the result is dense anyway, adding into it directly takes about a third of the time.
"""

from collections.abc import Callable

import numpy as np
import torch

from fedrec.baselines._native import native, over_rows, pointers
from fedrec.baselines.base import Sparse


def dense_product(left: Sparse, right: Sparse) -> np.ndarray:
    """The product, `float32 [rows, columns]`; each number is summed in the order of its row of
    `left`.

    Args:
        left: `[rows, n]`.
        right: `[n, columns]`.
    """
    data = (matrix.data.astype(np.float32, copy=False) for matrix in (left, right))
    return _in_threads(_add, left, right, *data)


def overlaps(left: Sparse, right: Sparse) -> np.ndarray:
    """The product of two binary matrices, `float32 [rows, columns]`; their values are not read.

    Args:
        left: `[rows, n]`.
        right: `[n, columns]`.
    """
    return _in_threads(_count, left, right)


def _in_threads(
    function: Callable[..., None], left: Sparse, right: Sparse, *numbers: np.ndarray
) -> np.ndarray:
    """Run a function that adds to zeros, with the rows divided over threads."""
    found = np.zeros((left.shape[0], right.shape[1]), dtype=np.float32)
    threads = max(1, min(torch.get_num_threads(), left.shape[0]))
    bounds = np.linspace(0, left.shape[0], threads + 1).astype(np.int64)
    return over_rows(function, (*pointers(left), *pointers(right), *numbers), bounds, found)


@native()
def _add(offsets, places, other_offsets, columns, amounts, others, start, stop, found) -> None:
    """Rows `start` to `stop - 1` of the product, added to `found`."""
    for row in range(start, stop):
        for n in range(offsets[row], offsets[row + 1]):
            amount = amounts[n]
            for m in range(other_offsets[places[n]], other_offsets[places[n] + 1]):
                found[row, columns[m]] += amount * others[m]


@native()
def _count(offsets, places, other_offsets, columns, start, stop, found) -> None:
    """The same if all values are 1."""
    for row in range(start, stop):
        own = found[row]
        for n in range(offsets[row], offsets[row + 1]):
            for m in range(other_offsets[places[n]], other_offsets[places[n] + 1]):
                own[columns[m]] += 1
