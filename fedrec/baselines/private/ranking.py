# SPDX-License-Identifier: Apache-2.0
"""Private systems that rank items from noisy sums (DP-ALS, DPMF, noisy Gram matrices, fold-in and
popularity), and the cost of each release, which is charged before its noise is drawn."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field
from scipy import sparse
from torch import Tensor

from fedrec.baselines.base import Baseline, Histories, Sparse
from fedrec.config import Config, Width
from fedrec.data.interactions import FeatureNames, FeatureTable, LowRatedConfig
from fedrec.errors import ExperimentError
from fedrec.privacy import mechanisms
from fedrec.privacy.accounting.events import Event, NonPrivate
from fedrec.privacy.accounting.sampling import Adjacency, Contributions
from fedrec.privacy.clipping import Clip
from fedrec.privacy.plan import Plan, PrivacyConfig
from fedrec.rng import NoiseSource, source_of, torch_stream
from fedrec.sums import fold_in, products
from fedrec.sums.fold_in import LearnedConfig, LogLinear, PublicPriorConfig
from fedrec.sums.products import packed, unpacked

# Differentially private centralised recommenders: the cost of each release, which is charged
# before its noise is drawn.
#
# A private system releases a few sums over all training users under Gaussian noise and computes
# everything else from those. One target epsilon is for all of its releases; each takes a share of
# the squared Gaussian parameter mu^2 (Dong, Roth and Su 2022), which is additive over Gaussian
# releases. So a release with share p has 1 / sqrt(p) times the noise multiplier of a single release
# that takes the whole budget. Calibration and accounting are those of a federated run.
#
# A caller may set `charge`, which is called with every release before its noise is drawn: a run
# folder writes it to a ledger. A system without noise (`noise = false`) is charged as not
# private, and its epsilon is infinite.

Charge = Callable[[int, Event], None]


class PrivateConfig(Config):
    """Settings of all private systems."""

    epsilon: float = Field(default=5.0, gt=0)
    """Epsilon of all releases together."""
    delta: float = Field(default=1e-5, gt=0, le=0.1)
    """Additive term of the guarantee: any set of outcomes is at most e^epsilon times as probable as
    on neighbouring data, plus delta."""
    adjacency: Adjacency = "replace-one"
    """Neighbours: one user's data replaced by another's, or one user added or removed."""
    noise: bool = True
    """`false`: clip and add no noise; epsilon is infinite."""
    seed: int | None = Field(default=None, ge=0)
    """Seed of the noise; default: the experiment's."""

    def seeded(self, seed: int) -> Self:
        """Return the settings with a seed derived from the experiment's seed if none is set."""
        return self if self.seed is not None else self.model_copy(update={"seed": seed})

    @property
    def own_seed(self) -> int:
        """Seed; 0 for settings outside an experiment."""
        return self.seed or 0

    def privacy(self, clip_norm: float) -> PrivacyConfig:
        """Return the settings as an experiment's `[privacy]` table, for one clip norm."""
        target = {"epsilon": self.epsilon} if self.noise else {"noise_multiplier": 0.0}
        shared = {"delta": self.delta, "adjacency": self.adjacency}
        return PrivacyConfig.model_validate({"clip_norm": clip_norm, **target, **shared})


@dataclass(frozen=True)
class ReleaseKind:
    """A kind of release.

    Attributes:
        name: name of its noise stream and, as a phase, of its charges.
        clip_norm: bound S on the norm of one user's contribution.
        share: share of the budget, in squared Gaussian parameters, for all releases of this kind;
            all shares sum to 1.
        releases: number of releases.
        contributions: kind of contributions of users, see `fedrec.privacy.accounting.sampling`.
        unfounded: why such releases have no guarantee despite their noise; empty if they have one.
    """

    name: str
    clip_norm: float
    share: float = 1.0
    releases: int = 1
    contributions: Contributions = "signed"
    unfounded: str = ""

    @property
    def factor(self) -> float:
        """Ratio of the noise multiplier to that of a single release with the whole budget."""
        return (self.releases / self.share) ** 0.5


class PrivateBaseline(Baseline):
    """A centralised recommender whose releases are clipped, charged and noised."""

    config: PrivateConfig
    charge: Charge | None = None
    """Called with (number, event) of each release before its noise is drawn; numbers count from
    1."""

    @abstractmethod
    def parts(self) -> tuple[ReleaseKind, ...]:
        """Releases of the baseline, in order."""

    def sampler(self, users: int) -> tuple[str, dict[str, float]]:
        """Sampler of a release's users and its settings, for a number of users; all by default."""
        return "full", {}

    def plans(self, users: int) -> dict[str, Plan]:
        """Clip, noise and cost of each kind of release for a number of training users, by name.

        Raises:
            ExperimentError: no noise reaches the target epsilon.
        """
        kinds = self.parts()
        mix = tuple((kind.factor, kind.releases) for kind in kinds)
        sampling = *self.sampler(users), users, sum(kind.releases for kind in kinds)
        plans = {}
        for kind in kinds:
            privacy = self.config.privacy(kind.clip_norm)
            plans[kind.name] = Plan.of(
                privacy, *sampling, factor=kind.factor, mix=mix, contributions=kind.contributions
            )
        return plans

    def releases(self, users: int) -> NoisyReleases:
        """Create the releases of one fit."""
        source = source_of("reproducible", self.config.own_seed)
        unfounded = {kind.name: kind.unfounded for kind in self.parts() if kind.unfounded}
        return NoisyReleases(self.plans(users), source, self.charge, unfounded)


