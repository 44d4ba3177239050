# SPDX-License-Identifier: Apache-2.0
"""Systems that are computed without gradients: random order, popularity, own items again, a Markov
chain of items, linear item-to-item systems, and systems that rank items by their vectors."""

import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from scipy import sparse
from scipy.sparse.linalg import svds
from torch import Tensor
from torch.nn import functional as F

from fedrec.baselines.base import Baseline, Histories, Sparse, TooLarge
from fedrec.config import Config, Width
from fedrec.data.interactions import FeatureNames, LowRatedConfig, RecencyConfig, recent_weights
from fedrec.rng import stream, torch_stream
from fedrec.sums.fold_in import MapConfig, content_columns, content_names, mapped
from fedrec.sums.products import item_weights, multipliers, transition_sums

# Items in random order, the weakest baseline.
# Of M items a user with n known ones gets each held-out positive into the first k positions with
# probability k / (M - n).


class RandomConfig(Config):
    """Settings of the random order."""

    seed: int = Field(default=0, ge=0)
    """Seed of the order."""


class Random(Baseline):
    """Uniform random scores, fixed for each user."""

    name = "random"
    Config = RandomConfig
    config: RandomConfig

    def fit(self, histories: Histories) -> None:
        """Do nothing: random scores need no training."""

    def scores(self, histories: Histories) -> torch.Tensor:
        """Scores `float32 [users, items]` in [0, 1), seeded by the user's number, or its items."""
        rows = []
        for user in range(histories.num_users):
            items = histories.items[histories.offsets[user] : histories.offsets[user + 1]]
            users = histories.users
            number = zlib.crc32(items.tobytes()) if users is None else int(users[user])
            random = stream(self.config.seed, "baseline-random", number)
            rows.append(random.random(histories.num_items, np.float32))
        table = np.stack(rows) if rows else np.zeros((0, histories.num_items), np.float32)
        return torch.from_numpy(table)


# A Markov chain over the items of users' sequences (`fedrec.sums.products`): the items that follow
# a user's last ones.
#
# It needs the order of users' items. It has no user parameters, so it also scores users that it was
# not fitted to. Sums are sparse; a block of users is scored from the rows of their last items.


class TransitionsBaseline(Baseline):
    """Markov chain of items: sums of the transitions in users' sequences."""

    name = "transitions"
    Config = RecencyConfig
    paper = "a smoothed Markov chain; FPMC (Rendle et al. 2010) without factors"
    ordered = True
    config: RecencyConfig

    def fit(self, histories: Histories) -> None:
        """Sum and normalise the transitions of all users."""
        ordered = histories.in_order()
        total = transition_sums(ordered.offsets, ordered.items, ordered.num_items, self.config)
        left, right = multipliers(total.sum(1), total.sum(0))
        weights = sparse.diags_array(left) @ total @ sparse.diags_array(right)
        self._weights: Sparse = sparse.csr_array(weights.astype(np.float32))

    def scores(self, histories: Histories) -> torch.Tensor:
        """Sums of transition weights from each user's last items, `float32 [users, items]`."""
        ordered = histories.in_order()
        recent = recent_weights(ordered.offsets, ordered.items, ordered.num_items, self.config)
        return torch.from_numpy((sparse.csr_array(recent) @ self._weights).toarray())


# Popularity: every user gets the items that most training users like. The simplest baseline of
# recommenders.


class Popularity(Baseline):
    """Popularity ranking by number of positive interactions."""

    name = "popularity"

    def fit(self, histories: Histories) -> None:
        """Count the positive interactions of the training users."""
        counts = np.bincount(histories.items, minlength=histories.num_items)
        self._counts = torch.from_numpy(counts.astype(np.float32))

    def scores(self, histories: Histories) -> torch.Tensor:
        """Counts, equal for all users, as `float32 [users, items]` (a view; do not write to it)."""
        return self._counts.expand(histories.num_users, -1)


# Repeat: the user's own items first, by count, then the most popular items.
#
# On data where the same pair occurs again and again (Frappe: five rows per pair), a row-level
# evaluation mostly measures whether a system recommends what the user already uses. This baseline
# does nothing else, and should be reported with every such result. On data without repeats it
# equals popularity.


