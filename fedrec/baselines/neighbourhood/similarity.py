# SPDX-License-Identifier: Apache-2.0
"""Similarity of rows, and the nearest ones: what `item-knn` and `user-knn` share.

Of two rows x and y of n numbers, whose sums are s and t:

    cosine     x . y / (|x| |y| + h)
    pearson    (x . y - s t / n) / (sqrt((|x|^2 - s^2/n) (|y|^2 - t^2/n)) + h)
    euclidean  1 / (1 + sqrt(|x|^2 + |y|^2 - 2 x . y))

with the shrinkage h; the Pearson correlation is over all n positions, zeros included, because over
the positions that both rows have, as between ratings, two rows of ones would always be equal. Of
equally similar rows the one with the smaller index comes first. Rows hold 1 for what is liked and
`low-rated` for what is rated and not positive.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from scipy import sparse

from fedrec.baselines.base import Sparse
from fedrec.baselines.neighbourhood._sparse_product import dense_product
from fedrec.data.low_rated import LowRatedConfig
from fedrec.metrics.long_rows import best_items

Metric = Literal["cosine", "pearson", "euclidean"]

_CELLS_AT_ONCE = 8_000_000  # similarities in memory at once


class NeighbourConfig(LowRatedConfig):
    """Settings of a neighbourhood."""

    neighbours: int = Field(default=50, ge=1)
    """Number of neighbours."""
    metric: Metric = "cosine"
    """Similarity: `cosine`, `pearson` or `euclidean`."""
    shrinkage: float = Field(default=0.0, ge=0)
    """Added to the denominator of `cosine` and `pearson`; shrinks similarities of rows with few
    ones towards zero."""


def similarities(rows: Sparse, columns: Sparse, metric: Metric, shrinkage: float = 0) -> np.ndarray:
    """Similarity of each row to each of some others, `float32 [rows, others]`; 0 where a row is
    empty or constant.

    Args:
        rows: `[rows, n]`.
        columns: the others, `[n, others]`.
        metric: which similarity.
        shrinkage: h.
    """
    found = dense_product(rows, columns)
    own = _sums(rows**2, 1)[:, None]
    their = _sums(columns**2, 0)[None, :]
    if metric == "euclidean":
        return 1 / (1 + np.sqrt(np.maximum(own + their - 2 * found, 0)))
    if metric == "pearson":
        places = rows.shape[1]
        total = _sums(rows, 1)[:, None]
        their_total = _sums(columns, 0)[None, :]
        found -= total * their_total / places
        own = own - total * (total / places)  # exactly 0 for a row of ones
        their = their - their_total * (their_total / places)
    norm = _root(own) * _root(their)
    norm += np.float32(shrinkage)
    found /= norm
    return found


def _sums(table: Sparse, axis: int) -> np.ndarray:
    """Sums of a sparse table's rows (axis 1) or columns (axis 0), `float32`."""
    return np.asarray(table.sum(axis), dtype=np.float32)


def _root(squares: np.ndarray) -> np.ndarray:
    """Square roots; infinite for 0, so that a division by them leaves nothing."""
    return np.where(squares > 0, np.sqrt(squares), np.float32(np.inf))


def nearest(rows: Sparse, columns: Sparse, config: NeighbourConfig, itself: np.ndarray) -> Sparse:
    """Similarities to the nearest others that are positive, zero to the rest; sparse
    `float32 [rows, others]`.

    Args:
        rows: `[rows, n]`.
        columns: the others, `[n, others]`.
        config: how many, and by which similarity.
        itself: `int64 [rows]`, which of the others a row is, and must not be counted; -1: none of
            them.
    """
    parts = list(_nearest_blocks(rows, columns, config, itself))
    if not parts:
        return sparse.csr_array((0, columns.shape[1]), dtype=np.float32)
    return sparse.csr_array(sparse.vstack(parts))


def _nearest_blocks(
    rows: Sparse, columns: Sparse, config: NeighbourConfig, itself: np.ndarray
) -> Iterator[Sparse]:
    count = columns.shape[1]
    kept = min(config.neighbours, count)
    block = max(1, _CELLS_AT_ONCE // max(count, 1))
    for start in range(0, rows.shape[0], block):
        part = similarities(rows[start : start + block], columns, config.metric, config.shrinkage)
        own = itself[start : start + block]
        part[np.flatnonzero(own >= 0), own[own >= 0]] = -np.inf
        part[part <= 0] = -np.inf
        places = best_items(torch.from_numpy(part), kept).numpy()
        values = np.maximum(np.take_along_axis(part, places, 1), 0.0)
        offsets = np.arange(len(part) + 1) * kept
        yield sparse.csr_array((values.ravel(), places.ravel(), offsets), part.shape)