@dataclass(eq=False)
class NoisyReleases:
    """The noisy sums of one fit, in order.

    Attributes:
        plans: plan of each kind of release, by name.
        source: source of noise.
        charge: see `PrivateBaseline.charge`.
        unfounded: `ReleaseKind.unfounded` by kind; missing kinds have a guarantee.
        made: number of releases so far.
    """

    plans: Mapping[str, Plan]
    source: NoiseSource
    charge: Charge | None
    unfounded: Mapping[str, str] = field(default_factory=dict)
    made: int = 0

    def release(self, name: str, total: np.ndarray, clip_norm: float | None = None) -> np.ndarray:
        """Add noise to a sum of clipped contributions, `float32` in the shape of the sum; charged
        first.

        Args:
            name: kind of the release.
            total: the sum, `float [...]` of any shape.
            clip_norm: clip norm of this release, if it differs from that of the kind: the noise is
                proportional to it, and the cost is the same if it was chosen without the users'
                data.
        """
        plan = self.plans[name] if clip_norm is None else self.plans[name].at_clip_norm(clip_norm)
        self.made += 1
        if self.charge is not None:
            why = self.unfounded.get(name)
            self.charge(self.made, NonPrivate(why, name) if why else plan.event(name))
        drawn = plan.noise_scale, self.source, self.made
        return mechanisms.add_noise(plan.mechanism, {name: total}, *drawn)[name]

    def tensor(self, name: str, total: Tensor) -> Tensor:
        """Release a tensor `[...]`, `float64` on its device."""
        noisy = self.release(name, total.cpu().numpy())
        return torch.from_numpy(noisy).to(total.device).double()

    def symmetric(self, name: str, total: Tensor) -> Tensor:
        """Release symmetric matrices `[..., n, n]`, clipped together in the Frobenius norm.

        Noise is added to n (n + 1) / 2 coordinates whose L2 norm is the Frobenius norm: the
        diagonal, and sqrt(2) times the entries above it. So noise has its full standard deviation
        on the diagonal and 1 / sqrt(2) times that elsewhere.
        """
        return unpacked(self.tensor(name, packed(total)))


# Rows of users, and sums of what each user contributes, clipped.


def _binary_rows(
    liked: Histories, users_at_once: int, device: torch.device
) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of users with 1 for each liked item, `float64 [block, items]`, in order.

    Args:
        liked: distinct items of each user.
        users_at_once: users per block; the last block may have fewer.
        device: device of the rows.
    """
    for start in range(0, liked.num_users, users_at_once):
        stop = min(start + users_at_once, liked.num_users)
        yield slice(start, stop), liked.block(start, stop).matrix().to(device).double()


def clip_factors(clip: Clip, norms: Tensor) -> Tensor:
    """Clipping factors of contributions with the given norms `[users]`, `float64 [users]` on their
    device."""
    return torch.from_numpy(clip.factors(norms.cpu().numpy())).to(norms.device)


def _clipped_row_sum(rows: Sparse, clip: Clip) -> np.ndarray:
    """Sum of users' rows, each clipped, `float64 [items]`; rows are `[users, items]`, >= 0."""
    norms = np.sqrt(_squared_norms(rows)) if clip.order == 2 else np.asarray(rows.sum(1)).ravel()
    return rows.T @ clip.factors(norms)


def _clipped_gram(rows: Sparse, clip: Clip) -> np.ndarray:
    """Sum over users of x x^T, each clipped in the Frobenius norm |x|^2, `float64 [items, items]`.

    Args:
        rows: x of each user, sparse `float64 [users, items]`.
        clip: the bound.
    """
    shares = np.sqrt(clip.factors(_squared_norms(rows)))
    shrunk = sparse.diags_array(shares) @ rows
    return (shrunk.T @ shrunk).toarray()


def _squared_norms(rows: Sparse) -> np.ndarray:
    """Squared L2 norms, `float64 [users]`."""
    return np.asarray(rows.multiply(rows).sum(1)).ravel()


COUNTS = "counts"
GRAM = "gram"
_EXPONENT = 0.2  # items are weighted by their noisy counts to the power of minus this


