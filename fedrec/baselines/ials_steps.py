# SPDX-License-Identifier: Apache-2.0
"""Steps of conjugate gradients on the ridge regressions of `ials`, in native code (Takacs, Pilaszy
and Tikk 2011).

A few steps cost as much as a few passes over the likes of a row, far less than computing the row's
matrix. Rows differ in length, so batched products would consist mostly of padding, and each row's
product is small; here every row is one loop.
"""

import numpy as np
import torch

from fedrec.baselines.base import Sparse, native, over_rows, pointers


def improved(
    liked: Sparse,
    fixed: np.ndarray,
    start: np.ndarray,
    *,
    weight: float,
    penalty: np.ndarray,
    steps: int,
) -> np.ndarray:
    """Each row's factors after some steps towards the solution of A x = b; zero for an empty row.

    A = Y^T Y + (weight - 1) sum over liked of r y y^T + penalty, and b = weight times the sum over
    liked of r y, r being how much a pair is liked. Rows do not depend on each other, nor on the
    number of threads.

    Args:
        liked: `[rows, columns]`, in (0, 1]; 0 elsewhere.
        fixed: Y, `float [columns, factors]`; its precision is that of the computation.
        start: `[rows, factors]`, initial values of the iteration.
        weight: of a liked pair, >= 1.
        penalty: `[rows]`, > 0.
        steps: at least 1.

    Returns:
        `[rows, factors]`.
    """
    found = np.array(start, dtype=fixed.dtype)
    kind = fixed.dtype.type
    gram = fixed.T @ fixed
    threads = max(1, torch.get_num_threads())
    bounds = np.searchsorted(liked.indptr, np.linspace(0, liked.nnz, threads + 1), side="left")
    bounds[-1] = len(found)
    given = (
        *pointers(liked),
        liked.data.astype(fixed.dtype, copy=False),
        np.ascontiguousarray(fixed),
        gram,
        kind(weight),
        penalty.astype(fixed.dtype),
        steps,
    )
    return over_rows(_improve, given, bounds, found)


# Sums may be reordered for vector instructions; NaN and infinity keep their meaning.
@native(fastmath={"reassoc", "contract", "nsz"})
def _improve(
    offsets, columns, shares, fixed, gram, weight, penalty, steps, start, stop, found
) -> None:
    """Rows `start` to `stop - 1`, in place."""
    width = gram.shape[0]
    nothing = gram[0, 0] * 0
    extra = weight - 1
    tiny = np.finfo(gram.dtype).tiny
    rest = np.empty_like(gram[0])
    direction = np.empty_like(gram[0])
    moved = np.empty_like(gram[0])
    for row in range(start, stop):
        own = found[row]
        first = offsets[row]
        last = offsets[row + 1]
        if first == last:
            own[:] = 0
            continue
        for i in range(width):
            total = penalty[row] * own[i]
            for j in range(width):
                total += gram[i, j] * own[j]
            rest[i] = -total
        for n in range(first, last):
            other = fixed[columns[n]]
            product = nothing
            for j in range(width):
                product += other[j] * own[j]
            amount = shares[n] * (weight - extra * product)
            for j in range(width):
                rest[j] += amount * other[j]
        length = nothing
        for j in range(width):
            direction[j] = rest[j]
            length += rest[j] * rest[j]
        for _ in range(steps):
            for i in range(width):
                total = penalty[row] * direction[i]
                for j in range(width):
                    total += gram[i, j] * direction[j]
                moved[i] = total
            for n in range(first, last):
                other = fixed[columns[n]]
                product = nothing
                for j in range(width):
                    product += other[j] * direction[j]
                amount = shares[n] * extra * product
                for j in range(width):
                    moved[j] += amount * other[j]
            product = nothing
            for j in range(width):
                product += direction[j] * moved[j]
            rate = length / max(product, tiny)
            before = length
            length = nothing
            for j in range(width):
                own[j] += rate * direction[j]
                rest[j] -= rate * moved[j]
                length += rest[j] * rest[j]
            share = length / max(before, tiny)
            for j in range(width):
                direction[j] = rest[j] + share * direction[j]
