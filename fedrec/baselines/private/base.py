# SPDX-License-Identifier: Apache-2.0
"""Differentially private centralised recommenders: the cost of each release, which is charged
before its noise is drawn.

A private system releases a few sums over all training users under Gaussian noise and computes
everything else from those. One target epsilon is for all of its releases; each takes a share of the
squared Gaussian parameter mu^2 (Dong, Roth and Su 2022), which is additive over Gaussian releases.
So a release with share p has 1 / sqrt(p) times the noise multiplier of a single release that takes
the whole budget. Calibration and accounting are those of a federated run.

A caller may set `charge`, which is called with every release before its noise is drawn: a run
folder writes it to a ledger. A system without noise (`noise = false`) is charged as not
private, and its epsilon is infinite.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from pydantic import Field
from scipy import sparse
from torch import Tensor

from fedrec.baselines.base import Baseline, Histories, Sparse
from fedrec.config import Config
from fedrec.data.interactions import LowRatedConfig
from fedrec.privacy import mechanisms
from fedrec.privacy.accounting.events import Event, NonPrivate
from fedrec.privacy.accounting.sampling import Adjacency, Contributions
from fedrec.privacy.clipping import Clip
from fedrec.privacy.plan import Plan, PrivacyConfig
from fedrec.rng import NoiseSource, source_of
from fedrec.sums.products import packed, unpacked

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
        sampler, settings = self.sampler(users)
        mix = tuple((kind.factor, kind.releases) for kind in kinds)
        total = sum(kind.releases for kind in kinds)
        return {
            kind.name: Plan.of(
                self.config.privacy(kind.clip_norm),
                sampler,
                settings,
                users,
                total,
                factor=kind.factor,
                mix=mix,
                contributions=kind.contributions,
            )
            for kind in kinds
        }

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


def binary_rows(
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


def clipped_row_sum(rows: Sparse, clip: Clip) -> np.ndarray:
    """Sum of users' rows, each clipped, `float64 [items]`; rows are `[users, items]`, >= 0."""
    norms = np.sqrt(_squared_norms(rows)) if clip.order == 2 else np.asarray(rows.sum(1)).ravel()
    return rows.T @ clip.factors(norms)


def clipped_gram(rows: Sparse, clip: Clip) -> np.ndarray:
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


class ChosenItemsConfig(PrivateConfig):
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
class ChosenItems:
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
        cls, rows: Sparse, releases: NoisyReleases, config: ChosenItemsConfig
    ) -> ChosenItems:
        """Release the counts and choose the items.

        Args:
            rows: counts of each user, sparse `float64 [users, items]`, >= 0.
            releases: releases of this fit.
            config: number of chosen items, and their weights.
        """
        plan = releases.plans[COUNTS]
        counts = releases.release(COUNTS, clipped_row_sum(rows, plan.clip))
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


class CountsAndGramConfig(ChosenItemsConfig, LowRatedConfig):
    """Settings of two releases: the counts and the Gram matrix of the chosen items."""

    clip_norm: float = Field(default=8.0, ge=1e-9)
    """c, bound on the Frobenius norm of a user's matrix, about the number of selected items that it
    likes."""


class CountsAndGramBaseline(PrivateBaseline):
    """Private baseline from noisy counts and the Gram matrix of the most frequent items.

    Attributes:
        chosen: the items, after fitting.
    """

    config: CountsAndGramConfig
    chosen: ChosenItems

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
        self.chosen = ChosenItems.released(rows, releases, self.config)
        plan = releases.plans[GRAM]
        total = clipped_gram(rows[:, self.chosen.items] * self.chosen.weights, plan.clip)
        gram = releases.symmetric(GRAM, torch.from_numpy(total).to(self.device))
        return gram, plan.noise_scale
