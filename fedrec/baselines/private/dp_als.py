# SPDX-License-Identifier: Apache-2.0
"""Implicit matrix factorization by alternating least squares under user-level differential privacy
(DP-ALS).

After Chien, Jain, Krichene, Rendle, Song, Thakurta and Zhang (Private alternating least squares,
ICML 2021) and Krichene, Jain, Song, Sundararajan, Thakurta and Zhang (Multi-task differential
privacy under distribution skew, ICML 2023). The loss is that of iALS (Hu et al. 2008, in the form
of Rendle et al. 2021),

    sum over liked (u, i) of (1 - x_u . y_i)^2
        + a0 sum over all (u, i) of (x_u . y_i)^2 + lambda (|X|^2 + |Y|^2).

In every step each user solves for its own x_u, which is never shared, and scales it to norm G at
most. Three sums are released under Gaussian noise:

    A_i = sum_u w_ui x_u x_u^T,    b_i = sum_u w_ui x_u,    K = sum_u x_u x_u^T,

with weights w_ui = count_i^-e (noisy counts, so that rare items lose less to noise), scaled so that
a user's weights have norm sqrt(k) at most. A user thus contributes at most sqrt(k) G^2, sqrt(k) G
and G^2 in L2. A and K are positive semi-definite, so that exchanging a user costs sqrt(2) times
that; b has signs and costs 2. The server projects A_i and K to semi-definite matrices and solves
y_i = (A_i + a0 K + lambda I)^-1 b_i. All releases compose as Gaussian ones.

The guarantee is joint differential privacy: y_i may be published, and a user's scores are shown to
that user only.

Where this differs from the papers:

- Items are chosen by noisy counts; the published code chooses them by exact counts, which are not
  charged.
- `start = "gram"` starts from the eigenvectors of a noisy Gram matrix (`dp-gram`) instead of random
  ones or noisy power iterations; with few users the first steps from random ones are lost to noise.
- Lambda of the items is increased by five times the largest eigenvalue of the noise in an A_i.
- Weights are scaled down to norm sqrt(k), never up.

Without noise, with k and G large and e = 0, this is iALS.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedrec.baselines.base import Histories, Sparse
from fedrec.baselines.private._chosen_items import ChosenItems, ChosenItemsConfig
from fedrec.baselines.private._clipped_sums import binary_rows, clip_factors, clipped_gram
from fedrec.baselines.private._private import NoisyReleases, PrivateBaseline, ReleaseKind
from fedrec.config import Width
from fedrec.factors.gram import noise_edge, semi_definite
from fedrec.privacy.clipping import Clip
from fedrec.rng import torch_stream

_NUMBERS_AT_ONCE = 2**24  # of matrices and of masks that are in memory at once
_RIDGE = 5.0  # regularisation of items, in units of the largest eigenvalue of the noise in an A_i
_START_SHARE = 0.5  # of the budget that the counts leave, for a noisy Gram matrix to start from
_VECTOR_SHARE = 0.8  # of the steps' budget, for b; K takes a tenth of the rest, A what remains


class DpAlsConfig(ChosenItemsConfig):
    """Settings of private alternating least squares."""

    factors: Width = 12
    """Number of factors (width of x_u and y_i)."""
    steps: int = Field(default=1, ge=1)
    """Number of sweeps over users and items."""
    clip_norm: float = Field(default=0.5, ge=1e-9)
    """Bound G on the norm of x_u."""
    item_budget: float = Field(default=10.0, gt=0)
    """k, bound on the squared norm of a user's weights: the number of items that have weight 1
    without scaling."""
    unobserved: float = Field(default=1.0, ge=0)
    """Weight a0 of all pairs."""
    regularisation: float = Field(default=0.3, gt=0)
    """Regularisation lambda of users and items."""
    start: Literal["gram", "random"] = "gram"
    """First item factors: leading eigenvectors of a noisy Gram matrix, or random numbers."""
    count_share: float = Field(default=0.05, gt=0, lt=1)
    """Share of the budget (of mu^2) that the counts take."""
    gram_clip: float = Field(default=8.0, gt=0)
    """Bound on the Frobenius norm of a user's part of the Gram matrix."""


