# SPDX-License-Identifier: Apache-2.0
"""The part of a noisy Gram matrix that popularity and public features do not explain.

If users liked items independently of each other and in proportion to popularity, the off-diagonal
entries of the Gram matrix would be y_i y_j, with y proportional to popularity. If users' utilities
also have the covariance e_i . e_j, they are y_i y_j (1 + e_i . e_j), to first order. So from a
noisy Gram matrix G and public embeddings f_i

    R = G - y y^T - Y F F^T Y,    Y = diag(y),    R_ii = 0

contains what public features do not explain, and noise. Its eigenvalues above the noise edge,
shrunk to what they were before noise pushed them (Gavish and Donoho 2017, spiked symmetric matrices
in operator norm), give further coordinates of the embeddings: (Y^2 + k^2)^-1 Y V sqrt(values),
where k damps rare items, whose rows of G are nearly noise. All of this is post-processing of one
release.
"""

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedrec.config import Config
from fedrec.sums.products import shrunk


class LearnedConfig(Config):
    """Settings of the coordinates that are learned from the Gram matrix."""

    learned_variance: float = Field(default=1.0, ge=0)
    """Factor on the prior variance along the learned coordinates; 0 leaves them out."""
    damping: float = Field(default=0.7, ge=0)
    """Of learned coordinates of rare items, in units of the mean expected root of an entry."""
    popularity_variance: float = Field(default=0.1, ge=0)
    """Prior variance of a user's liking of popular items: the logarithm of an item's popularity is
    the first of the learned coordinates; 0: none is."""


def placed_embeddings(
    gram: Tensor,
    chosen: Tensor,
    scale: Tensor,
    shares: Tensor,
    public: Tensor,
    config: LearnedConfig,
    *,
    edge: float,
    factors: int,
) -> Tensor:
    """Learned coordinates of the whole catalogue's embeddings, 0 for items that are not chosen.

    Args:
        gram: noisy and symmetric, of the chosen items in their scale, `float64 [m, m]`; unchanged.
        chosen: the items of its rows, `int64 [m]`.
        scale: what each of them is multiplied by in it, > 0, `float64 [m]`.
        shares: popularities of all items, > 0, with sum 1, `float64 [items]`.
        public: public coordinates of all items, `float64 [items, width]`.
        config: variance and damping.
        edge: see `learned_embeddings`.
        factors: see `learned_embeddings`.

    Returns:
        `float64 [items, factors]`, leading coordinates last.
    """
    popularity = config.popularity_variance**0.5 * shares.log()[:, None]
    popularity = popularity[:, : min(factors, int(config.popularity_variance > 0))]
    known = torch.cat([public, popularity], 1)
    learned = learned_embeddings(
        gram,
        expected_profile(gram, shares[chosen] * scale),
        (known - shares @ known)[chosen],
        edge=edge,
        factors=factors - popularity.shape[1],
        damping=config.damping,
    )
    placed = learned.new_zeros(len(shares), factors)
    placed[:, : popularity.shape[1]] = popularity
    if learned.shape[1]:
        placed[chosen, -learned.shape[1] :] = config.learned_variance**0.5 * learned
    return placed


def expected_profile(gram: Tensor, popularity: Tensor) -> Tensor:
    """The y whose products y_i y_j are closest to the Gram matrix off its diagonal, among the
    multiples of the popularities.

    Args:
        gram: symmetric, `float64 [m, m]`.
        popularity: `float64 [m]`, > 0, in the scale of the Gram matrix's items.

    Returns:
        `float64 [m]`; of length 1e-6 if no positive multiple fits because of noise.
    """
    products = torch.outer(popularity, popularity).fill_diagonal_(0)
    scale = float((gram * products).sum() / products.square().sum().clamp(min=1e-300))
    return popularity * max(scale, 1e-12 / float(popularity.square().sum())) ** 0.5


def learned_embeddings(
    gram: Tensor, profile: Tensor, public: Tensor, *, edge: float, factors: int, damping: float
) -> Tensor:
    """Additional coordinates of item embeddings, from the part that public ones do not explain.

    Args:
        gram: noisy and symmetric, `float64 [m, m]`; unchanged.
        profile: y, `float64 [m]`, > 0, see `expected_profile`.
        public: F, `float64 [m, width]`, centred.
        edge: largest eigenvalue of noise alone, see `fedrec.sums.products.noise_edge`; 0 without
            noise.
        factors: largest number of coordinates.
        damping: k in units of the mean of y, >= 0.

    Returns:
        `float64 [m, at most factors]`, leading ones last; without columns if everything is below
        the noise edge.
    """
    explained = profile[:, None] * public
    rest = gram - torch.outer(profile, profile) - explained @ explained.T
    rest.fill_diagonal_(0)
    values, vectors = torch.linalg.eigh((rest + rest.T) / 2)
    first = len(values) - min(int((values > max(edge, 0.0)).sum()), factors)
    values = values[first:]
    vectors = vectors[:, first:]
    damped = profile / (profile.square() + (damping * profile.mean()) ** 2)
    return damped[:, None] * vectors * shrunk(values, max(edge, 0.0)).sqrt()


def expected_counts(noisy: np.ndarray, std: float) -> np.ndarray:
    """Posterior mean of counts with Gaussian noise.

    The prior is exponential, with the mean of the noisy counts: most items are rare. Then a count
    is distributed as a normal number that is > 0 and has mean noisy - std^2 / mean.

    Args:
        noisy: counts, `float [items]`.
        std: standard deviation of the noise, >= 0.

    Returns:
        `float64 [items]`, > 0; without noise the counts, at least 1/2.
    """
    counts = noisy.astype(np.float64)
    if std == 0:
        return np.maximum(counts, 0.5)
    moved = torch.from_numpy((counts - std**2 / max(float(counts.mean()), 1.0)) / std)
    log_density = -0.5 * moved.square() - 0.5 * np.log(2 * np.pi)
    hazard = (log_density - torch.special.log_ndtr(moved)).exp()
    return np.maximum(std * (moved + hazard).numpy(), 1e-9 * std)
