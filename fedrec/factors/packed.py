# SPDX-License-Identifier: Apache-2.0
"""Symmetric matrices as vectors of the same length: the diagonal, and sqrt(2) times what lies above
it.

The L2 norm of the vector is the Frobenius norm of the matrix, so that clipping and Gaussian noise
are equivalent for both.
"""

import math

import torch
from torch import Tensor


def packed(matrices: Tensor) -> Tensor:
    """Symmetric `[..., d, d]` as `[..., d (d + 1) / 2]`."""
    rows, columns, scale = _places(matrices.shape[-1], matrices)
    return matrices[..., rows, columns] * scale


def unpacked(vectors: Tensor) -> Tensor:
    """`[..., d (d + 1) / 2]` as symmetric `[..., d, d]`.

    Raises:
        ValueError: no symmetric matrix has that number of coordinates.
    """
    count = vectors.shape[-1]
    width = (math.isqrt(8 * count + 1) - 1) // 2
    if width * (width + 1) // 2 != count:
        raise ValueError(f"Expected d (d + 1) / 2 numbers, got {count}.")
    rows, columns, scale = _places(width, vectors)
    numbers = torch.empty(width, width, dtype=torch.int64, device=vectors.device)
    numbers[rows, columns] = numbers[columns, rows] = torch.arange(count, device=vectors.device)
    entries = (vectors / scale).index_select(-1, numbers.flatten())
    return entries.unflatten(-1, (width, width))


def _places(width: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and columns of a matrix's upper triangle, `int64`, and the factors on its entries."""
    rows, columns = torch.triu_indices(width, width, device=like.device)
    scale = torch.where(rows == columns, 1.0, math.sqrt(2.0)).to(like.dtype)
    return rows, columns, scale