class RepeatBaseline(Popularity):
    """Ranking by the user's own interaction count, ties by popularity."""

    name = "repeat"

    def scores(self, histories: Histories) -> torch.Tensor:
        """User's own count plus popularity, scaled into [0, 1) so that it only breaks ties,
        `float32 [users, items]`."""
        shape = histories.num_users, histories.num_items
        cells = histories.rows() * histories.num_items + histories.items
        counts = np.bincount(cells, minlength=shape[0] * shape[1]).astype(np.float32)
        return torch.from_numpy(counts).view(shape) + self._counts / (self._counts.max() + 1)


# Implicit alternating least squares (Hu, Koren and Volinsky 2008; Rendle et al. 2021).
#
# With c the weight of a liked pair and 1 that of any other,
#
#     sum over liked (u, i) of c (1 - x_u . y_i)^2  +  sum over all others of (x_u . y_i)^2
#         + lambda (sum of |x_u|^2 + sum of |y_i|^2)
#
# is minimised alternately over all users' x_u given the items and over all items' y_i given the
# users. Each is a ridge regression over the whole catalogue, whose Gram matrix is shared: A_u = Y^T
# Y + (c - 1) sum over liked of y y^T. Rows of about the same number of likes are solved for
# together.
#
# With `low-rated` = r, a pair that was rated and is not positive has a share r of the loss of a
# liked pair and 1 - r of that of any other, so that sums over liked items become sums over rated
# ones with weights 1 and r.
#
# Users to be scored are solved for from their known items, whether they were training users or not.
#
# Where this differs from Hu et al.: c is a setting, where they have 1 + alpha r (`implicit` and
# other libraries have alpha r, which is this); an item that a user has several times counts once.

_NUMBERS_AT_ONCE = 1_000_000  # factors that are gathered at once; they stay in cache


class CentralIalsConfig(LowRatedConfig):
    """Settings of implicit alternating least squares."""

    factors: Width = 64
    """Number of factors (width of x_u and y_i)."""
    weight: float = Field(default=8.0, ge=1)
    """Weight c of a liked pair; that of all other pairs is 1."""
    regularisation: float = Field(default=10.0, gt=0)
    """Regularisation lambda, > 0."""
    sweeps: int = Field(default=15, ge=1)
    """Number of sweeps over users and items."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial item factors."""


class CentralIals(Baseline):
    """Weighted matrix factorization with each side solved for exactly."""

    name = "ials"
    Config = CentralIalsConfig
    paper = "Hu et al. 2008"
    config: CentralIalsConfig

    def fit(self, histories: Histories) -> None:
        """Solve for users and items alternately."""
        by_user = histories.csr(low_rated=self.config.low_rated)
        by_item = by_user.T.tocsr()
        generator = torch_stream(self.config.seed, "baseline-ials")
        width = self.config.factors
        items = torch.randn(histories.num_items, width, generator=generator) * (0.1 / width**0.5)
        self._items = items.to(self.device)
        for _ in range(self.config.sweeps):
            users = _solved(by_user, self._items, self.config)
            self._items = _solved(by_item, users, self.config)

    def scores(self, histories: Histories) -> Tensor:
        """Scores from item factors and newly solved user factors, `float32 [users, items]`."""
        rows = histories.csr(low_rated=self.config.low_rated)
        return _solved(rows, self._items, self.config) @ self._items.T


def _solved(liked: Sparse, fixed: Tensor, config: CentralIalsConfig) -> Tensor:
    """Solve for the factors of each row given those of the columns; zero for an empty row.

    Args:
        liked: `[rows, columns]`, how much of each pair is liked, in (0, 1]; 0 elsewhere.
        fixed: `float [columns, factors]`; its precision is that of the computation.
        config: weights and penalty.

    Returns:
        `[rows, factors]`.
    """
    width = fixed.shape[1]
    extra = config.weight - 1
    gram = fixed.T @ fixed
    padded = torch.cat([fixed, fixed.new_zeros(1, width)])
    factors = fixed.new_zeros(liked.shape[0], width)

    def solve(rows: Tensor, columns: Tensor, shares: Tensor) -> None:
        rows = rows.to(fixed.device)
        others = padded[columns.to(fixed.device)]
        weighted = others * shares.to(fixed).unsqueeze(-1)
        right = config.weight * weighted.sum(1)
        matrix = torch.baddbmm(
            gram.expand(len(rows), -1, -1), weighted.transpose(1, 2), others, alpha=extra
        )
        matrix.diagonal(dim1=1, dim2=2).add_(config.regularisation)
        cholesky = torch.linalg.cholesky(matrix)
        factors[rows] = torch.cholesky_solve(right[..., None], cholesky)[..., 0]

    if fixed.device.type != "cpu":
        for group in _groups(liked, width):
            solve(*group)
        return factors
    # each group on one thread: its products are too small for several
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(lambda group: solve(*group), _groups(liked, width)))
    torch.set_num_threads(threads)  # the products of this thread were set back with the others
    return factors


