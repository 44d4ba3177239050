# SPDX-License-Identifier: Apache-2.0
"""Draws from many distributions over a large catalogue, each by inverting its distribution
function.

Weights are summed in blocks of consecutive items; a draw finds its block among the sums, and then
its item within the block. So each weight is read once, and no cumulative sums are stored.
"""

import functools
from collections.abc import Callable

import numpy as np

_BLOCK = 256


@functools.cache
def drawn_by_weight() -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """`_draw(weights [rows, items], uniform [rows, draws])`, compiled when it is first needed."""
    import numba

    return numba.njit(nogil=True, cache=True, fastmath={"reassoc"})(_draw)


def _draw(weights: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Items, each with a probability in proportion to its weight in its row.

    Args:
        weights: `float32 [rows, items]`, finite, >= 0, in each row one above 0.
        uniform: `float64 [rows, draws]`, uniform in [0, 1).

    Returns:
        `int64 [rows, draws]`: for each row and draw the first item whose cumulative weight exceeds
        that share of the total; never one with weight 0.
    """
    rows, items = weights.shape
    blocks = (items + _BLOCK - 1) // _BLOCK
    sums = np.empty(blocks)
    found = np.empty(uniform.shape, dtype=np.int64)
    for row in range(rows):
        own = weights[row]
        total = 0.0
        for block in range(blocks):
            part = 0.0
            for item in range(block * _BLOCK, min(items, (block + 1) * _BLOCK)):
                part += np.float64(own[item])
            sums[block] = part
            total += part
        for draw in range(uniform.shape[1]):
            left = uniform[row, draw] * total
            block = 0
            while block < blocks - 1 and left >= sums[block]:
                left -= sums[block]
                block += 1
            # Rounding can move a draw beyond the last item with positive weight.
            while sums[block] == 0.0:
                block = block - 1
                left = total
            chosen = -1
            for item in range(block * _BLOCK, min(items, (block + 1) * _BLOCK)):
                if own[item] > 0:
                    chosen = item
                    left -= np.float64(own[item])
                    if left < 0:
                        break
            found[row, draw] = chosen
    return found
