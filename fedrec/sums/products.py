# SPDX-License-Identifier: Apache-2.0
"""Sums of products and of transitions of items, and weights computed from them."""

import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from scipy import sparse
from torch import Tensor

from fedrec.config import Config
from fedrec.data.interactions import RecencyConfig
from fedrec.kernel.compiled import compiled

# Gram matrices that may hold noise: their eigenvalues, and item-to-item weights (EASE, PureSVD).
#
# Symmetric noise of standard deviation s alone has eigenvalues up to about s sqrt(2 m) for m items,
# the noise edge (the semicircle law, s being that of the diagonal). Weights leave out eigenvalues
# below it.

Solution = Literal["ease", "puresvd"]
_ROUNDING = 1e-10  # of the largest eigenvalue


def noise_edge(std: float, items: int) -> float:
    """Largest eigenvalue of noise alone; `std` is its standard deviation on the diagonal."""
    return std * (2 * items) ** 0.5


def _with_eigenvalues(matrices: Tensor, changed: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function to the eigenvalues `[..., d]` of symmetric matrices `[..., d, d]`."""
    values, vectors = torch.linalg.eigh((matrices + matrices.mT) / 2)
    return (vectors * changed(values).unsqueeze(-2)) @ vectors.mT


def semi_definite(matrices: Tensor) -> Tensor:
    """Nearest positive semi-definite matrices to symmetric `[..., d, d]`."""
    return _with_eigenvalues(matrices, lambda values: values.clamp(min=0))


def is_semi_definite(matrix: Tensor) -> bool:
    """True if symmetric `float64 [d, d]` is positive semi-definite, up to the rounding of a sum in
    single precision: a millionth of its trace."""
    slack = 1e-6 * float(matrix.diagonal().sum())
    if slack <= 0:
        return not bool(matrix.any())
    shifted = matrix.clone()
    shifted.diagonal().add_(slack)
    return int(torch.linalg.cholesky_ex(shifted).info) == 0


def shrunk(values: Tensor, edge: float) -> Tensor:
    """Shrink eigenvalues `[d]` above the noise edge to their values without noise (Gavish and
    Donoho 2017, spiked symmetric matrices in operator norm); set the others to 0."""
    inside = (values.square() - edge**2).clamp(min=0).sqrt()
    return torch.where(values > edge, (values + inside) / 2, torch.zeros_like(values))


def item_weights(gram: Tensor, regularisation: float) -> Tensor:
    """Item weights B of EASE (Steck 2019, equation 8), `[items, items]`; overwrites the Gram
    matrix.

    Args:
        gram: positive semi-definite `float [items, items]`.
        regularisation: lambda, > 0.
    """
    gram.diagonal().add_(regularisation)
    torch.linalg.cholesky(gram, out=gram)
    weights = torch.cholesky_inverse(gram)
    weights.div_(-weights.diagonal().clone())
    weights.fill_diagonal_(0.0)
    return weights.contiguous()  # LAPACK returns column-major memory; sums need rows


def solved_weights(
    gram: Tensor,
    edge: float,
    *,
    solution: Solution,
    factors: int,
    regularisation: float,
    ridge: float,
) -> Tensor:
    """Item-to-item weights, `[m, m]`.

    Args:
        gram: symmetric, `float64 [m, m]`; may be overwritten.
        edge: largest eigenvalue of its noise; 0 without noise.
        solution: `ease` (Steck 2019, eq. 8) with lambda = regularisation + ridge x edge, or
            `puresvd` (Cremonesi et al. 2010), V V^T of the leading eigenvectors.
        factors: most eigenvectors of `puresvd`.
        regularisation: > 0.
        ridge: >= 0.
    """
    if solution == "puresvd":
        vectors = above_edge(gram, edge, factors)[1]
        return vectors @ vectors.T
    return item_weights(_denoised(gram, edge), regularisation + ridge * edge)


def above_edge(gram: Tensor, edge: float, limit: int) -> tuple[Tensor, Tensor]:
    """Largest eigenvalues `[k]` of a matrix `[m, m]` above the noise edge, at most `limit` and at
    least one, and their vectors `[m, k]`, without eigenvalues that are zero but for rounding."""
    values, vectors = torch.linalg.eigh(gram)
    least = max(edge, _ROUNDING * float(values[-1]))
    number = max(1, min(int((values > least).sum()), limit))
    return values[-number:], vectors[:, -number:]


def _denoised(gram: Tensor, edge: float) -> Tensor:
    """Gram matrix without the eigenvalues below the noise edge; unchanged without noise."""
    if edge == 0:
        return gram
    values, vectors = above_edge(gram, edge, len(gram))
    return (vectors * values) @ vectors.T


# Sums of transitions between the items of users' sequences, and weights from them.
#
# With a user's items in the order of their times, i at position p and j at position p + d add
# decay^(d - 1) to the transition from i to j, for distances d up to the window. Over users
#
#     T_ij = sum over users and pairs of positions at distance d <= window of decay^(d - 1),
#     W_ij = T_ij / ((sum over j of T_ij) + 20) / ((sum over i of T_ij) + 50)^.3,
#
# and a user's score of j is the sum over its last items i, the d-th from the end, of decay^(d - 1)
# W_ij. It is a Markov chain of order one, smoothed over distances; the power lowers popular items.
# A transition from an item to itself does not count.


_ROW_PRIOR = 20.0
_COLUMN_PRIOR = 50.0
_POWER = 0.3


class _Transitions(NamedTuple):
    """Transitions of some users, each pair of items once per user.

    Attributes:
        offsets: `int64 [users + 1]`: user u's transitions are `offsets[u]` to `offsets[u + 1] - 1`.
        first: `int64 [n]`, the earlier item.
        second: `int64 [n]`, the later item.
        weights: `float64 [n]`, > 0.
    """

    offsets: np.ndarray
    first: np.ndarray
    second: np.ndarray
    weights: np.ndarray


def transitions(
    offsets: np.ndarray, items: np.ndarray, num_items: int, recency: RecencyConfig
) -> _Transitions:
    """Compute the transitions in users' sequences.

    Args:
        offsets: `int64 [users + 1]`: user u's items are `items[offsets[u]:offsets[u + 1]]`.
        items: `int64 [n]`, each user's from the earliest to the latest.
        num_items: size of the catalogue.
        recency: window and decay.
    """
    codes = [np.empty(0, np.int64)]
    weights = [np.empty(0)]
    for users, first, second, weight in _followers(offsets, items, recency):
        codes.append((users * num_items + first) * num_items + second)
        weights.append(np.full(len(users), weight))
    code, entry = np.unique(np.concatenate(codes), return_inverse=True)
    summed = np.bincount(entry, np.concatenate(weights), len(code))
    user, pair = np.divmod(code, num_items * num_items)
    first, second = np.divmod(pair, num_items)
    ends = np.searchsorted(user, np.arange(len(offsets)))
    return _Transitions(ends, first, second, summed)


def transition_sums(
    offsets: np.ndarray, items: np.ndarray, num_items: int, recency: RecencyConfig
) -> sparse.csr_array:
    """Sum T of all users' transitions, `float64 [items, items]`; arguments as of `transitions`."""
    total = sparse.csr_array((num_items, num_items))
    for _, first, second, weight in _followers(offsets, items, recency):
        weights = np.full(len(first), weight)
        total += sparse.csr_array((weights, (first, second)), shape=total.shape)
    return total


def _followers(
    offsets: np.ndarray, items: np.ndarray, recency: RecencyConfig
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, float]]:
    """Pairs of different items at each distance: users, earlier and later items, and weight."""
    users = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    for distance in range(1, recency.window + 1):
        follows = users[distance:] == users[:-distance]
        follows &= items[distance:] != items[:-distance]
        (first,) = np.nonzero(follows)
        yield users[first], items[first], items[first + distance], recency.decay ** (distance - 1)


