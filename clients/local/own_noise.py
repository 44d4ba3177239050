# SPDX-License-Identifier: Apache-2.0
"""One noisy gradient of a user, for any model: clip, mean, noise of the user's own (Fang et al.
2022, algorithm 3).

A step of this kind says what a user's gradients are; here is everything that stands between them
and the server. What `mode` is worth says `clients.steps.dpvae`, and what uploads cost
`fedrec.privacy.personal.noise`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from clients.step import Step, StepConfig
from fedrec.privacy.mechanisms import Secure
from fedrec.privacy.optimal_clip import optimal_clip
from fedrec.privacy.personal.budgets import PersonalBudget
from fedrec.privacy.personal.noise import PersonalNoise

# the shared parameter that holds the logarithm of a clip norm found under noise
BOUND = "clip.log-norm"
ROUNDING = 1 - 1e-6  # so that a clipped gradient's norm in float32 is not above the bound


class OwnNoiseConfig(StepConfig, PersonalNoise):
    """Settings of every step whose upload is one gradient under the user's own noise."""

    examples: int = Field(default=10, ge=1)
    """J, examples that a user draws in a round, without replacement."""
    clip: Literal["examples", "user"] = "examples"
    """What is clipped to S: each example's gradient (paper), or the mean of them."""
    weighting: Literal["uniform", "precision"] = "uniform"
    """Whether all uploads count the same (paper), or by the precision of their noise, which is
    public."""
    learning_rate: float = Field(default=0.005, gt=0)
    """Step size eta of what is uploaded (paper: 0.005)."""

    @model_validator(mode="after")
    def _paper_clips_examples(self) -> Self:
        if self.mode == "paper" and self.clip == "user":
            raise ValueError(
                "clip = 'examples' with mode = 'paper', whose algorithm 2 compares examples"
            )
        return self


class OwnNoiseStep(Step):
    """A step that uploads one noisy gradient."""

    Config = OwnNoiseConfig
    config: OwnNoiseConfig

    @property
    def uploads(self) -> int | None:
        """In how many rounds a client may take part at most; its device refuses more. None: in any
        number."""
        return self.config.participations if self.config.epochs else None

    def added_parameters(
        self, model: Mapping[str, Tensor], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """The logarithm of the clip norm where it follows a quantile, else nothing; trained beside
        the parameters of the `model`."""
        return (
            {}
            if self.config.quantile is None
            else {BOUND: torch.tensor([math.log(self.config.clip_norm)])}
        )

    def budget(self, client: int) -> PersonalBudget:
        """What a user asked for."""
        return self.config.budget(client)

    def noise_multiplier(self, client: int) -> float:
        """Standard deviation / S of noise that alone costs what a whole upload may cost."""
        return self.config.noise_multiplier(client)

    def shared_bound(self, parameters: Mapping[str, Tensor]) -> float:
        """The clip norm that all share: given, or as the quantile has led it."""
        return (
            self.config.clip_norm if BOUND not in parameters else math.exp(float(parameters[BOUND]))
        )

    def bound(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Tensor,
        client: int,
        counts: Tensor | None = None,
        coordinates: int | None = None,
    ) -> float:
        """The clip norm of one client's gradients `[J, m]`: the shared one, or algorithm 2's with
        mode `paper`.

        `counts` and `coordinates` as in `fedrec.privacy.optimal_clip.clip_error`.
        """
        if self.config.mode == "sound" or not len(gradients):
            return self.shared_bound(parameters)
        return optimal_clip(gradients, self.config.gradient_multiplier(client), counts, coordinates)

    def uploaded(
        self, mean: Tensor, bound: float, norms: Tensor, client: int, random: np.random.Generator
    ) -> dict[str | None, np.ndarray]:
        """What leaves the device, `float32`: the network's change `[l]`, and under `BOUND` that of
        the bound.

        Args:
            mean: `[l]`, mean of the clipped gradients.
            bound: what they were clipped to.
            norms: `[J]`, their norms before.
            client: whose they are.
            random: source of the noise, where that is reproducible.
        """
        config = self.config
        normal = _secure if config.noise == "secure" else random.standard_normal
        weight = config.weight(client) if config.weighting == "precision" else 1.0
        noisy = normal(
            len(mean)
        )  # in place from here on: this is most of the time that an upload takes
        noisy *= config.gradient_multiplier(client) * bound
        noisy += mean.cpu().numpy()
        noisy *= -config.learning_rate * weight
        found: dict[str | None, np.ndarray] = {None: noisy.astype(np.float32)}
        if config.quantile is not None:
            within = float((norms <= bound).double().mean()) if len(norms) else 1.0
            released = within + config.share_std(client) * normal(1)
            found[BOUND] = (
                -config.quantile.rate * weight * (released - config.quantile.quantile)
            ).astype(np.float32)
        return found

    def shaped(
        self, uploaded: Mapping[str | None, np.ndarray], network: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """An upload as changes of the network's parameters, and of the bound."""
        parts = (
            torch.from_numpy(uploaded[None])
            .to(self.device)
            .split([value.numel() for value in network.values()])
        )
        changes = {
            n: part.view(v.shape) for (n, v), part in zip(network.items(), parts, strict=True)
        }
        return changes | {
            n: torch.from_numpy(v).to(self.device) for n, v in uploaded.items() if n is not None
        }


def clipped_mean(gradients: Tensor, bound: float) -> Tensor:
    """Mean `[l]` of gradients `[J, l]`, each scaled to at most that norm (lines 12 and 14); zero
    where there is none.

    A gradient that is not a number counts as zero.
    """
    if not len(gradients):
        return gradients.new_zeros(gradients.shape[1])
    norms = gradients.double().norm(dim=1)
    known = torch.where(norms.isfinite()[:, None], gradients, 0.0)
    factors = torch.where(norms > bound, bound * ROUNDING / norms, 1.0)
    return (known * torch.where(norms.isfinite(), factors, 0.0).float()[:, None]).mean(0)


def _secure(size: int) -> np.ndarray:
    return Secure().gaussian(size, "own-noise")
