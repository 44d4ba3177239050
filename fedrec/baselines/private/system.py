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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedrec.baselines.base import Baseline
from fedrec.config import Config
from fedrec.privacy.accounting.accountant import Accountant, Report
from fedrec.privacy.accounting.events import DEFAULT_BACKEND, BackendName, Event, NonPrivate
from fedrec.privacy.accounting.sampling import Adjacency, Contributions
from fedrec.privacy.config import PrivacyConfig
from fedrec.privacy.plan import Plan
from fedrec.privacy.statement import caveats
from fedrec.rng import NoiseSource, source_of

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
    backend: BackendName = DEFAULT_BACKEND
    """Accountant."""
    noise: bool = True
    """`false`: clip and add no noise; epsilon is infinite."""
    mode: Literal["reproducible", "secure"] = "reproducible"
    """`reproducible`: noise from the seed, a simulation; `secure`: from the operating system's
    generator."""
    seed: int | None = Field(default=None, ge=0)
    """Seed of the noise; default: the experiment's."""

    def seeded(self, seed: int) -> Self:
        """The same settings; seeds that are not set are derived from the experiment's seed."""
        return self if self.seed is not None else self.model_copy(update={"seed": seed})

    @property
    def own_seed(self) -> int:
        """The seed; settings outside an experiment have 0."""
        return self.seed or 0

    def privacy(self, clip_norm: float) -> PrivacyConfig:
        """The same as an experiment's `[privacy]` table, for one clip norm."""
        target = {"epsilon": self.epsilon} if self.noise else {"noise_multiplier": 0.0}
        shared = {
            "delta": self.delta,
            "adjacency": self.adjacency,
            "backend": self.backend,
            "mode": self.mode,
        }
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
        unfounded: why such releases have no guarantee although they have noise; empty if they have
            one.
    """

    name: str
    clip_norm: float
    share: float = 1.0
    releases: int = 1
    contributions: Contributions = "signed"
    unfounded: str = ""

    @property
    def factor(self) -> float:
        """Noise multiplier of one such release / that of a single release that takes the whole
        budget."""
        return (self.releases / self.share) ** 0.5


class PrivateBaseline(Baseline):
    """A centralised recommender whose releases are clipped, charged and noised."""

    config: PrivateConfig
    charge: Charge | None = None
    """Called with (number, event) of each release before its noise is drawn; numbers count from
    1."""

    @abstractmethod
    def parts(self) -> tuple[ReleaseKind, ...]:
        """Its releases, in order."""

    def sampler(self, users: int) -> tuple[str, dict[str, float]]:
        """The sampler of a release's users and its settings, for a number of users; all users by
        default."""
        return "full", {}

    def plans(self, users: int) -> dict[str, Plan]:
        """Clip, noise and cost of each kind of release for so many training users, by name.

        Raises:
            ExperimentError: no noise reaches the target epsilon.
        """
        parts = self.parts()
        (sampler, settings) = self.sampler(users)
        mix = tuple((part.factor, part.releases) for part in parts)
        total = sum(part.releases for part in parts)
        return {
            part.name: Plan.of(
                self.config.privacy(part.clip_norm),
                sampler,
                settings,
                users,
                total,
                factor=part.factor,
                mix=mix,
                contributions=part.contributions,
            )
            for part in parts
        }

    def spent(self, users: int) -> Report:
        """Total cost of all releases by the accountant; infinite without noise."""
        accountant = Accountant(self.config.backend)
        plans = self.plans(users)
        for part in self.parts():
            accountant.step(_event(plans[part.name], part.name, part.unfounded), part.releases)
        said = dict.fromkeys(sentence for plan in plans.values() for sentence in caveats(plan))
        return accountant.epsilon(self.config.delta, attack=self.config.noise, caveats=said)

    def releases(self, users: int) -> NoisyReleases:
        """The releases of one fit."""
        source = source_of(self.config.mode, self.config.own_seed)
        return NoisyReleases(
            self.plans(users),
            source,
            self.charge,
            {part.name: part.unfounded for part in self.parts()},
        )


class NoisyReleases:
    """The noisy sums of one fit, in order.

    Args:
        plans: of each kind of release, by name.
        source: where noise comes from.
        charge: see `PrivateBaseline.charge`.
        unfounded: by kind, see `ReleaseKind.unfounded`; kinds that are not in it have a guarantee.
    """

    def __init__(
        self,
        plans: Mapping[str, Plan],
        source: NoiseSource,
        charge: Charge | None,
        unfounded: Mapping[str, str] | None = None,
    ) -> None:
        self.plans = plans
        self.source = source
        self._charge = charge
        self._unfounded = unfounded or {}
        self._number = 0

    def release(self, name: str, total: np.ndarray, clip_norm: float | None = None) -> np.ndarray:
        """A sum of clipped contributions under noise, `float32` in the shape of the sum; charged
        first.

        Args:
            name: kind of the release.
            total: the sum, `float [...]` of any shape.
            clip_norm: clip norm of this release, if it differs from that of the kind: the noise is
                proportional to it, and the cost is the same if it was chosen without the users'
                data.
        """
        plan = self.plans[name] if clip_norm is None else self.plans[name].at_clip_norm(clip_norm)
        self._number += 1
        if self._charge is not None:
            self._charge(self._number, _event(plan, name, self._unfounded.get(name, "")))
        noisy = plan.mechanism.add_noise({name: total}, plan.noise_scale, self.source, self._number)
        return noisy[name]

    def tensor(self, name: str, total: Tensor) -> Tensor:
        """The same of a tensor `[...]`, `float64` on its device."""
        noisy = self.release(name, total.cpu().numpy())
        return torch.from_numpy(noisy).to(total.device).double()

    def symmetric(self, name: str, total: Tensor) -> Tensor:
        """The same of symmetric matrices `[..., n, n]`, clipped together in the Frobenius norm.

        Noise is added to n (n + 1) / 2 coordinates whose L2 norm is the Frobenius norm: the
        diagonal, and sqrt(2) times the entries above it. So noise has its full standard deviation
        on the diagonal and 1 / sqrt(2) of it elsewhere.
        """
        rows, columns = torch.triu_indices(total.shape[-1], total.shape[-1], device=total.device)
        length = torch.where(rows == columns, 1.0, 2.0).double().sqrt()
        noisy = self.tensor(name, total[..., rows, columns] * length) / length
        matrices = torch.empty_like(total)
        matrices[..., rows, columns] = matrices[..., columns, rows] = noisy
        return matrices


def _event(plan: Plan, name: str, unfounded: str) -> Event:
    """Cost of one release of a kind."""
    return NonPrivate(unfounded, name) if unfounded else plan.event(name)
