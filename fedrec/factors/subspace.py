# SPDX-License-Identifier: Apache-2.0
"""Denoising of a noisy Gram matrix with the items' public features.

Which items are liked together depends largely on their popularity and their public features: G is
close to U F B F^T U, where U holds the items' popularities, F is their features and B is small.
Noise of standard deviation s (on the diagonal of a symmetric matrix of m items) has eigenvalues up
to s sqrt(2 m), but within a subspace of q dimensions only up to s sqrt(2 q). So with an orthonormal
basis Q of U F, G is divided into

    Q^T G Q              symmetric, q x q        noise edge s sqrt(2 q)
    Q^T G (I - Q Q^T)    q x m                   noise edge s (sqrt(q) + sqrt(m)) / sqrt(2)
    the rest             symmetric, m x m        noise edge s sqrt(2 m)

and the eigenvalues (singular values) of each part beyond its edge are shrunk optimally for such
noise (Gavish and Donoho 2017: of a spiked symmetric matrix in operator norm, of a rectangular one
in Frobenius norm); the others are set to zero. This is post-processing of one release, with public
data: it costs no privacy.
"""

import numpy as np
import torch
from torch import Tensor

from fedrec.data.features import FeatureTable
from fedrec.factors.gram import noise_edge, semi_definite, shrunk, with_eigenvalues
from fedrec.factors.public import memberships, unit_rows

_NEGLIGIBLE = 1e-6  # of the largest singular value; below it a direction is a combination of others


def public_directions(features: FeatureTable) -> np.ndarray:
    """`float64 [items, 1 + categories]`: 1, and each feature's categories as a unit vector."""
    units = [unit_rows(memberships(feature)) for feature in features.features]
    return np.concatenate([np.ones((features.rows, 1)), *units], axis=1)


def basis_of(directions: np.ndarray, popularity: np.ndarray) -> Tensor:
    """Orthonormal basis of the directions, each item's times its popularity.

    Args:
        directions: `float64 [m, f]`, see `public_directions`.
        popularity: `float64 [m]`, >= 0: about the root of each item's diagonal entry in the Gram
            matrix, up to a factor, in the scale of the matrix.

    Returns:
        `float64 [m, q]`, q <= f.
    """
    weighted = torch.from_numpy(popularity[:, None] * directions).double()
    vectors, values, _ = torch.linalg.svd(weighted, full_matrices=False)
    return vectors[:, values > _NEGLIGIBLE * values.max()]


def denoised_within(gram: Tensor, std: float, basis: Tensor) -> Tensor:
    """The Gram matrix without most of its noise, positive semi-definite `float64 [m, m]`.

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
    kept = basis @ _shrunk(inside, noise_edge(std, width)) @ basis.T
    kept += _shrunk(rest, noise_edge(std, items))
    joined = basis @ _shrunk_rectangle(outside, std)
    return semi_definite(kept + joined + joined.T)


def _shrunk(matrix: Tensor, edge: float) -> Tensor:
    """A symmetric matrix whose eigenvalues are shrunk."""
    return with_eigenvalues(matrix, lambda values: shrunk(values, edge))


def _shrunk_rectangle(matrix: Tensor, std: float) -> Tensor:
    """The same for singular values; each entry has noise of standard deviation s / sqrt(2)."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    short, long = (std**2 / 2 * side for side in matrix.shape)
    inside = ((values.square() - short - long).square() - 4 * short * long).clamp(min=0).sqrt()
    beyond = values > short**0.5 + long**0.5
    clean = torch.where(beyond, inside / values.clamp(min=1e-12), torch.zeros_like(values))
    return (left * clean) @ right