class _ChosenItemsConfig(PrivateConfig):
    """Settings for choosing items by noisy counts."""

    items: int = Field(default=500, ge=1)
    """Number m of items (with the largest noisy counts) that are learned from; at most the
    catalogue."""
    count_share: float = Field(default=0.06, gt=0, lt=1)
    """Share of the budget (of mu^2) that the counts take."""
    count_clip: float = Field(default=6.0, gt=0)
    """Bound on the L2 norm of a user's counts: sqrt(n) for n liked items."""

    def counts(self) -> ReleaseKind:
        """Release of the counts, which are non-negative."""
        return ReleaseKind(COUNTS, self.count_clip, self.count_share, contributions="non-negative")


@dataclass(frozen=True, eq=False)
class _ChosenItems:
    """The items with the largest noisy counts.

    Attributes:
        counts: noisy counts of all items, `float32 [items]`.
        noise: standard deviation of the noise on the counts.
        items: the chosen items, ascending, `int64 [m]`.
        weights: weights of the chosen items, with mean 1, `float64 [m]`: counts to the power of
            minus .2.
    """

    counts: np.ndarray
    noise: float
    items: np.ndarray
    weights: np.ndarray

    @classmethod
    def released(
        cls, rows: Sparse, releases: NoisyReleases, config: _ChosenItemsConfig
    ) -> _ChosenItems:
        """Release the counts and choose the items.

        Args:
            rows: counts of each user, sparse `float64 [users, items]`, >= 0.
            releases: releases of this fit.
            config: number of chosen items, and their weights.
        """
        plan = releases.plans[COUNTS]
        counts = releases.release(COUNTS, _clipped_row_sum(rows, plan.clip))
        items = np.sort(np.argsort(-counts, kind="stable")[: config.items])
        noise = plan.noise_scale
        # counts below the noise are replaced by it
        raised = np.maximum(counts[items], max(noise, 1.0)).astype(np.float64)
        weights = raised**-_EXPONENT
        return cls(counts, noise, items, weights / weights.mean())

    def of(self, histories: Histories) -> Histories:
        """Restrict users' distinct items to the chosen ones, numbered by their position there."""
        return histories.distinct().only(self.items)

    def ranked(self, chosen: Tensor) -> Tensor:
        """Scores of the catalogue `float32 [users, items]` from scores of the chosen items `[users,
        m]`; other items come last, by their counts."""
        # below every chosen item, between 0 and 1 apart
        below = (self.counts - self.counts.max()) / max(float(np.ptp(self.counts)), 1e-9) - 1
        scores = chosen.amin(1, keepdim=True) + torch.from_numpy(below).to(chosen)
        scores[:, torch.from_numpy(self.items).to(chosen.device)] = chosen
        return scores


class _CountsAndGramConfig(_ChosenItemsConfig, LowRatedConfig):
    """Settings of two releases: the counts and the Gram matrix of the chosen items."""

    clip_norm: float = Field(default=8.0, ge=1e-9)
    """c, bound on the Frobenius norm of a user's matrix, about the number of selected items that it
    likes."""


class _CountsAndGramBaseline(PrivateBaseline):
    """Private baseline from noisy counts and the Gram matrix of the most frequent items.

    Attributes:
        chosen: the items, after fitting.
    """

    config: _CountsAndGramConfig
    chosen: _ChosenItems

    def parts(self) -> tuple[ReleaseKind, ...]:
        """Releases of the counts and the Gram matrix; both are non-negative."""
        config = self.config
        share = 1 - config.count_share
        gram = ReleaseKind(GRAM, config.clip_norm, share, contributions="non-negative")
        return config.counts(), gram

    def rows(self, histories: Histories) -> Sparse:
        """Rows of users for releases and scores, sparse `float64 [users, items]`: 1 for liked items
        and `low-rated` for other rated ones."""
        return histories.csr(np.float64, self.config.low_rated)

    def released(self, histories: Histories) -> tuple[Tensor, float]:
        """Release the counts and the Gram matrix; sets `chosen`.

        Args:
            histories: histories of the users.

        Returns:
            The noisy Gram matrix of the chosen items, each times its weight, `float64 [m, m]`, and
            the standard deviation of the noise on its diagonal.
        """
        rows = self.rows(histories)
        releases = self.releases(rows.shape[0])
        self.chosen = _ChosenItems.released(rows, releases, self.config)
        plan = releases.plans[GRAM]
        total = _clipped_gram(rows[:, self.chosen.items] * self.chosen.weights, plan.clip)
        gram = releases.symmetric(GRAM, torch.from_numpy(total).to(self.device))
        return gram, plan.noise_scale


