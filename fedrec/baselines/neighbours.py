# SPDX-License-Identifier: Apache-2.0
"""Neighbourhood systems: nearest users and items for rankings, Pearson and cosine similarity for
ratings."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from scipy import sparse

from fedrec.baselines.base import (
    Baseline,
    Histories,
    RatingBaseline,
    Ratings,
    Sparse,
    native,
    over_rows,
    pointers,
)
from fedrec.config import Config
from fedrec.data.interactions import LowRatedConfig
from fedrec.metrics.ranks import best_items
from fedrec.neighbourhood.learned import EVERY, Scale, predicted
from fedrec.neighbourhood.similarity import (
    Among,
    Profiles,
    co_raters,
    cosine,
    item_means,
    pearson,
    shrunk,
)
from fedrec.neighbourhood.similarity import nearest as nearest_users

# Shared code of neighbourhood predictors of ratings: settings, means, fallback and clipping.


class ScaleConfig(Config):
    """Settings of predictors with a rating scale."""

    scale: Scale = (1.0, 5.0)
    """Lowest and highest rating; public."""

    def within(self, ratings: np.ndarray) -> np.ndarray:
        """Predictions `float64 [rows]`, clipped to the scale."""
        return np.clip(ratings, *self.scale)


class NeighboursConfig(ScaleConfig):
    """Settings of a predictor from similar items."""

    neighbours: int | None = Field(default=None, ge=1)
    """Number of neighbours N_k, the most similar items; default: all. PNBM has 900 on ML-100K and
    1,300 on ML-1M."""
    neighbours_of: Literal["catalogue", "user"] = "catalogue"
    """Candidates for neighbours: all items, or those that the user has rated, as in the library
    Surprise."""
    positive_only: bool = False
    """Whether negative similarities are set to 0."""
    shrinkage: float = Field(default=0.0, ge=0)
    """Similarities of items that n users rated are multiplied by n / (n + shrinkage)."""
    among: Among = "co-raters"
    """Users whose ratings enter norms (cosine) or means (Pearson): those who rated both items, or
    all."""


class Neighbours(RatingBaseline):
    """Item means plus deviations weighted by similarity (PNBM, equation 2); without rated
    neighbours the item's mean."""

    Config = NeighboursConfig
    config: NeighboursConfig

    @abstractmethod
    def similarity(self, profiles: Profiles) -> np.ndarray:
        """`float64 [items, items]`, zero on the diagonal."""

    def fit_ratings(self, ratings: Ratings) -> None:
        """Compute means and similarities."""
        config = self.config
        profiles = profiles_of(ratings)
        self._means, _ = item_means(profiles)
        found = self.similarity(profiles)
        if config.shrinkage:
            found = shrunk(found, co_raters(profiles), config.shrinkage)
        if config.positive_only:
            found = np.maximum(found, 0.0)
        self._similarity = (
            nearest_users(found, config.neighbours or EVERY)
            if config.neighbours_of == "catalogue"
            else found
        )

    def predict(self, known: Ratings, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Predicted ratings, `float64 [rows]`."""
        own = profiles_of(known)
        config = self.config
        limit = config.neighbours or EVERY if config.neighbours_of == "user" else EVERY
        found = predicted(self._similarity, own, self._means, users, items, limit=limit)
        return config.within(np.where(np.isnan(found), self._means[items], found))


def profiles_of(ratings: Ratings) -> Profiles:
    """Ratings grouped by user."""
    return Profiles.of(
        ratings.num_users, ratings.num_items, ratings.users, ratings.items, ratings.values
    )


def user_deviations(known: Profiles, means: np.ndarray, damping: float = 0.0) -> np.ndarray:
    """Mean over each user's ratings of the deviation from the item's mean, `float64 [users]`, with
    `damping` additional deviations of 0."""
    own = known.centred(means)
    sums = np.bincount(own.users, own.values, own.num_users)
    return sums / np.maximum(own.counts + damping, 1e-300)


# Products of two sparse matrices into a dense one, in native code.
#
# scipy computes a sparse product first, whose non-zero entries it has to count, and converts it to
# a dense one. If the result is dense anyway, adding into it directly takes about a third of the
# time.


def dense_product(left: Sparse, right: Sparse) -> np.ndarray:
    """The product, `float32 [rows, columns]`; each number is summed in the order of its row of
    `left`.

    Args:
        left: `[rows, n]`.
        right: `[n, columns]`.
    """
    data = (matrix.data.astype(np.float32, copy=False) for matrix in (left, right))
    found = np.zeros((left.shape[0], right.shape[1]), dtype=np.float32)
    threads = max(1, min(torch.get_num_threads(), left.shape[0]))
    bounds = np.linspace(0, left.shape[0], threads + 1).astype(np.int64)
    return over_rows(_add, (*pointers(left), *pointers(right), *data), bounds, found)


@native()
def _add(offsets, places, other_offsets, columns, amounts, others, start, stop, found) -> None:
    """Rows `start` to `stop - 1` of the product, added to `found`."""
    for row in range(start, stop):
        for n in range(offsets[row], offsets[row + 1]):
            amount = amounts[n]
            for m in range(other_offsets[places[n]], other_offsets[places[n] + 1]):
                found[row, columns[m]] += amount * others[m]


# Similarity of rows, and the nearest ones: what `item-knn` and `user-knn` share.
#
# Of two rows x and y of n numbers, whose sums are s and t:
#
#     cosine     x . y / (|x| |y| + h)
#     pearson    (x . y - s t / n) / (sqrt((|x|^2 - s^2/n) (|y|^2 - t^2/n)) + h)
#     euclidean  1 / (1 + sqrt(|x|^2 + |y|^2 - 2 x . y))
#
# with the shrinkage h; the Pearson correlation is over all n positions, zeros included, because
# over the positions that both rows have, as between ratings, two rows of ones would always be
# equal. Of equally similar rows the one with the smaller index comes first. Rows hold 1 for what is
# liked and `low-rated` for what is rated and not positive.

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


# User-based nearest neighbours (Herlocker et al. 1999) on what users like.
#
# An item's score is the sum of the similarities of those of the user's nearest training users who
# like it. A user who was among the training users is not a neighbour of itself; any other user is
# compared with them by its known items. The fitted model contains the training users' items, so it
# is not private.


class UserKnnConfig(NeighbourConfig):
    """Settings of user-based nearest neighbours."""

    neighbours: int = Field(default=100, ge=1)
    """Number of neighbours (training users)."""


class UserKnn(Baseline):
    """Scores an item by its likes among the nearest users."""

    name = "user-knn"
    Config = UserKnnConfig
    paper = "Herlocker et al. 1999"
    config: UserKnnConfig

    def fit(self, histories: Histories) -> None:
        """Keep the training users' items."""
        self._fitted = histories
        self._liked = histories.csr(low_rated=self.config.low_rated)
        self._columns = self._liked.T.tocsr()

    def scores(self, histories: Histories) -> torch.Tensor:
        """Sums of neighbours' similarities, `float32 [users, items]`."""
        rows = histories.csr(low_rated=self.config.low_rated)
        weights = nearest(rows, self._columns, self.config, self._fitted.places(histories))
        return torch.from_numpy(dense_product(weights, self._liked))


# Item-based nearest neighbours (Sarwar et al. 2001; Deshpande and Karypis 2004) on what users like.
#
# An item's score is the sum of its similarities to those of its nearest items that the user likes.
# Users are represented by their items only, so new users can be scored too.


class ItemKnnConfig(NeighbourConfig):
    """Settings of item-based nearest neighbours."""


class ItemKnn(Baseline):
    """Scores an item by the likes among its nearest items."""

    name = "item-knn"
    Config = ItemKnnConfig
    paper = "Deshpande and Karypis 2004"
    config: ItemKnnConfig

    def fit(self, histories: Histories) -> None:
        """Find each item's nearest items."""
        items = histories.csr(low_rated=self.config.low_rated).T.tocsr()
        self._similar = nearest(
            items, items.T.tocsr(), self.config, np.arange(histories.num_items)
        ).T.tocsr()

    def scores(self, histories: Histories) -> torch.Tensor:
        """Sums of similarities, `float32 [users, items]`."""
        rows = histories.csr(low_rated=self.config.low_rated)
        return torch.from_numpy(dense_product(rows, self._similar))


# Item-item neighbourhoods by Pearson correlation (PCC in PNBM, section 5.1).
#
# With negative similarities it is worse on MovieLens-100K than user and item biases alone; with
# `positive-only` it is better. The paper does not say which one it uses.


class PccConfig(NeighboursConfig):
    """Settings of neighbourhoods by correlation."""


class Pcc(Neighbours):
    """Predicts from correlated items."""

    name = "pcc"
    Config = PccConfig
    paper = "PNBM, section 5.1"

    def similarity(self, profiles: Profiles) -> np.ndarray:
        """`float64 [items, items]`, zero on the diagonal."""
        return pearson(profiles, self.config.among)


# Item-item neighbourhoods by cosine similarity (COS in PNBM, section 5.1).
#
# `among = "all"` takes an item's norm over all of its ratings, the cosine of columns filled with
# zeros; by default it is over the users who rated both items. The paper does not say which one it
# uses.


class CosConfig(NeighboursConfig):
    """Settings of neighbourhoods by cosine."""


class Cos(Neighbours):
    """Predicts from similar items by cosine."""

    name = "cos"
    Config = CosConfig
    paper = "PNBM, section 5.1"

    def similarity(self, profiles: Profiles) -> np.ndarray:
        """`float64 [items, items]`, zero on the diagonal."""
        return cosine(profiles, self.config.among)