def multipliers(rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Factors of the transitions from and to each item in W, from their sums; `float64 [m]`
    each."""
    return 1 / (rows + _ROW_PRIOR), 1 / (columns + _COLUMN_PRIOR) ** _POWER


def transition_weights(total: Tensor) -> Tensor:
    """Weights W from sums T, both `float64 [m, m]`; negative entries of T, caused by noise, count
    as 0."""
    total = total.clamp(min=0)
    left, right = multipliers(total.sum(1).numpy(), total.sum(0).numpy())
    return torch.from_numpy(left)[:, None] * total * torch.from_numpy(right)


# Stochastic gradient descent on factors in compiled code, rating by rating.


@compiled
def descend_factors(
    users, items, values, noise, order, user_factors, item_factors, rate, regularisation, most,
    user_biases, item_biases, biased,
):  # fmt: skip
    """Run one pass over ratings: e = r - b_u - b_i - p_u . q_i + noise, clamped; p_u and q_i, and
    the biases, are updated together.

    Args:
        users, items: `int64 [ratings]`.
        values: `float64 [ratings]`.
        noise: `float64 [ratings]`, added to each rating's error.
        order: `int64 [n]`, the ratings in the order of their steps.
        user_factors: `float64 [users, d]`, changed in place.
        item_factors: `float64 [items, d]`, likewise.
        rate: step size.
        regularisation: lambda.
        most: largest magnitude of an error.
        user_biases, item_biases: `float64 [users]` and `[items]`, changed in place if `biased`.
        biased: whether biases learn.
    """
    for step in range(len(order)):
        rating = order[step]
        user = users[rating]
        item = items[rating]
        p = user_factors[user]
        q = item_factors[item]
        guess = user_biases[user] + item_biases[item]
        for k in range(len(p)):
            guess += p[k] * q[k]
        error = min(max(values[rating] - guess + noise[rating], -most), most)
        if biased:
            user_biases[user] += rate * (error - regularisation * user_biases[user])
            item_biases[item] += rate * (error - regularisation * item_biases[item])
        for k in range(len(p)):
            before = p[k]
            p[k] += rate * (error * q[k] - regularisation * before)
            q[k] += rate * (error * before - regularisation * q[k])


# Symmetric matrices as vectors of the same length: the diagonal, and sqrt(2) times what lies above
# it.
#
# The L2 norm of the vector is the Frobenius norm of the matrix, so that clipping and Gaussian noise
# are equivalent for both.


def packed(matrices: Tensor) -> Tensor:
    """Pack symmetric matrices `[..., d, d]` into vectors `[..., d (d + 1) / 2]`."""
    rows, columns, scale = _triangle(matrices.shape[-1], matrices)
    return matrices[..., rows, columns] * scale


def unpacked(vectors: Tensor) -> Tensor:
    """Unpack vectors `[..., d (d + 1) / 2]` into symmetric matrices `[..., d, d]`.

    Raises:
        ValueError: no symmetric matrix has that number of coordinates.
    """
    count = vectors.shape[-1]
    width = (math.isqrt(8 * count + 1) - 1) // 2
    if width * (width + 1) // 2 != count:
        raise ValueError(f"Expected d (d + 1) / 2 numbers, got {count}.")
    rows, columns, scale = _triangle(width, vectors)
    numbers = torch.empty(width, width, dtype=torch.int64, device=vectors.device)
    numbers[rows, columns] = numbers[columns, rows] = torch.arange(count, device=vectors.device)
    entries = (vectors / scale).index_select(-1, numbers.flatten())
    return entries.unflatten(-1, (width, width))


def _triangle(width: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and columns of a matrix's upper triangle, `int64`, and the factors on its entries."""
    rows, columns = torch.triu_indices(width, width, device=like.device)
    scale = torch.where(rows == columns, 1.0, math.sqrt(2.0)).to(like.dtype)
    return rows, columns, scale


# Sums of outer products of sparse vectors in compiled code.


@compiled
def add_outer_products(total, offsets, rows, values, shares):
    """Add share times the outer product of each vector with itself.

    Args:
        total: `float64 [m, m]`, changed in place.
        offsets: `int64 [C + 1]`: the entries of vector c are those from `offsets[c]` up to
            `offsets[c + 1]`.
        rows: `int64 [n]`, the row of each entry, in `[0, m)`, distinct within a vector.
        values: `float64 [n]`.
        shares: `float64 [C]`.
    """
    for client in range(len(shares)):
        start = offsets[client]
        stop = offsets[client + 1]
        share = shares[client]
        if share == 0.0:
            continue
        for entry in range(start, stop):
            row = total[rows[entry]]
            value = values[entry]
            for other in range(start, stop):
                row[rows[other]] += share * (value * values[other])


# Items of a Gram matrix and their weights.
#
# Noisy counts choose them: the items with the largest biases, which are logarithms of shares of
# users who like an item. Under noise, popular items would take most of a user's norm, so that items
# may be scaled by a negative power of these shares.

BIAS = "item.bias"
"""Name of the parameter `[items, 1]` by which items are chosen and scaled."""


class ItemScaleConfig(Config):
    """Weighting of items, shared by a step that sends products of items and the strategy that
    solves for a model."""

    exponent: float = Field(default=0.0, ge=0)
    """Items are scaled by their shares of likers (from `popularity-start`) to the power of minus
    this; 0: equal scales. Under noise, popular items otherwise take most of the norm."""


def chosen_items(bias: Tensor, count: int) -> Tensor:
    """Items with the largest biases `[items]`, ascending, `int64 [count]`; ties go to the lower
    index."""
    if count == len(bias):
        return torch.arange(count, device=bias.device)
    return torch.argsort(bias, descending=True, stable=True)[:count].sort().values


def item_scale(bias: Tensor, exponent: float) -> Tensor:
    """Weight of each item in its own and other items' products, `float64 [items]`, with mean 1.

    Args:
        bias: logarithms of the items' shares of likers, `[items]`.
        exponent: >= 0; items count by their shares to the power of minus this.
    """
    scale = torch.exp(-exponent * bias.double())
    return scale / scale.mean()


# Denoising of a noisy Gram matrix with the items' public features.
#
# Which items are liked together depends largely on their popularity and their public features: G is
# close to U F B F^T U, where U holds the items' popularities, F is their features and B is small.
# Noise of standard deviation s (on the diagonal of a symmetric matrix of m items) has eigenvalues
# up to s sqrt(2 m), but within a subspace of q dimensions only up to s sqrt(2 q). So with an
# orthonormal basis Q of U F, G is divided into
#
#     Q^T G Q              symmetric, q x q        noise edge s sqrt(2 q)
#     Q^T G (I - Q Q^T)    q x m                   noise edge s (sqrt(q) + sqrt(m)) / sqrt(2)
#     the rest             symmetric, m x m        noise edge s sqrt(2 m)
#
# and the eigenvalues (singular values) of each part beyond its edge are shrunk optimally for such
# noise (Gavish and Donoho 2017: of a spiked symmetric matrix in operator norm, of a rectangular one
# in Frobenius norm); the others are set to zero. This is post-processing of one release, with
# public data: it costs no privacy.

_NEGLIGIBLE = 1e-6  # of the largest singular value; below it a direction is a combination of others


def basis_of(directions: np.ndarray, popularity: np.ndarray) -> Tensor:
    """Orthonormal basis of the item directions, scaled by popularity.

    Args:
        directions: `float64 [m, f]`, see `fedrec.sums.fold_in.public_directions`.
        popularity: `float64 [m]`, >= 0: about the root of each item's diagonal entry in the Gram
            matrix, up to a factor, in the scale of the matrix.

    Returns:
        `float64 [m, q]`, q <= f.
    """
    weighted = torch.from_numpy(popularity[:, None] * directions).double()
    vectors, values, _ = torch.linalg.svd(weighted, full_matrices=False)
    return vectors[:, values > _NEGLIGIBLE * values.max()]


def denoised_within(gram: Tensor, std: float, basis: Tensor) -> Tensor:
    """Denoise the Gram matrix; positive semi-definite `float64 [m, m]`.

    Args:
        gram: symmetric, `float64 [m, m]`; unchanged.
        std: standard deviation s of the noise on its diagonal, and s / sqrt(2) off the diagonal; 0:
            no noise, and the matrix is returned unchanged.
        basis: orthonormal, `float64 [m, q]`.
    """
    if std == 0:
        return gram.clone()
    items, width = basis.shape
    across = basis.T @ gram
    inside = across @ basis
    outside = across - inside @ basis.T
    rest = gram - basis @ across - across.T @ basis.T + basis @ inside @ basis.T
    denoised = basis @ _shrunk(inside, noise_edge(std, width)) @ basis.T
    denoised += _shrunk(rest, noise_edge(std, items))
    joined = basis @ _shrunk_rectangle(outside, std)
    return semi_definite(denoised + joined + joined.T)


def _shrunk(matrix: Tensor, edge: float) -> Tensor:
    """Symmetric matrix with shrunk eigenvalues."""
    return _with_eigenvalues(matrix, lambda values: shrunk(values, edge))


def _shrunk_rectangle(matrix: Tensor, std: float) -> Tensor:
    """Matrix with shrunk singular values; each entry has noise of standard deviation s /
    sqrt(2)."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    short, long = (std**2 / 2 * side for side in matrix.shape)
    inside = ((values.square() - short - long).square() - 4 * short * long).clamp(min=0).sqrt()
    beyond = values > short**0.5 + long**0.5
    clean = torch.where(beyond, inside / values.clamp(min=1e-12), torch.zeros_like(values))
    return (left * clean) @ right
