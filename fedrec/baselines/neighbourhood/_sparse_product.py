# SPDX-License-Identifier: Apache-2.0
"""Products of two sparse matrices into a dense one, in native code.

scipy makes a sparse product, whose places it has to count first, and then a dense one of that.
Where the result is dense anyway, adding into it directly takes about a third of the time.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from fedrec.baselines.base import Sparse


def dense_product(left: Sparse, right: Sparse) -> np.ndarray:
    """The product, `float32 [rows, columns]`; each number is summed in the order of its row of
    `left`.

    Args:
        left: `[rows, n]`.
        right: `[n, columns]`.
    """
    found = np.zeros((left.shape[0], right.shape[1]), dtype=np.float32)
    threads = max(1, min(torch.get_num_threads(), left.shape[0]))
    bounds = np.linspace(0, left.shape[0], threads + 1).astype(np.int64)
    matrices = (*_parts(left), *_parts(right))

    def work(place: int) -> None:
        _compiled()(*matrices, bounds[place], bounds[place + 1], found)

    if threads == 1:
        work(0)
        return found
    _compiled()(*matrices, 0, 0, found)  # compiled by one thread
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    return found


def _parts(matrix: Sparse) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        matrix.indptr.astype(np.int64, copy=False),
        matrix.indices.astype(np.int64, copy=False),
        matrix.data.astype(np.float32, copy=False),
    )


@functools.cache
def _compiled() -> Any:
    """`_add` in native code, compiled when it is first needed."""
    import numba

    return numba.njit(nogil=True, cache=True)(_add)


def _add(offsets, places, amounts, other_offsets, columns, others, start, stop, found) -> None:
    """Rows `start` to `stop - 1` of the product, added to `found`."""
    for row in range(start, stop):
        for n in range(offsets[row], offsets[row + 1]):
            amount = amounts[n]
            for m in range(other_offsets[places[n]], other_offsets[places[n] + 1]):
                found[row, columns[m]] += amount * others[m]