# Implicit matrix factorization by alternating least squares under user-level differential privacy
# (DP-ALS).
#
# After Chien, Jain, Krichene, Rendle, Song, Thakurta and Zhang (Private alternating least squares,
# ICML 2021) and Krichene, Jain, Song, Sundararajan, Thakurta and Zhang (Multi-task differential
# privacy under distribution skew, ICML 2023). The loss is that of iALS (Hu et al. 2008, in the form
# of Rendle et al. 2021),
#
#     sum over liked (u, i) of (1 - x_u . y_i)^2
#         + sum over all (u, i) of (x_u . y_i)^2 + lambda (|X|^2 + |Y|^2).
#
# Each user solves for its own x_u, which is never shared, and scales it to norm G at most. Three
# sums are released under Gaussian noise:
#
#     A_i = sum_u w_ui x_u x_u^T,    b_i = sum_u w_ui x_u,    K = sum_u x_u x_u^T,
#
# with weights w_ui = count_i^-e (noisy counts, so that rare items lose less to noise), scaled so
# that a user's weights have norm sqrt(k) at most. A user thus contributes at most sqrt(k) G^2,
# sqrt(k) G and G^2 in L2. A and K are positive semi-definite, so that exchanging a user costs
# sqrt(2) times that; b has signs and costs 2. The server projects A_i and K to semi-definite
# matrices and solves y_i = (A_i + K + lambda I)^-1 b_i. All releases compose as Gaussian ones.
#
# The guarantee is joint differential privacy: y_i may be published, and a user's scores are shown
# to that user only.
#
# Where this differs from the papers:
#
# - There is one step: with a few thousand users, its noise leaves nothing for a second.
# - Items are chosen by noisy counts; the published code chooses them by exact counts, which are not
#   charged.
# - The first item factors are the eigenvectors of a noisy Gram matrix (`dp-gram`), not random ones
#   or those of noisy power iterations; with few users the first steps from random ones are lost to
#   noise.
# - Lambda of the items is increased by five times the largest eigenvalue of the noise in an A_i.
# - Weights are scaled down to norm sqrt(k), never up.
#
# Without noise, with k and G large and e = 0, this is a step of iALS.

_NUMBERS_AT_ONCE = 2**24  # of matrices and of masks that are in memory at once
_RIDGE = 5.0  # regularisation of items, in units of the largest eigenvalue of the noise in an A_i
_CLIP_NORM = 0.5  # bound G on the norm of x_u
_START_CLIP = 8.0  # bound on the Frobenius norm of a user's part of the Gram matrix
_START_SHARE = 0.5  # of the budget that the counts leave, for a noisy Gram matrix to start from
_VECTOR_SHARE = 0.8  # of the steps' budget, for b; K takes a tenth of the rest, A what remains


class DpAlsConfig(_ChosenItemsConfig):
    """Settings of private alternating least squares."""

    factors: Width = 12
    """Number of factors (width of x_u and y_i)."""
    item_budget: float = Field(default=10.0, gt=0)
    """k, bound on the squared norm of a user's weights: the number of items that have weight 1
    without scaling."""
    regularisation: float = Field(default=0.3, gt=0)
    """Regularisation lambda of users and items."""
    count_share: float = Field(default=0.05, gt=0, lt=1)
    """Share of the budget (of mu^2) that the counts take."""


