# SPDX-License-Identifier: Apache-2.0
"""Neighbourhood systems: nearest users and items for rankings, Pearson and cosine similarity for
ratings, and similarities that are learned from ratings."""

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from scipy import sparse

from fedrec import neighbourhood
from fedrec.baselines.base import Baseline, Histories, RatingBaseline, Ratings, Sparse
from fedrec.config import Config
from fedrec.data.interactions import LowRatedConfig
from fedrec.errors import ExperimentError
from fedrec.metrics.ranks import best_items
from fedrec.neighbourhood import Among, Bounds, Examples, Profiles, Scale, Start
from fedrec.rng import stream

# Shared code of neighbourhood predictors of ratings: settings, means, fallback and clipping.


class ScaleConfig(Config):
    """Settings of predictors with a rating scale."""

    scale: Scale = (1.0, 5.0)
    """Lowest and highest rating; public."""

    def clipped(self, ratings: np.ndarray) -> np.ndarray:
        """Predictions `float64 [rows]`, clipped to the scale."""
        return np.clip(ratings, *self.scale)


class NeighboursConfig(ScaleConfig):
    """Settings of a predictor from similar items."""

    neighbours: int | None = Field(default=None, ge=1)
    """Number of neighbours N_k, the most similar items; default: all. PNBM has 900 on ML-100K and
    1,300 on ML-1M."""
    positive_only: bool = False
    """Whether negative similarities are set to 0."""
    shrinkage: float = Field(default=0.0, ge=0)
    """Similarities of items that n users rated are multiplied by n / (n + shrinkage)."""
    among: Among = "co-raters"
    """Users whose ratings enter norms (cosine) or means (Pearson): those who rated both items, or
    all."""


