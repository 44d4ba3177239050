# SPDX-License-Identifier: Apache-2.0
"""Private systems trained by DP-SGD on users: draw users, clip each user's gradient, add noise to
the sum, take a step.

In every step some users are drawn, each user's gradient is clipped to norm S over all parameters
together, the sum gets Gaussian noise once, and Adam moves the parameters (Abadi et al. 2016 with
users for examples, as McMahan et al. 2018). Cohorts are of fixed size under replace-one and Poisson
under add-remove, for which amplification is proven. Gradients have signs, so replace-one costs 2 S.

With `clip = "optimal"` S is the clip norm of DP-VAE's algorithm 2 ("DP-O" in its table 11), sought
in every step among the norms of the cohort's gradients. It is computed from private gradients and
can be inferred from the noise, so such a system is charged as not private.
"""

from abc import abstractmethod
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedrec.baselines.base import Histories
from fedrec.baselines.private._clipped_sums import clip_factors
from fedrec.baselines.private._private import PrivateBaseline, PrivateConfig, ReleaseKind
from fedrec.baselines.private.dpsgd._outer import OuterGradients
from fedrec.device import one_thread
from fedrec.nn.optimisers import Adam
from fedrec.privacy.clipping import Clip
from fedrec.privacy.noise_source import NoiseSource, secure_fixed_size, secure_poisson
from fedrec.privacy.optimal_clip import noise_decides, optimal_clip
from fedrec.rng import stream, torch_stream

_KIND = "gradients"
_WHY = "the clip norm of each step is chosen by algorithm 2 from private gradients"


class DpSgdBaselineConfig(PrivateConfig):
    """Settings of systems that are trained by DP-SGD on users."""

    steps: int = Field(default=100, ge=1)
    """Gradient steps, each of which is a release."""
    cohort: int = Field(default=500, ge=1)
    """Users per step (expected number under add-remove); at most all."""
    clip: Literal["constant", "optimal"] = "constant"
    """`constant`: S is `clip-norm`; `optimal`: DP-VAE's algorithm 2, whose epsilon is infinite."""
    clip_norm: float = Field(default=1.0, ge=1e-9)
    """S, bound on the L2 norm of a user's gradient."""
    learning_rate: float = Field(default=0.003, gt=0)
    """Learning rate of Adam."""

    @model_validator(mode="after")
    def _noise_to_choose_by(self) -> Self:
        if self.clip == "optimal" and not self.noise:
            raise ValueError(
                "clip = 'optimal' only with noise = true, because it balances clipping and noise"
            )
        return self


class DpSgdBaseline(PrivateBaseline):
    """Updates parameters by noisy sums of clipped gradients of users; a subclass defines the model.

    Attributes:
        stream: name of its random stream.
    """

    config: DpSgdBaselineConfig
    stream: str

    def parts(self) -> tuple[ReleaseKind, ...]:
        """One sum of gradients per step."""
        unfounded = _WHY if self.config.clip == "optimal" else ""
        return (
            ReleaseKind(
                _KIND, self.config.clip_norm, releases=self.config.steps, unfounded=unfounded
            ),
        )

    def sampler(self, users: int) -> tuple[str, dict[str, float]]:
        """The sampler of a release's users and its settings, for a number of users; all users by
        default."""
        name = "fixed-size" if self.config.adjacency == "replace-one" else "poisson"
        return name, {"cohort": min(self.config.cohort, users)}

    @abstractmethod
    def start(self, histories: Histories, generator: torch.Generator) -> dict[str, Tensor]:
        """Initial parameters, on the device."""

    def kept(
        self, users: np.ndarray, step: int, source: NoiseSource, generator: torch.Generator
    ) -> Tensor | None:
        """`bool [users, items]`: the items that dropout keeps in a step; None without dropout.

        A user's row must be of that user alone and unknown to observers: a row that depended on who
        else is in the cohort would change other users' gradients with one user's data.

        Args:
            users: `int64 [users]`, of the cohort.
            step: the step, from 0.
            source: where noise comes from.
            generator: of the model's random numbers, from the seed; for simulations.
        """
        return None

    @abstractmethod
    def gradients(
        self, parameters: dict[str, Tensor], rows: Tensor, kept: Tensor | None
    ) -> OuterGradients:
        """Gradients of some users' losses.

        Args:
            parameters: as they are before the step.
            rows: binary `float32 [users, items]`.
            kept: as `kept` returns, on the device.
        """

    @one_thread()
    def fit(self, histories: Histories) -> None:
        """Train from fresh parameters, on a processor with one thread."""
        config = self.config
        generator = torch_stream(self.config.own_seed, self.stream)
        releases = self.releases(histories.num_users)
        self._parameters = self.start(histories, generator)
        adam = Adam(self._parameters.values(), lr=config.learning_rate)
        plan = releases.plans[_KIND]
        for step in range(config.steps):
            cohort = self._cohort(histories.num_users, step)
            rows = histories.take(cohort).matrix().to(self.device)
            kept = self.kept(cohort, step, releases.source, generator)
            found = self.gradients(
                self._parameters, rows, None if kept is None else kept.to(self.device)
            )
            bound = config.clip_norm
            if config.clip == "optimal":
                bound = (
                    chosen_clip(found, plan.noise_scale / plan.clip_norm / plan.denominator)
                    or bound
                )
            total = clipped_sum(found, bound)
            flat = torch.cat([total[name].flatten() for name in self._parameters]).cpu().numpy()
            noisy = releases.release(_KIND, flat, clip_norm=bound) / np.float32(plan.denominator)
            parts = torch.from_numpy(noisy).to(self.device)
            pieces = parts.split([value.numel() for value in self._parameters.values()])
            for value, piece in zip(self._parameters.values(), pieces, strict=True):
                value.grad = piece.view_as(value)
            adam.step()
        self._parameters = {name: value.detach() for name, value in self._parameters.items()}

    def _cohort(self, users: int, step: int) -> np.ndarray:
        name, settings = self.sampler(users)
        everybody = np.arange(users)
        cohort = int(settings["cohort"])
        if self.config.mode == "secure":
            return (
                secure_fixed_size(everybody, cohort)
                if name == "fixed-size"
                else secure_poisson(everybody, cohort / users)
            )
        random = stream(self.config.own_seed, f"{self.stream}/cohort", step)
        if name == "fixed-size":
            return np.sort(random.choice(users, cohort, replace=False))
        return np.flatnonzero(random.random(users) < cohort / users)


def clipped_sum(gradients: OuterGradients, bound: float) -> dict[str, Tensor]:
    """Sum of users' gradients, each clipped to a norm over all parameters together, by parameter
    and in its shape."""
    return gradients.weighted_sum(clip_factors(Clip(bound), gradients.norms()))


def chosen_clip(gradients: OuterGradients, noise_multiplier: float) -> float:
    """The clip norm of algorithm 2 for the users' gradients; 0 if all are zero.

    Args:
        gradients: of a cohort. Users with a zero or non-finite gradient are ignored, because a
            bound of 0 would stop training.
        noise_multiplier: standard deviation of the noise in the mean of the cohort, over S.
    """
    norms = gradients.norms()
    kept = torch.isfinite(norms) & (norms > 0)
    if not bool(kept.any()):
        return 0.0
    if noise_decides(noise_multiplier, gradients.coordinates):
        return float(norms[kept].min())
    pairs = {name: (left[kept], right[kept]) for name, (left, right) in gradients.pairs.items()}
    return optimal_clip(OuterGradients(pairs).whole(), noise_multiplier)
