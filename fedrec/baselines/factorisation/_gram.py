# SPDX-License-Identifier: Apache-2.0
"""Item-to-item weights of a Gram matrix that may hold noise: EASE or PureSVD.

Symmetric noise of standard deviation s alone has eigenvalues up to about s sqrt(2 m) for m items,
the noise edge (the semicircle law, s being that of the diagonal); eigenvalues below it are set to
zero.
"""

from __future__ import annotations

from typing import Literal

import torch

from fedrec.baselines.factorisation.ease import item_weights

Solution = Literal["ease", "puresvd"]


def noise_edge(std: float, items: int) -> float:
    """Largest eigenvalue of noise alone; `std` is its standard deviation on the diagonal."""
    return std * (2 * items) ** 0.5


def solved_weights(
    gram: torch.Tensor,
    edge: float,
    *,
    solution: Solution,
    factors: int,
    regularisation: float,
    ridge: float,
) -> torch.Tensor:
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


def _above(gram: torch.Tensor, edge: float, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest eigenvalues above the noise edge, at most `limit` and at least one, and their
    vectors."""
    values, vectors = torch.linalg.eigh(gram)
    kept = max(1, min(int((values > edge).sum()), limit))
    return values[-kept:], vectors[:, -kept:]


def _denoised(gram: torch.Tensor, edge: float) -> torch.Tensor:
    """The Gram matrix without the eigenvalues below the noise edge; itself where there is no
    noise."""
    if edge == 0:
        return gram
    values, vectors = _above(gram, edge, len(gram))
    return (vectors * values) @ vectors.T
