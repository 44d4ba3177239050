# SPDX-License-Identifier: Apache-2.0
"""Gram matrices that may hold noise: their eigenvalues, and item-to-item weights (EASE, PureSVD).

Symmetric noise of standard deviation s alone has eigenvalues up to about s sqrt(2 m) for m items,
the noise edge (the semicircle law, s being that of the diagonal). Weights leave out eigenvalues
below it.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Solution = Literal["ease", "puresvd"]
_ROUNDING = 1e-10  # of the largest eigenvalue


def noise_edge(std: float, items: int) -> float:
    """Largest eigenvalue of noise alone; `std` is its standard deviation on the diagonal."""
    return std * (2 * items) ** 0.5


def with_eigenvalues(matrices: Tensor, changed: Callable[[Tensor], Tensor]) -> Tensor:
    """Symmetric `[..., d, d]` with other eigenvalues, computed from theirs `[..., d]`."""
    values, vectors = torch.linalg.eigh((matrices + matrices.mT) / 2)
    return (vectors * changed(values).unsqueeze(-2)) @ vectors.mT


def semi_definite(matrices: Tensor) -> Tensor:
    """The nearest positive semi-definite matrices to symmetric `[..., d, d]`."""
    return with_eigenvalues(matrices, lambda values: values.clamp(min=0))


def is_semi_definite(matrix: Tensor) -> bool:
    """Whether symmetric `float64 [d, d]` is positive semi-definite, up to the rounding of a sum in
    single precision: a millionth of its trace."""
    slack = 1e-6 * float(matrix.diagonal().sum())
    if slack <= 0:
        return not bool(matrix.any())
    shifted = matrix.clone()
    shifted.diagonal().add_(slack)
    return int(torch.linalg.cholesky_ex(shifted).info) == 0


def shrunk(values: Tensor, edge: float) -> Tensor:
    """Eigenvalues `[d]` beyond the noise edge, moved to where they were before noise pushed them
    (Gavish and Donoho 2017, spiked symmetric matrices in operator norm); 0 for the others."""
    inside = (values.square() - edge**2).clamp(min=0).sqrt()
    return torch.where(values > edge, (values + inside) / 2, torch.zeros_like(values))


def item_weights(gram: Tensor, regularisation: float) -> Tensor:
    """B of EASE (Steck 2019, equation 8), `[items, items]`; the Gram matrix is used up.

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
        gram: symmetric, `float64 [m, m]`; may be used up.
        edge: largest eigenvalue of its noise; 0 without noise.
        solution: `ease` (Steck 2019, eq. 8) with lambda = regularisation + ridge x edge, or
            `puresvd` (Cremonesi et al. 2010), V V^T of the leading eigenvectors.
        factors: most eigenvectors of `puresvd`.
        regularisation: > 0.
        ridge: >= 0.
    """
    if solution == "puresvd":
        vectors = _above(gram, edge, factors)[1]
        return vectors @ vectors.T
    return item_weights(_denoised(gram, edge), regularisation + ridge * edge)


def _above(gram: Tensor, edge: float, limit: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues above the noise edge, at most `limit` and at least one, and their
    vectors. Eigenvalues that are zero but for rounding have arbitrary vectors and are left out."""
    values, vectors = torch.linalg.eigh(gram)
    least = max(edge, _ROUNDING * float(values[-1]))
    kept = max(1, min(int((values > least).sum()), limit))
    return values[-kept:], vectors[:, -kept:]


def _denoised(gram: Tensor, edge: float) -> Tensor:
    """The Gram matrix without the eigenvalues below the noise edge; itself where there is no
    noise."""
    if edge == 0:
        return gram
    values, vectors = _above(gram, edge, len(gram))
    return (vectors * values) @ vectors.T