def _groups(liked: Sparse, width: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Group non-empty rows of similar length: `int64 [group]`, and columns and values `[group,
    length]`.

    Shorter rows are filled up with the column after the last.
    """
    counts = np.diff(liked.indptr)
    order = np.argsort(counts, kind="stable")
    start = int(np.searchsorted(counts[order], 1))
    while start < len(order):
        # As many rows as fit with the length of the last of them, but none longer than the first by
        # more than a fourth.
        longest = max(counts[order[start]] * 5 // 4, 8)
        stop = start + max(1, _NUMBERS_AT_ONCE // (width * max(longest, width)))
        stop = max(start + 1, min(stop, int(np.searchsorted(counts[order], longest, side="right"))))
        rows = order[start:stop]
        length = int(counts[rows[-1]])
        position = np.arange(length)
        inside = position < counts[rows][:, None]
        columns = np.full((len(rows), length), liked.shape[1])
        entries = (liked.indptr[rows][:, None] + position)[inside]
        columns[inside] = liked.indices[entries]
        values = np.zeros(columns.shape, liked.dtype)
        values[inside] = liked.data[entries]
        yield torch.from_numpy(rows), torch.from_numpy(columns), torch.from_numpy(values)
        start = stop


# EASE, the shallow linear autoencoder (Steck, Embarrassingly Shallow Autoencoders for Sparse Data,
# WWW 2019).
#
# With X the `[users, items]` matrix of positives, of ones and zeros, and P = (X^T X + lambda I)^-1,
# the item-to-item weights are B_ij = -P_ij / P_jj and B_jj = 0 (equation 8), and a user's scores
# are the sum of the rows of B of the user's items. It has no user parameters, so it also scores
# users that it was not fitted to. With `low-rated`, X has that weight for rated items that are not
# positive, in the Gram matrix and in the histories that are scored.


class EaseConfig(LowRatedConfig):
    """Settings of EASE."""

    regularisation: float = Field(500.0, gt=0)
    """Lambda, added to the diagonal of the Gram matrix, > 0; about 100 to 1000 for MovieLens."""


class Ease(Baseline):
    """Linear item-to-item model in closed form."""

    name = "ease"
    Config = EaseConfig
    paper = "Steck 2019"
    config: EaseConfig

    def fit(self, histories: Histories) -> None:
        """Solve for the item-to-item weights.

        Raises:
            TooLarge: the catalogue is too large for weights between all items.
        """
        _check_size(histories.num_items)
        rows = histories.csr(low_rated=self.config.low_rated)
        gram = torch.from_numpy((rows.T @ rows).toarray()).to(self.device)
        self._weights = item_weights(gram, self.config.regularisation)

    def scores(self, histories: Histories) -> torch.Tensor:
        """Sums of the weights of each user's items, `float32 [users, items]`."""
        return histories.sums(self._weights, self.config.low_rated)


# PureSVD (Cremonesi, Koren and Turrin 2010): the best low-rank approximation of who likes what.
#
# With X the `[users, items]` matrix of ones and zeros and V its first right singular vectors,
# scores are X V V^T (their equation 8). Only V is fitted, so new users can be scored from their
# items. With `low-rated`, X has that weight for rated items that are not positive.

# below, and at nearly full rank, where it does not converge, Lanczos iteration does not pay
_DENSE_CELLS = 100_000


class PuresvdConfig(LowRatedConfig):
    """Settings of PureSVD."""

    factors: Width = 50
    """Number of singular vectors, at most all."""


class Puresvd(Baseline):
    """Projection of a user's items on the first right singular vectors."""

    name = "puresvd"
    Config = PuresvdConfig
    paper = "Cremonesi et al. 2010"
    config: PuresvdConfig

    def fit(self, histories: Histories) -> None:
        """Find the singular vectors, by Lanczos iteration in float64."""
        rows = histories.csr(np.float64, self.config.low_rated)
        right = _right_singular_vectors(rows, self.config.factors)
        self._items = torch.from_numpy(right.T.astype(np.float32))

    def scores(self, histories: Histories) -> torch.Tensor:
        """Projected histories, `float32 [users, items]`."""
        rows = histories.csr(low_rated=self.config.low_rated)
        return torch.from_numpy(rows @ self._items.numpy()) @ self._items.T


def _right_singular_vectors(rows: Sparse, number: int) -> np.ndarray:
    """Leading right singular vectors, `float64 [number, columns]`, of a sparse matrix `float64
    [rows, columns]`; at most all."""
    rank = min(number, *rows.shape)
    if rows.shape[0] * rows.shape[1] <= _DENSE_CELLS or 2 * rank > min(rows.shape):
        return np.linalg.svd(rows.toarray(), full_matrices=False)[2][:rank]
    start = stream(0, "baseline-puresvd").normal(size=min(rows.shape))
    only: Any = "vh"
    return np.asarray(svds(rows, rank, v0=start, return_singular_vectors=only)[2])


# GF-CF (Shen et al., How Powerful is Graph Convolution for Recommendation?, CIKM 2021): two filters
# on the graph of items, in closed form.
#
# With R the `[users, items]` matrix of ones and zeros, D_U and D_I its row and column sums on the
# diagonal, S = D_U^-1/2 R D_I^-1/2 and V the first right singular vectors of S,
#
#     s_u = r_u (S^T S + alpha D_I^-1/2 V V^T D_I^1/2)
#
# (their section 4.2): a linear filter, and an ideal low-pass filter. Nothing is trained. Users are
# represented by their items only, so new users can be scored, too.

_LOW_PASS = 0.3  # alpha, the weight of the ideal low-pass filter


class GfCfConfig(LowRatedConfig):
    """Settings of GF-CF."""

    factors: Width = 256
    """Number of singular vectors of the ideal low-pass filter, at most all."""


class GfCf(Baseline):
    """A linear filter and an ideal low-pass filter on the graph of items."""

    name = "gf-cf"
    Config = GfCfConfig
    paper = "Shen et al. 2021"
    config: GfCfConfig

    def fit(self, histories: Histories) -> None:
        """Normalise the matrix and find its singular vectors."""
        rows = histories.csr(np.float64, self.config.low_rated)
        users = np.sqrt(np.asarray(rows.sum(1)))
        items = np.sqrt(np.asarray(rows.sum(0)))
        shares = sparse.csr_array(
            sparse.diags_array(_inverse(users)) @ rows @ sparse.diags_array(_inverse(items))
        )
        self._filter = shares.astype(np.float32)
        right = _right_singular_vectors(shares, self.config.factors)
        self._into = (_inverse(items)[:, None] * right.T).astype(np.float32)
        self._out = torch.from_numpy((_LOW_PASS * right * items).astype(np.float32))

    def scores(self, histories: Histories) -> torch.Tensor:
        """Filtered histories, `float32 [users, items]`."""
        rows = histories.csr(low_rated=self.config.low_rated)
        scores = torch.from_numpy((rows @ self._filter.T @ self._filter).toarray())
        return scores + torch.from_numpy(rows @ self._into) @ self._out


def _inverse(roots: np.ndarray) -> np.ndarray:
    """Reciprocals, 0 for 0."""
    return np.where(roots > 0, 1 / np.where(roots > 0, roots, 1), 0)


# Systems that rank items which nobody has used, by what is public of them: their vectors and
# categories.

_NEGLIGIBLE = 1e-5  # of the largest singular value; vectors below it are arbitrary

# Content-based nearest neighbours: an item's score is the sum of a power of its cosines with the
# user's items, between vectors, or between categories where there are no vectors. The power makes
# near neighbours count more than many far ones.


class ContentKnnConfig(LowRatedConfig):
    """Settings of neighbours by content."""

    power: float = Field(default=6.0, gt=0)
    """Power of the cosine, > 0."""


class ContentKnn(Baseline):
    """Sums of a power of the cosine between a user's items and all others."""

    name = "content-knn"
    Config = ContentKnnConfig
    config: ContentKnnConfig

    @classmethod
    def features_used(cls, config: Any, known: FeatureNames) -> FeatureNames:
        """Vectors, or categories without any."""
        used = content_names(known)
        return used._replace(items=()) if used.item_vectors else used

    def fit(self, histories: Histories) -> None:
        """Compute the similarities; nothing is learned from the users.

        Raises:
            TooLarge: the catalogue is too large for them.
        """
        _check_size(histories.num_items)
        columns = content_columns(histories.schema().item_features, categories=False)
        rows = F.normalize(columns.double()).float()
        self._similarities = (rows @ rows.T).clamp_(min=0).pow_(self.config.power).numpy()

    def scores(self, histories: Histories) -> Tensor:
        """Sums of the similarities of each user's items, `float32 [users, items]`."""
        rows = histories.csr(low_rated=self.config.low_rated)
        return torch.from_numpy(rows @ self._similarities)


# A linear model of the items that users have used, with a map from content to its factors for the
# others (`fedrec.sums.fold_in`): PureSVD, or EASE. Old items are ranked among themselves exactly as
# by these.


class ContentMapConfig(LowRatedConfig, MapConfig):
    """Settings of the linear model and of the map."""

    solution: Literal["puresvd", "ease"] = "puresvd"
    """The model of the used items: `puresvd`, or `ease`, whose columns of weights are mapped."""
    factors: Width = 64
    """Number of singular vectors of `puresvd`, at most all."""
    regularisation: float = Field(default=500.0, gt=0)
    """Lambda of `ease`, > 0."""


class ContentMap(Baseline):
    """Factors of used items from users, and those of the others from their content."""

    name = "content-map"
    Config = ContentMapConfig
    paper = "attribute-to-feature mappings (Gantner et al. 2010) of PureSVD (Cremonesi et al. 2010)"
    config: ContentMapConfig

    @classmethod
    def features_used(cls, config: Any, known: FeatureNames) -> FeatureNames:
        """Vectors and categories of items."""
        return content_names(known)

    def fit(self, histories: Histories) -> None:
        """Solve for the factors of the used items, and for the map.

        Raises:
            TooLarge: the catalogue is too large for `ease`.
        """
        columns = content_columns(histories.schema().item_features)
        rows = histories.csr(np.float64, self.config.low_rated)
        used = torch.from_numpy(np.asarray(rows.sum(0)).ravel() > 0)
        every = torch.arange(len(used))
        regularisation = self.config.map_regularisation
        left, right, _ = mapped(*self._solved(rows), every, used, columns, regularisation)
        self._left = left.float()
        self._right = right.float()

    def scores(self, histories: Histories) -> Tensor:
        """Products of the users' vectors and the items' factors, `float32 [users, items]`."""
        rows = histories.csr(low_rated=self.config.low_rated)
        return torch.from_numpy(rows @ self._left.numpy()) @ self._right.T

    def _solved(self, rows: Sparse) -> tuple[Tensor, Tensor]:
        """L and R of all items, `float64 [items, width]`."""
        if self.config.solution == "ease":
            _check_size(rows.shape[1])
            gram = torch.from_numpy((rows.T @ rows).toarray())
            weights = item_weights(gram, self.config.regularisation)
            return torch.eye(len(weights), dtype=torch.float64), weights.T
        vectors = _right_singular_vectors(rows, self.config.factors)
        lengths = np.linalg.norm(rows @ vectors.T, axis=0)
        large = lengths > _NEGLIGIBLE * lengths.max(initial=0.0)
        factors = torch.from_numpy(vectors[large].T.copy())
        return factors, factors


_MOST_ITEMS = 20_000  # whose weights fit the memory: 12 bytes per pair of items
_MULTIPLICATIONS = 1e10  # per second, on two cores


def _check_size(items: int) -> None:
    if items > _MOST_ITEMS:
        raise TooLarge(
            "the catalogue is too large for weights between all items",
            expected=f"at most {_MOST_ITEMS:,} items",
            got=f"{items} items would take about {12 * items**2 / 2**30:.1f} GiB and, on two cores,"
            f" about {items**3 / _MULTIPLICATIONS / 60:.0f} min",
            fix="leave this system out, or take solution = 'puresvd' of content-map",
        )