class DpAls(PrivateBaseline):
    """Alternating least squares with items solved from noisy sums."""

    name = "dp-als"
    Config = DpAlsConfig
    paper = "DP-ALS (Chien et al. 2021; Krichene et al. 2023)"
    config: DpAlsConfig

    def parts(self) -> tuple[ReleaseKind, ...]:
        """Releases of the counts, the start, and three sums per step."""
        left = 1 - self.config.count_share
        start = left * _START_SHARE
        left -= start
        rest = left * (1 - _VECTOR_SHARE)
        weights = self.config.item_budget**0.5
        square = _CLIP_NORM**2
        return (
            self.config.counts(),
            ReleaseKind("start", _START_CLIP, start, contributions="non-negative"),
            ReleaseKind("gram", square, 0.1 * rest, contributions="non-negative"),
            ReleaseKind("matrices", weights * square, 0.9 * rest, contributions="non-negative"),
            ReleaseKind("vectors", weights * _CLIP_NORM, left * _VECTOR_SHARE),
        )

    def fit(self, histories: Histories) -> None:
        """Choose the items and start; solve for the users, release, and solve for the items."""
        releases = self.releases(histories.num_users)
        rows = histories.csr(np.float64)
        self.chosen = _ChosenItems.released(rows, releases, self.config)
        weights = torch.from_numpy(self.chosen.weights).to(self.device)
        liked = self.chosen.of(histories)
        self._items = self._start(rows[:, self.chosen.items], weights, releases)
        users = self._users(liked)
        users = users * clip_factors(Clip(_CLIP_NORM), users.norm(dim=1))[:, None]
        matrices, vectors = self._sums(liked, users, weights)
        gram = products.semi_definite(releases.symmetric("gram", users.T @ users))
        matrices = products.semi_definite(releases.symmetric("matrices", matrices))
        vectors = releases.tensor("vectors", vectors)
        width = self.config.factors
        edge = products.noise_edge(releases.plans["matrices"].noise_scale, width)
        penalty = (self.config.regularisation + _RIDGE * edge) * torch.eye(
            width, device=self.device
        ).double()
        self._items = torch.linalg.solve(matrices + gram + penalty, vectors)

    def scores(self, histories: Histories) -> Tensor:
        """Scores from item factors and newly solved user factors, `float32 [users, items]`."""
        users = self._users(self.chosen.of(histories))
        return self.chosen.ranked((users @ self._items.T).float())

    def _start(self, rows: Sparse, weights: Tensor, releases: NoisyReleases) -> Tensor:
        """First item factors, `float64 [items, factors]`, with columns of about unit length."""
        shape = (rows.shape[1], self.config.factors)
        generator = torch_stream(self.config.own_seed, "baseline-dp-als")
        drawn = torch.randn(*shape, generator=generator).double()
        drawn = (drawn / shape[0] ** 0.5).to(self.device)
        total = _clipped_gram(rows * self.chosen.weights, releases.plans["start"].clip)
        gram = releases.symmetric("start", torch.from_numpy(total).to(self.device))
        vectors = torch.linalg.eigh(gram)[1][:, -shape[1] :]
        drawn[:, : vectors.shape[1]] = vectors / weights[:, None]
        return drawn

    def _users(self, liked: Histories) -> Tensor:
        """User factors x_u given the items, `float64 [users, factors]`; zero for a user without
        liked items."""
        width = self.config.factors
        base = self._items.T @ self._items
        base.diagonal().add_(self.config.regularisation)
        pairs = _outer(self._items)
        factors = []
        for _, mask in self._blocks(liked):
            matrices = base + (mask @ pairs).view(-1, width, width)
            factors.append(torch.linalg.solve(matrices, mask @ self._items))
        return torch.cat(factors)

    def _sums(self, liked: Histories, users: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Sums A `[items, factors, factors]` and b `[items, factors]` without noise."""
        width = self.config.factors
        matrices = torch.zeros(liked.num_items, width * width, device=self.device).double()
        vectors = torch.zeros(liked.num_items, width, device=self.device).double()
        clip = Clip(self.config.item_budget**0.5)
        for some, mask in self._blocks(liked):
            factors = users[some]
            weighted = mask * weights
            weighted *= clip_factors(clip, weighted.norm(dim=1))[:, None]
            matrices.addmm_(weighted.T, _outer(factors))
            vectors.addmm_(weighted.T, factors)
        return matrices.view(-1, width, width), vectors

    def _blocks(self, liked: Histories) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of users, see `_binary_rows`."""
        size = max(1, _NUMBERS_AT_ONCE // max(liked.num_items, self.config.factors**2))
        return _binary_rows(liked, size, self.device)


def _outer(rows: Tensor) -> Tensor:
    """Outer product of each row with itself, `[rows, width^2]`."""
    return (rows[:, :, None] * rows[:, None, :]).flatten(1)


# Matrix factorization whose item factors are learned under differential privacy (DPMF), in two
# variants.
#
# Fang et al. 2022 (DP-VAE, table 8) compare with a "DPMF" and name two papers for it. Here both
# minimise the squared error of the binary matrix of liked pairs,
#
#     F = sum over all (u, i) of (r_ui - x_u . y_i)^2 + lambda (|X|^2 + |Y|^2),
#
# with the items' factors on the server and the users' factors on their devices only: in every step
# each user solves for its x_u given the items, and scales it to norm G at most.
#
# - `objective` (Hua, Xia and Zhong, IJCAI 2015): the objective of the items is perturbed. It is
#   quadratic in Y, so that its linear and quadratic parts are two sums, B = sum_u r_u x_u^T and K =
#   sum_u x_u x_u^T; they are released under noise, and Y = B (K + lambda I)^-1 is the minimum of
#   the perturbed objective.
# - `posterior` (Liu, Wang and Smola, RecSys 2015): a sample from exp(-beta F) by stochastic
#   gradient Langevin dynamics. A Langevin step is a gradient step with Gaussian noise, which is
#   accounted: with noise sigma on the summed gradient and learning rate h, Y moves by -h (gradient
#   + noise), a step of size eta = (h sigma)^2 for beta = 2 / (h sigma^2). So epsilon determines
#   sigma and thereby beta, and not the other way round.
#
# Where this differs from the papers:
#
# - Both protect single ratings; here all data of a user are protected, with the same accountant as
#   for every other system.
# - Hua et al. perturb once, although users' factors depend on their ratings too; here every step is
#   a release.
# - Liu et al. claim pure epsilon for a sample that the dynamics only approach, and scale noise by a
#   temperature, which divides epsilon by it; here each step is accounted by its noise,
#   independently of the distance to the posterior.
# - Fang et al. put noise on the users' profiles. This alone protects no user, because the items'
#   factors are computed from the data of all users without noise.

_DPMF_NUMBERS_AT_ONCE = 2**23  # of users' rows that are in memory at once
_K_SHARE = 0.1  # of a step's budget, for K
_STEPS = 2


class DpMfConfig(PrivateConfig):
    """Settings of private matrix factorization."""

    variant: Literal["objective", "posterior"] = "objective"
    """Perturbed objective (Hua et al.) or a posterior sample (Liu et al.)."""
    factors: Width = 10
    """Number of factors (width of x_u and y_i)."""
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
    """Alternation between users, solved for on their devices, and items, updated by noisy sums."""

    name = "dpmf"
    Config = DpMfConfig
    paper = "Hua et al. 2015; Liu et al. 2015; DPMF in DP-VAE (Fang et al. 2022), table 8"
    config: DpMfConfig

    def parts(self) -> tuple[ReleaseKind, ...]:
        """Releases of two sums or one gradient per step."""
        config = self.config
        if config.variant == "posterior":
            return (ReleaseKind("gradient", config.clip_norm, releases=_STEPS),)
        return (
            ReleaseKind("quadratic", config.user_norm**2, _K_SHARE, _STEPS, "non-negative"),
            ReleaseKind("linear", config.clip_norm, 1 - _K_SHARE, _STEPS),
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
        step = self._descended if config.variant == "posterior" else self._solved
        for _ in range(_STEPS):
            users = self._users(liked)
            users = users * clip_factors(Clip(config.user_norm), users.norm(dim=1))[:, None]
            self._items = step(liked, users, releases)

    def scores(self, histories: Histories) -> Tensor:
        """Scores from item factors and newly solved user factors, `float32 [users, items]`."""
        return (self._users(histories.distinct()) @ self._items.T).float()

    def _users(self, liked: Histories) -> Tensor:
        """User factors x_u given the items, `float64 [users, factors]`."""
        gram = self._items.T @ self._items
        gram.diagonal().add_(self.config.regularisation)
        return torch.linalg.solve(gram, liked.sums(self._items).T).T

    def _solved(self, liked: Histories, users: Tensor, releases: NoisyReleases) -> Tensor:
        """Minimise the perturbed objective."""
        noisy = releases.symmetric("quadratic", users.T @ users)
        linear = releases.tensor("linear", self._clipped_sum(liked, users, lambda rows, _: rows))
        values, vectors = torch.linalg.eigh(noisy)
        inverse = (vectors / (values.clamp(min=0) + self.config.regularisation)) @ vectors.T
        return linear @ inverse

    def _descended(self, liked: Histories, users: Tensor, releases: NoisyReleases) -> Tensor:
        """Take one Langevin step along the users' gradients -2 (r_u - Y x_u) x_u^T in Y."""
        items = self._items
        total = self._clipped_sum(liked, users, lambda rows, x: 2 * (x @ items.T - rows))
        noisy = releases.tensor("gradient", total)
        slope = noisy + 2 * self.config.regularisation * items
        return items - self.config.learning_rate * slope

    def _clipped_sum(
        self, liked: Histories, users: Tensor, left: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Sum of the users' v x_u^T, each clipped, `float64 [items, factors]`; `left` computes v
        `[block, items]` of a block of users from their rows and x_u."""
        total = torch.zeros_like(self._items)
        clip = Clip(self.config.clip_norm)
        users_at_once = max(1, _DPMF_NUMBERS_AT_ONCE // liked.num_items)
        for some, rows in _binary_rows(liked, users_at_once, self.device):
            factors = users[some]
            v = left(rows, factors)
            shares = clip_factors(clip, v.norm(dim=1) * factors.norm(dim=1))
            total.addmm_(v.T, factors * shares[:, None])
        return total


# A linear item-to-item model from one noisy Gram matrix: EASE or PureSVD under user-level
# differential privacy.
#
# Two releases, once each, without training rounds:
#
# 1. noisy counts of likers (`dp-popularity`), which select the m items whose entries can exceed the
#    noise, and give their weights;
# 2. the Gram matrix of those items, G = sum_u a_u (D x_u)(D x_u)^T with a_u = min(1, c /
#    |D x_u|^2), so that each user contributes a positive semi-definite matrix of Frobenius norm at
#    most c. D is diagonal, the noisy counts to the power of minus .2: popular items have
#    the largest entries and would otherwise dominate the norm.
#
# Both are sums over users, so two uploads per user under secure aggregation would suffice, the
# second with m (m + 1) / 2 numbers. Contributions of both are non-negative, so under replace-one
# both cost sqrt(2) S and not 2 S (`fedrec.privacy.accounting.sampling`).
#
# The rest is post-processing. Noise alone has eigenvalues up to about s sqrt(2 m), the noise
# edge, where s is its standard deviation on the diagonal (the semicircle law); eigenvalues below it
# are set to zero. Then either
#
# * `ease`: EASE's closed form (Steck 2019) with lambda = regularisation + ridge x noise edge, or
# * `puresvd`: scores x D V V^T D^-1 with V the leading eigenvectors (Cremonesi, Koren and Turrin
#   2010).
#
# With `public-features` the matrix is first denoised with the items' public features
# (`fedrec.sums.products`); `ridge` refers to the same noise edge.
#
# Without noise, with c and m large and no weights these are EASE and PureSVD. Items that were
# not selected are ranked last, by their noisy counts.


class DpGramConfig(_CountsAndGramConfig):
    """Settings of the noisy Gram matrix."""

    model: Literal["ease", "puresvd"] = "puresvd"
    """Model that is computed from the noisy Gram matrix."""
    factors: Width = 12
    """Largest number of eigenvectors of `puresvd`; those below the noise edge are dropped in any
    case, and those just above it are mostly noise."""
    public_features: bool = False
    """Whether the matrix is denoised with the items' public features: directions in which
    popularities and features vary are much more robust to noise (`fedrec.sums.products`)."""
    ridge: float = Field(default=1.0, ge=0)
    """Lambda of `ease` in units of the noise edge."""
    regularisation: float = Field(default=1.0, gt=0)
    """Constant part of lambda, > 0; without noise, lambda."""


class DpGram(_CountsAndGramBaseline):
    """EASE or PureSVD from a noisy Gram matrix of the items with the largest noisy counts."""

    name = "dp-gram"
    Config = DpGramConfig
    paper = "EASE (Steck 2019), PureSVD (Cremonesi et al. 2010), each from one Gaussian release"
    config: DpGramConfig

    @classmethod
    def features_used(cls, config: DpGramConfig, known: FeatureNames) -> FeatureNames:
        """Side features of the items if `public-features` is set."""
        return FeatureNames(items=known.items if config.public_features else ())

    def fit(self, histories: Histories) -> None:
        """Release counts and Gram matrix, and solve for the item-to-item weights.

        Raises:
            ExperimentError: `public-features`, and the items have none.
        """
        config = self.config
        gram, std = self.released(histories)
        edge = products.noise_edge(std, len(gram))
        regularisation = config.regularisation
        if config.public_features:
            gram = products.denoised_within(gram, std, self._basis(histories))
            regularisation += config.ridge * edge
            edge = 0.0
        weights = products.solved_weights(
            gram,
            edge,
            solution=config.model,
            factors=config.factors,
            regularisation=regularisation,
            ridge=config.ridge,
        )
        scale = torch.from_numpy(self.chosen.weights).to(self.device)
        self._item_weights = (scale[:, None] * weights / scale).float()

    def scores(self, histories: Histories) -> torch.Tensor:
        """Sums of the weights of each user's items, `float32 [users, items]`."""
        rows = torch.from_numpy(self.rows(histories)[:, self.chosen.items].toarray())
        return self.chosen.ranked(rows.to(self._item_weights) @ self._item_weights)

    def _basis(self, histories: Histories) -> torch.Tensor:
        """Orthonormal basis of the directions spanned by the popularities and public features of
        the selected items."""
        if histories.item_features is None or not histories.item_features.features:
            raise ExperimentError(
                "items have no public features to denoise with",
                expected="a dataset with item features",
                got="none",
                fix="set public-features = false for this baseline",
            )
        chosen = self.chosen
        counts = np.maximum(chosen.counts[chosen.items], chosen.noise)
        directions = fold_in.public_directions(histories.item_features)[chosen.items]
        return products.basis_of(directions, counts * chosen.weights).to(self.device)


# Item embeddings from public features and one noisy Gram matrix; each device fits its own user
# vector.
#
# Two releases, once each, under user-level differential privacy:
#
# 1. noisy counts, to select the m items of the second release and to estimate popularity;
# 2. the Gram matrix of those m items, as in `dp-gram`.
#
# A user's row x holds 1 for each liked item and `low-rated` for each other item that it rated: a
# user chose the films that it rated, which also tells something about its preferences. Both
# releases are sums over users of non-negative vectors and of positive semi-definite matrices of
# bounded norm, so replacing a user costs sqrt(2) S (`fedrec.privacy.accounting.sampling`).
#
# Item embeddings are public in part, factors of a kernel over genres and years
# (`fedrec.sums.fold_in`), and learned in part, the leading eigenvectors of the part of the noisy
# Gram matrix that popularity and public embeddings do not explain (`fedrec.sums.fold_in`). That is
# post-processing and costs no privacy.
#
# A device receives popularity and embeddings, and computes the most probable vector of its user
# (`fedrec.sums.fold_in`) from the user's own rows. This happens on the device and none of it is
# sent, so it costs no privacy either.
#
# The parts are the fold-in of iALS (Hu et al. 2008: a new user's vector from fixed item vectors),
# DP popularity, and EASE from a noisy Gram matrix; their combination is ours. Item features have to
# be public, such as film titles and genres; user features are not used.


class DpFoldInConfig(_CountsAndGramConfig, LearnedConfig, PublicPriorConfig):
    """Settings of the releases, of the public embeddings and of the learned ones."""

    low_rated: float = Field(default=0.3, ge=0, le=1)
    """Weight of a rated item that is not positive, in the releases and on the device, where a
    positive one has 1; 0 leaves these items out."""
    items: int = Field(default=600, ge=1)
    """Number m of items (with the largest noisy counts) in the Gram matrix; at most the
    catalogue."""
    count_share: float = Field(default=0.2, gt=0, lt=1)
    """Share of the budget (of mu^2) that the counts take."""
    factors: int = Field(default=64, ge=0, le=2**16)
    """Largest number of learned coordinates; those below the noise edge are dropped in any case."""


class DpFoldIn(_CountsAndGramBaseline):
    """User vectors fitted on the device to item embeddings that are public or released once."""

    name = "dp-fold-in"
    Config = DpFoldInConfig
    paper = "fold-in of iALS (Hu et al. 2008) and EASE's Gram matrix (Steck 2019), from one release"
    config: DpFoldInConfig

    @classmethod
    def features_used(cls, config: DpFoldInConfig, known: FeatureNames) -> FeatureNames:
        """Side features of the items; no texts or vectors with an effect variance of 0."""
        return fold_in.prior_features(config, known)

    def fit(self, histories: Histories) -> None:
        """Release counts and Gram matrix, and compute embeddings from them and public features.

        Raises:
            ExperimentError: an ordered feature is not an item feature.
        """
        config = self.config
        gram, std = self.released(histories)
        gram = gram.cpu()
        counts = fold_in.expected_counts(self.chosen.counts, self.chosen.noise)
        shares = torch.from_numpy(counts / counts.sum())
        features = histories.item_features or FeatureTable(histories.num_items)
        public = torch.from_numpy(fold_in.feature_embeddings(features, config))
        learned = fold_in.placed_embeddings(
            gram,
            torch.from_numpy(self.chosen.items),
            torch.from_numpy(self.chosen.weights),
            shares,
            public,
            config,
            edge=products.noise_edge(std, len(gram)),
            factors=config.factors,
        )
        embeddings = torch.cat([public, learned], 1).float().to(self.device)
        self._model = LogLinear(embeddings, shares.log().float().to(self.device))

    def scores(self, histories: Histories) -> torch.Tensor:
        """Scores from each user's vector, fitted to its own rows, `float32 [users, items]`."""
        rows = torch.from_numpy(self.rows(histories).toarray())
        return self._model.scores(rows.float().to(self.device))


# Popularity under user-level differential privacy: the baseline for private systems.
#
# There is one release: the indicator vector of liked items of every training user is clipped, and
# the sum gets noise once. The noise is calibrated by the same plan and accountant as in a federated
# run, for one round with all users. Counts are non-negative, so under replace-one Gaussian noise is
# calibrated to a sensitivity of sqrt(2) S (`fedrec.privacy.accounting.sampling`).


class DpPopularityConfig(PrivateConfig):
    """Settings of private popularity."""

    clip_norm: float = Field(default=8.0, ge=1e-9)
    """Bound on the norm of a user's counts (L2; L1 for Laplace): sqrt(n), or n, for n liked
    items."""
    mechanism: str | dict[str, Any] = "gaussian"
    """The noise, as in `privacy.mechanism`."""

    def privacy(self, clip_norm: float) -> PrivacyConfig:
        """Return the settings as an experiment's `[privacy]` table, for one clip norm."""
        return super().privacy(clip_norm).model_copy(update={"mechanism": self.mechanism})


class DpPopularity(PrivateBaseline):
    """Scores an item by its noisy number of likers."""

    name = "dp-popularity"
    Config = DpPopularityConfig
    config: DpPopularityConfig

    def parts(self) -> tuple[ReleaseKind, ...]:
        """Release of the counts."""
        return (ReleaseKind("counts", self.config.clip_norm, contributions="non-negative"),)

    def fit(self, histories: Histories) -> None:
        """Sum the clipped indicator vectors and add noise."""
        releases = self.releases(histories.num_users)
        counts = _clipped_row_sum(histories.csr(np.float64), releases.plans["counts"].clip)
        self._counts = torch.from_numpy(releases.release("counts", counts))

    def scores(self, histories: Histories) -> torch.Tensor:
        """Noisy counts, equal for all users, as `float32 [users, items]` (a view; do not write to
        it)."""
        return self._counts.expand(histories.num_users, -1)