class _Neighbours(RatingBaseline):
    """Item means plus deviations weighted by similarity (PNBM, equation 2); without rated
    neighbours the item's mean."""

    Config = NeighboursConfig
    config: NeighboursConfig
    similarity: ClassVar[Callable[[Profiles, Among], np.ndarray]]
    """Similarities of items `float64 [items, items]`, zero on the diagonal, from ratings."""

    def fit_ratings(self, ratings: Ratings) -> None:
        """Compute means and similarities."""
        config = self.config
        profiles = profiles_of(ratings)
        self._means = neighbourhood.item_means(profiles)
        similarity = type(self).similarity(profiles, config.among)
        if config.shrinkage:
            similarity = neighbourhood.shrunk(
                similarity, neighbourhood.co_raters(profiles), config.shrinkage
            )
        if config.positive_only:
            similarity = np.maximum(similarity, 0.0)
        self._similarity = neighbourhood.nearest(similarity, config.neighbours)

    def predict(self, known: Ratings, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Predicted ratings, `float64 [rows]`."""
        ratings = neighbourhood.predicted(
            self._similarity, profiles_of(known), self._means, users, items
        )
        return self.config.clipped(ratings)


def profiles_of(ratings: Ratings) -> Profiles:
    """Group ratings by user; repeated ratings of an item by a user are averaged."""
    pairs, pair_of_row, counts = np.unique(
        ratings.users * ratings.num_items + ratings.items, return_inverse=True, return_counts=True
    )
    means = np.bincount(pair_of_row, ratings.values, len(pairs)) / np.maximum(counts, 1)
    raters, rated = np.divmod(pairs, ratings.num_items)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(raters, minlength=ratings.num_users))])
    return Profiles(ratings.num_items, offsets.astype(np.int64), rated.astype(np.int64), means)


# Similarity of rows and nearest neighbours, shared by `item-knn` and `user-knn`.
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
    """Constant added to the denominator of `cosine` and `pearson`; shrinks similarities of rows
    with few ones towards zero."""


def _row_similarities(
    rows: Sparse, columns: Sparse, metric: Metric, shrinkage: float = 0
) -> np.ndarray:
    """Similarity of each row to each of the others, `float32 [rows, others]`; 0 for empty or
    constant rows.

    Args:
        rows: `[rows, n]`.
        columns: the others, `[n, others]`.
        metric: name of the similarity.
        shrinkage: h.
    """
    products = (rows @ columns).toarray()
    left = _sums(rows**2, 1)[:, None]
    right = _sums(columns**2, 0)[None, :]
    if metric == "euclidean":
        return 1 / (1 + np.sqrt(np.maximum(left + right - 2 * products, 0)))
    if metric == "pearson":
        width = rows.shape[1]
        left_sums = _sums(rows, 1)[:, None]
        right_sums = _sums(columns, 0)[None, :]
        products -= left_sums * right_sums / width
        left = left - left_sums * (left_sums / width)  # exactly 0 for a row of ones
        right = right - right_sums * (right_sums / width)
    norms = _root(left) * _root(right)
    norms += np.float32(shrinkage)
    products /= norms
    return products


def _sums(table: Sparse, axis: int) -> np.ndarray:
    """Row (axis 1) or column (axis 0) sums of a sparse table, `float32`."""
    return np.asarray(table.sum(axis), dtype=np.float32)


def _root(squares: np.ndarray) -> np.ndarray:
    """Square roots, infinite for 0 so that dividing by them gives 0."""
    return np.where(squares > 0, np.sqrt(squares), np.float32(np.inf))


def _nearest_rows(
    rows: Sparse, columns: Sparse, config: NeighbourConfig, itself: np.ndarray
) -> Sparse:
    """Positive similarities to the nearest others, zero elsewhere; sparse `float32 [rows, others]`.

    Args:
        rows: `[rows, n]`.
        columns: the others, `[n, others]`.
        config: number of neighbours, and their similarity.
        itself: `int64 [rows]`, which of the others a row is, and must not be counted; -1: none of
            them.
    """
    others = columns.shape[1]
    number = min(config.neighbours, others)
    size = max(1, _CELLS_AT_ONCE // max(others, 1))
    blocks = [sparse.csr_array((0, others), dtype=np.float32)]
    for start in range(0, rows.shape[0], size):
        block = _row_similarities(
            rows[start : start + size], columns, config.metric, config.shrinkage
        )
        same = itself[start : start + size]
        block[np.flatnonzero(same >= 0), same[same >= 0]] = -np.inf
        block[block <= 0] = -np.inf
        columns_of_nearest = best_items(torch.from_numpy(block), number).numpy()
        values = np.maximum(np.take_along_axis(block, columns_of_nearest, 1), 0.0)
        offsets = np.arange(len(block) + 1) * number
        arrays = values.ravel(), columns_of_nearest.ravel(), offsets
        blocks.append(sparse.csr_array(arrays, block.shape))
    return sparse.csr_array(sparse.vstack(blocks))


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
    """Item scores from the likes of the nearest users."""

    name = "user-knn"
    Config = UserKnnConfig
    paper = "Herlocker et al. 1999"
    config: UserKnnConfig

    def fit(self, histories: Histories) -> None:
        """Store the training users' items."""
        self._fitted = histories
        self._liked = histories.csr(low_rated=self.config.low_rated)
        self._columns = self._liked.T.tocsr()

    def scores(self, histories: Histories) -> torch.Tensor:
        """Sums of neighbours' similarities, `float32 [users, items]`."""
        rows = histories.csr(low_rated=self.config.low_rated)
        weights = _nearest_rows(rows, self._columns, self.config, self._fitted.positions(histories))
        return torch.from_numpy((weights @ self._liked).toarray())


# Item-based nearest neighbours (Sarwar et al. 2001; Deshpande and Karypis 2004) on what users like.
#
# An item's score is the sum of its similarities to those of its nearest items that the user likes.
# Users are represented by their items only, so new users can be scored too.


class ItemKnn(Baseline):
    """Item scores from the user's likes among the nearest items."""

    name = "item-knn"
    Config = NeighbourConfig
    paper = "Deshpande and Karypis 2004"
    config: NeighbourConfig

    def fit(self, histories: Histories) -> None:
        """Find the nearest items of each item."""
        items = histories.csr(low_rated=self.config.low_rated).T.tocsr()
        self._similar = _nearest_rows(
            items, items.T.tocsr(), self.config, np.arange(histories.num_items)
        ).T.tocsr()

    def scores(self, histories: Histories) -> torch.Tensor:
        """Sums of similarities, `float32 [users, items]`."""
        rows = histories.csr(low_rated=self.config.low_rated)
        return torch.from_numpy((rows @ self._similar).toarray())


# Item-item neighbourhoods by Pearson correlation (PCC in PNBM, section 5.1).
#
# With negative similarities it is worse on MovieLens-100K than user and item biases alone; with
# `positive-only` it is better. The paper does not say which one it uses.


class Pcc(_Neighbours):
    """Rating prediction from items with correlated ratings."""

    name = "pcc"
    paper = "PNBM, section 5.1"
    similarity = staticmethod(neighbourhood.pearson)


# Item-item neighbourhoods by cosine similarity (COS in PNBM, section 5.1).
#
# `among = "all"` takes an item's norm over all of its ratings, the cosine of columns filled with
# zeros; by default it is over the users who rated both items. The paper does not say which one it
# uses.


class Cos(_Neighbours):
    """Rating prediction from similar items by cosine."""

    name = "cos"
    paper = "PNBM, section 5.1"
    similarity = staticmethod(neighbourhood.cosine)


# Probabilistic neighbourhood model: similarities that are learned from ratings (PNBM, equations 1
# to 4).
#
#     minimise  1/2 sum_ui (r_ui - f_ui)^2 + lambda/2 sum_ij s_ij^2,    f_ui as in equation 2
#
# by stochastic gradient descent on similarities S `[items, items]`, row i being those of item i. S
# is not symmetric.
#
# Where this differs from the paper:
#
# - Equations 3 and 6 print the norm of S instead of its square, and equation 4 sums over (u, j)
#   terms indexed (u, i).
# - Equation 5 leaves out the sign of s_ij. It is here (`fedrec.neighbourhood`).
# - f does not change when S is scaled, so the penalty only makes S shrink and steps grow; early
#   stopping regularises instead. `prior` makes the scale meaningful.
# - The initial similarities, the batches and the choice of neighbours are not in the paper; they
#   are settings.


class SimilarityConfig(ScaleConfig):
    """Settings of systems that learn similarities."""

    start: Start = "constant"
    """Initial similarities: `constant`, 1, or `uniform`, drawn from (0, 1)."""
    regularisation: float = Field(default=0.005, ge=0)
    """Regularisation lambda, in every step."""
    neighbours: int | None = Field(default=None, ge=1)
    """Number of neighbours N_k with the largest similarity in a prediction; default: all. The paper
    has 500."""
    prior: float = Field(default=0.0, ge=0)
    """Constant added to the denominators of equation 2; 0 in the paper."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial similarities, the order of ratings and the noise."""


class LearnedSimilarities(RatingBaseline):
    """Rating prediction from similarities that a subclass learns.

    Attributes:
        similarity: `float64 [items, items]`, after fitting.
    """

    config: SimilarityConfig
    similarity: np.ndarray

    def selected(self, profiles: Profiles, random: np.random.Generator) -> Profiles:
        """Select the ratings to learn from; all by default."""
        return profiles

    @abstractmethod
    def learned(
        self, start: np.ndarray, profiles: Profiles, random: np.random.Generator
    ) -> np.ndarray:
        """Learn the similarities `float64 [items, items]`.

        Args:
            start: initial ones, `float64 [items, items]`; may be changed.
            profiles: the ratings to learn from.
            random: source of randomness.
        """

    def fit_ratings(self, ratings: Ratings) -> None:
        """Learn the similarities.

        Raises:
            ExperimentError: there are no ratings to learn from, or training diverged.
        """
        random = stream(self.config.seed, f"baseline-{self.name}")
        profiles = self.selected(profiles_of(ratings), random)
        self._means = neighbourhood.item_means(profiles)
        start = neighbourhood.initial_similarity(self.config.start, ratings.num_items, random)
        self.similarity = self.learned(start, profiles, random)
        check_divergence(self.similarity)

    def predict(self, known: Ratings, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Predicted ratings, `float64 [rows]`; the item's mean without neighbours."""
        config = self.config
        similarity = neighbourhood.nearest(self.similarity, config.neighbours)
        given = profiles_of(known), self._means, users, items
        return config.clipped(neighbourhood.predicted(similarity, *given, prior=config.prior))


class CentralPnbmConfig(SimilarityConfig):
    """Settings of the probabilistic neighbourhood model."""

    epochs: int = Field(default=20, ge=0)
    """Epochs over the ratings."""
    batch: int | None = Field(default=1000, ge=1)
    """Ratings per step; default 1000, null: all."""
    learning_rate: float = Field(default=0.1, gt=0)
    """Step size eta, on the sum over a batch."""


class CentralPnbm(LearnedSimilarities):
    """Neighbourhood model with learned similarities."""

    name = "pnbm"
    Config = CentralPnbmConfig
    paper = "PNBM, equations 1-4"
    config: CentralPnbmConfig

    def learned(
        self, start: np.ndarray, profiles: Profiles, random: np.random.Generator
    ) -> np.ndarray:
        """Minimise the loss by gradient descent."""
        config = self.config
        similarity = start
        examples = Examples(profiles, self._means)
        size = config.batch or len(examples)
        for _ in range(config.epochs):
            order = random.permutation(len(examples))
            for first in range(0, len(order), size):
                batch = order[first : first + size]
                gradient = examples.gradient(similarity, batch, Bounds(prior=config.prior))
                similarity *= 1 - config.learning_rate * config.regularisation
                similarity -= config.learning_rate * gradient
        return similarity


def check_divergence(parameters: np.ndarray) -> None:
    """Check that parameters `[...]` are finite.

    Raises:
        ExperimentError: they are not.
    """
    if not np.isfinite(parameters).all():
        raise ExperimentError(
            "training diverged: parameters are NaN or infinite", fix="lower learning-rate"
        )