class DpAls(PrivateBaseline):
    """Alternating least squares whose item side is solved from noisy sums."""

    name = "dp-als"
    Config = DpAlsConfig
    paper = "DP-ALS (Chien et al. 2021; Krichene et al. 2023)"
    config: DpAlsConfig

    def parts(self) -> tuple[ReleaseKind, ...]:
        """The counts, the start, and three sums per step."""
        config = self.config
        left = 1 - self.config.count_share
        parts = [config.counts()]
        if config.start == "gram":
            share = left * _START_SHARE
            parts.append(
                ReleaseKind("start", config.gram_clip, share, contributions="non-negative")
            )
            left -= share
        bound = config.clip_norm
        reach = config.item_budget**0.5
        rest = left * (1 - _VECTOR_SHARE)
        return (
            *parts,
            ReleaseKind("gram", bound**2, 0.1 * rest, config.steps, "non-negative"),
            ReleaseKind("matrices", reach * bound**2, 0.9 * rest, config.steps, "non-negative"),
            ReleaseKind("vectors", reach * bound, left * _VECTOR_SHARE, config.steps),
        )

    def fit(self, histories: Histories) -> None:
        """Choose the items, start, and take the steps."""
        config = self.config
        releases = self.releases(histories.num_users)
        rows = histories.csr(np.float64)
        self.chosen = ChosenItems.released(rows, releases, config)
        weights = torch.from_numpy(self.chosen.weights).to(self.device)
        liked = self.chosen.among(histories)
        self._items = self._start(rows[:, self.chosen.places], weights, releases)
        for _ in range(config.steps):
            self._items = self._step(liked, weights, releases)

    def scores(self, histories: Histories) -> Tensor:
        """Products of the users' factors, solved for now, and the items',
        `float32 [users, items]`."""
        users = self._users(self.chosen.among(histories))
        return self.chosen.ranked((users @ self._items.T).float())

    def _start(self, rows: Sparse, weights: Tensor, releases: NoisyReleases) -> Tensor:
        """First item factors, `float64 [items, factors]`, with columns of about unit length."""
        shape = (rows.shape[1], self.config.factors)
        generator = torch_stream(self.config.own_seed, "baseline-dp-als")
        drawn = torch.randn(*shape, generator=generator).double()
        drawn = (drawn / shape[0] ** 0.5).to(self.device)
        if self.config.start == "random":
            return drawn
        total = clipped_gram(rows * self.chosen.weights, releases.plans["start"].clip)
        gram = releases.symmetric("start", torch.from_numpy(total).to(self.device))
        vectors = torch.linalg.eigh(gram)[1][:, -shape[1] :]
        drawn[:, : vectors.shape[1]] = vectors / weights[:, None]
        return drawn

    def _step(self, liked: Histories, weights: Tensor, releases: NoisyReleases) -> Tensor:
        """Solve for the users, release, and solve for the items."""
        config = self.config
        width = self.config.factors
        users = self._users(liked)
        users = users * clip_factors(Clip(config.clip_norm), users.norm(dim=1))[:, None]
        matrices, vectors = self._sums(liked, users, weights)
        gram = semi_definite(releases.symmetric("gram", users.T @ users))
        matrices = semi_definite(releases.symmetric("matrices", matrices))
        vectors = releases.tensor("vectors", vectors)
        edge = noise_edge(releases.plans["matrices"].noise_scale, width)
        penalty = (config.regularisation + _RIDGE * edge) * torch.eye(
            width, device=self.device
        ).double()
        return torch.linalg.solve(matrices + config.unobserved * gram + penalty, vectors)

    def _users(self, liked: Histories) -> Tensor:
        """Each user's x_u given the items, `float64 [users, factors]`; zero for a user without
        liked items."""
        width = self.config.factors
        identity = torch.eye(width, device=self.device).double()
        base = (
            self.config.unobserved * self._items.T @ self._items
            + self.config.regularisation * identity
        )
        pairs = _outer(self._items)
        found = []
        for _, mask in self._blocks(liked):
            matrices = base + (mask @ pairs).view(-1, width, width)
            found.append(torch.linalg.solve(matrices, mask @ self._items))
        return torch.cat(found)

    def _sums(self, liked: Histories, users: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """A `[items, factors, factors]` and b `[items, factors]` without noise."""
        width = self.config.factors
        matrices = torch.zeros(liked.num_items, width * width, device=self.device).double()
        vectors = torch.zeros(liked.num_items, width, device=self.device).double()
        clip = Clip(self.config.item_budget**0.5)
        for some, mask in self._blocks(liked):
            own = users[some]
            weighted = mask * weights
            weighted *= clip_factors(clip, weighted.norm(dim=1))[:, None]
            matrices.addmm_(weighted.T, _outer(own))
            vectors.addmm_(weighted.T, own)
        return matrices.view(-1, width, width), vectors

    def _blocks(self, liked: Histories) -> Iterator[tuple[slice, Tensor]]:
        """Some users at a time, see `binary_rows`."""
        size = max(1, _NUMBERS_AT_ONCE // max(liked.num_items, self.config.factors**2))
        return binary_rows(liked, size, self.device)


def _outer(rows: Tensor) -> Tensor:
    """Each row's product with itself, `[rows, width^2]`."""
    return (rows[:, :, None] * rows[:, None, :]).flatten(1)
