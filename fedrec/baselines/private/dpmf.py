# SPDX-License-Identifier: Apache-2.0
"""Matrix factorization whose item factors are learned under differential privacy (DPMF), in two
variants.

Fang et al. 2022 (DP-VAE, table 8) compare with a "DPMF" and name two papers for it. Here both
minimise the squared error of the binary matrix of liked pairs,

    F = sum over all (u, i) of (r_ui - x_u . y_i)^2 + lambda (|X|^2 + |Y|^2),

with the items' factors on the server and the users' factors on their devices only: in every step
each user solves for its x_u given the items, and scales it to norm G at most.

- `objective` (Hua, Xia and Zhong, IJCAI 2015): the objective of the items is perturbed. It is
  quadratic in Y, so that its linear and quadratic parts are two sums, B = sum_u r_u x_u^T and K =
  sum_u x_u x_u^T; they are released under noise, and Y = B (K + lambda I)^-1 is the minimum of the
  perturbed objective.
- `posterior` (Liu, Wang and Smola, RecSys 2015): a sample from exp(-beta F) by stochastic gradient
  Langevin dynamics. A Langevin step is a gradient step with Gaussian noise, and that is what is
  accounted: with noise sigma on the summed gradient and learning rate h, Y moves by -h (gradient +
  noise), which is a step of size eta = (h sigma)^2 for beta = 2 / (h sigma^2). So epsilon
  determines sigma and thereby beta, and not the other way round.

Where this differs from the papers:

- Both protect single ratings; here all data of a user are protected, with the same accountant as
  for every other system.
- Hua et al. perturb once, although users' factors depend on their ratings too; here every step is a
  release.
- Liu et al. claim pure epsilon for a sample that the dynamics only approach, and scale noise by a
  temperature, which divides epsilon by it; here each step is accounted by its noise, independently
  of the distance to the posterior.
- Fang et al. put noise on the users' profiles. This alone protects no user, because the items'
  factors are computed from the data of all users without noise.
"""

from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedrec.baselines.base import Histories
from fedrec.baselines.private._clipped_sums import binary_rows, clip_factors
from fedrec.baselines.private._private import (
    NoisyReleases,
    PrivateBaseline,
    PrivateConfig,
    ReleaseKind,
)
from fedrec.config import Width
from fedrec.privacy.clipping import Clip
from fedrec.rng import torch_stream

_NUMBERS_AT_ONCE = 2**23  # of users' rows that are in memory at once
_K_SHARE = 0.1  # of a step's budget, for K


class DpMfConfig(PrivateConfig):
    """Settings of private matrix factorization."""

    reading: Literal["objective", "posterior"] = "objective"
    """Perturbed objective (Hua et al.) or a posterior sample (Liu et al.)."""
    factors: Width = 10
    """Number of factors (width of x_u and y_i)."""
    steps: int = Field(default=2, ge=1)
    """Number of steps, each of which is a release."""
    user_norm: float = Field(default=1.0, gt=0)
    """Bound G on the norm of x_u."""
    clip_norm: float = Field(default=6.0, ge=1e-9)
    """Bound on the norm of a user's part of B, at most sqrt(n) G for n liked items, or of its
    gradient."""
    regularisation: float = Field(default=1.0, gt=0)
    """Regularisation lambda."""
    learning_rate: float = Field(default=0.001, gt=0)
    """With `posterior`: learning rate h on the summed gradient."""


class DpMf(PrivateBaseline):
    """Alternates between users, solved for on their devices, and items, updated by noisy sums."""

    name = "dpmf"
    Config = DpMfConfig
    paper = "Hua et al. 2015; Liu et al. 2015; DPMF in DP-VAE (Fang et al. 2022), table 8"
    config: DpMfConfig

    def parts(self) -> tuple[ReleaseKind, ...]:
        """Two sums per step, or one gradient."""
        config = self.config
        if config.reading == "posterior":
            return (ReleaseKind("gradient", config.clip_norm, releases=config.steps),)
        return (
            ReleaseKind(
                "quadratic",
                config.user_norm**2,
                _K_SHARE,
                config.steps,
                "non-negative",
            ),
            ReleaseKind("linear", config.clip_norm, 1 - _K_SHARE, config.steps),
        )

    def fit(self, histories: Histories) -> None:
        """Take the steps from random item factors."""
        config = self.config
        releases = self.releases(histories.num_users)
        liked = histories.distinct()
        generator = torch_stream(config.own_seed, "baseline-dpmf")
        shape = (histories.num_items, config.factors)
        items = torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[0] ** 0.5
        self._items = items.to(self.device)
        step = self._descended if config.reading == "posterior" else self._solved
        for _ in range(config.steps):
            self._items = step(liked, self._clipped_users(liked), releases)

    def scores(self, histories: Histories) -> Tensor:
        """Products of the users' factors, solved for now, and the items',
        `float32 [users, items]`."""
        return (self._users(histories.distinct()) @ self._items.T).float()

    def _users(self, liked: Histories) -> Tensor:
        """Each user's x_u given the items, `float64 [users, factors]`."""
        gram = self._items.T @ self._items
        gram.diagonal().add_(self.config.regularisation)
        return torch.linalg.solve(gram, liked.sums(self._items).T).T

    def _clipped_users(self, liked: Histories) -> Tensor:
        users = self._users(liked)
        return users * clip_factors(Clip(self.config.user_norm), users.norm(dim=1))[:, None]

    def _solved(self, liked: Histories, users: Tensor, releases: NoisyReleases) -> Tensor:
        """The minimum of the perturbed objective."""
        noisy = releases.symmetric("quadratic", users.T @ users)
        linear = releases.tensor("linear", self.linear(liked, users))
        values, vectors = torch.linalg.eigh(noisy)
        inverse = (vectors / (values.clamp(min=0) + self.config.regularisation)) @ vectors.T
        return linear @ inverse

    def _descended(self, liked: Histories, users: Tensor, releases: NoisyReleases) -> Tensor:
        """One Langevin step."""
        noisy = releases.tensor("gradient", self.gradient(liked, users))
        whole = noisy + 2 * self.config.regularisation * self._items
        return self._items - self.config.learning_rate * whole

    def linear(self, liked: Histories, users: Tensor) -> Tensor:
        """B, `float64 [items, factors]`: sum of the users' r_u x_u^T, each clipped."""
        return self._clipped_sum(liked, users, lambda rows, _: rows)

    def gradient(self, liked: Histories, users: Tensor) -> Tensor:
        """Sum of the users' gradients -2 (r_u - Y x_u) x_u^T in Y, each clipped,
        `float64 [items, factors]`."""
        return self._clipped_sum(liked, users, lambda rows, own: 2 * (own @ self._items.T - rows))

    def _clipped_sum(
        self, liked: Histories, users: Tensor, left: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Sum of the users' v x_u^T, each clipped, `float64 [items, factors]`; `left` computes v
        `[block, items]` of a block of users from their rows and x_u."""
        total = torch.zeros_like(self._items)
        clip = Clip(self.config.clip_norm)
        users_at_once = max(1, _NUMBERS_AT_ONCE // liked.num_items)
        for some, rows in binary_rows(liked, users_at_once, self.device):
            own = users[some]
            part = left(rows, own)
            shares = clip_factors(clip, part.norm(dim=1) * own.norm(dim=1))
            total.addmm_(part.T, own * shares[:, None])
        return total
