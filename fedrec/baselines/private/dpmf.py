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

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedrec.baselines._ragged import sums
from fedrec.baselines.base import Histories
from fedrec.baselines.private._clipped_rows import binary_rows, clip_factors
from fedrec.baselines.private._private import Part, PrivateBaseline, PrivateConfig, Releases
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

    Config = DpMfConfig
    paper = "Hua et al. 2015; Liu et al. 2015; DPMF in DP-VAE (Fang et al. 2022), table 8"
    config: DpMfConfig

    def parts(self) -> tuple[Part, ...]:
        """Two sums per step, or one gradient."""
        config = self.config
        if config.reading == "posterior":
            return (Part("gradient", config.clip_norm, releases=config.steps),)
        return (
            Part("quadratic", config.user_norm**2, _K_SHARE, config.steps, "non-negative"),
            Part("linear", config.clip_norm, 1 - _K_SHARE, config.steps),
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
        return torch.linalg.solve(gram, sums(liked, self._items).T).T

    def _clipped_users(self, liked: Histories) -> Tensor:
        users = self._users(liked)
        return users * clip_factors(Clip(self.config.user_norm), users.norm(dim=1))[:, None]

    def _solved(self, liked: Histories, users: Tensor, releases: Releases) -> Tensor:
        """The minimum of the perturbed objective."""
        quadratic = releases.symmetric("quadratic", (users.T @ users).cpu().numpy())
        linear = releases.release("linear", self.linear(liked, users).cpu().numpy())
        noisy = torch.from_numpy(quadratic).to(self.device)
        values, vectors = torch.linalg.eigh(noisy)
        inverse = (vectors / (values.clamp(min=0) + self.config.regularisation)) @ vectors.T
        return torch.from_numpy(linear).to(self.device).double() @ inverse

    def _descended(self, liked: Histories, users: Tensor, releases: Releases) -> Tensor:
        """One Langevin step."""
        noisy = torch.from_numpy(
            releases.release("gradient", self.gradient(liked, users).cpu().numpy())
        )
        whole = noisy.to(self.device).double() + 2 * self.config.regularisation * self._items
        return self._items - self.config.learning_rate * whole

    def linear(self, liked: Histories, users: Tensor) -> Tensor:
        """B, `float64 [items, factors]`: sum of the users' r_u x_u^T, each clipped."""
        total = torch.zeros_like(self._items)
        clip = Clip(self.config.clip_norm)
        start = 0
        for rows in self._blocks(liked):
            own = users[start : start + len(rows)]
            start = start + len(rows)
            shares = clip_factors(clip, rows.norm(dim=1) * own.norm(dim=1))
            total.addmm_(rows.T, own * shares[:, None])
        return total

    def gradient(self, liked: Histories, users: Tensor) -> Tensor:
        """Sum of the users' gradients -2 (r_u - Y x_u) x_u^T in Y, each clipped,
        `float64 [items, factors]`."""
        total = torch.zeros_like(self._items)
        clip = Clip(self.config.clip_norm)
        start = 0
        for rows in self._blocks(liked):
            own = users[start : start + len(rows)]
            start = start + len(rows)
            errors = 2 * (own @ self._items.T - rows)
            shares = clip_factors(clip, errors.norm(dim=1) * own.norm(dim=1))
            total.addmm_(errors.T, own * shares[:, None])
        return total

    def _blocks(self, liked: Histories) -> Iterator[Tensor]:
        """Binary `float64 [users, items]`, some users at a time."""
        size = max(1, _NUMBERS_AT_ONCE // liked.num_items)
        return binary_rows(liked, size, self.device)
