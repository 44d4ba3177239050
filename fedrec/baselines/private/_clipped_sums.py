# SPDX-License-Identifier: Apache-2.0
"""Rows of users, and sums of what each user contributes, clipped."""

from collections.abc import Iterator

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from fedrec.baselines.base import Histories, Sparse
from fedrec.privacy.clipping import Clip


def binary_rows(
    liked: Histories, users_at_once: int, device: torch.device
) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of users, and 1 for each of their liked items, `float64 [block, items]` on a device;
    users in their order.

    Args:
        liked: distinct items of each user.
        users_at_once: users per block; the last block may have fewer.
        device: device of the rows.
    """
    for start in range(0, liked.num_users, users_at_once):
        stop = min(start + users_at_once, liked.num_users)
        yield slice(start, stop), liked.block(start, stop).matrix().to(device).double()


def clip_factors(clip: Clip, norms: Tensor) -> Tensor:
    """Clipping factors of contributions with the given norms `[users]`, `float64 [users]` on their
    device."""
    return torch.from_numpy(clip.factors(norms.cpu().numpy())).to(norms.device)


def clipped_row_sum(rows: Sparse, clip: Clip) -> np.ndarray:
    """Sum of users' rows, each clipped, `float64 [items]`; rows are `[users, items]`, >= 0."""
    norms = np.sqrt(_squared_norms(rows)) if clip.order == 2 else np.asarray(rows.sum(1)).ravel()
    return rows.T @ clip.factors(norms)


def clipped_gram(rows: Sparse, clip: Clip) -> np.ndarray:
    """Sum over users of x x^T, each clipped in the Frobenius norm |x|^2, `float64 [items, items]`.

    Args:
        rows: x of each user, sparse `float64 [users, items]`.
        clip: the bound.
    """
    shares = np.sqrt(clip.factors(_squared_norms(rows)))
    shrunk = sparse.diags_array(shares) @ rows
    return (shrunk.T @ shrunk).toarray()


def _squared_norms(rows: Sparse) -> np.ndarray:
    """`float64 [users]`."""
    return np.asarray(rows.multiply(rows).sum(1)).ravel()
