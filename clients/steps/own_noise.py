# SPDX-License-Identifier: Apache-2.0
"""Gradients of users who add their own noise, and gradients of single examples."""

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from clients.step import Step, StepConfig
from fedrec.privacy.optimal_clip import optimal_clip
from fedrec.privacy.personal import PersonalNoise
from fedrec.rng import Secure

# One noisy gradient per user, for any model: clip, mean, and the user's own noise (Fang et al.
# 2022, algorithm 3). A step of this kind computes a user's gradients; this module does everything
# between them and the server. `clients.steps.vae` documents the guarantee of each `mode`, and
# `fedrec.privacy.personal` the privacy cost of uploads.

ROUNDING = 1 - 1e-6  # so that the norm of a clipped gradient in float32 is at most the bound


class OwnNoiseConfig(StepConfig, PersonalNoise):
    """Settings of steps whose upload is one gradient with the user's own noise."""

    examples: int = Field(default=10, ge=1)
    """Number of examples J that a user draws in a round, without replacement."""
    clip: Literal["examples", "user"] = "examples"
    """What is clipped to S: each example's gradient (paper), or their mean."""
    weighting: Literal["uniform", "precision"] = "uniform"
    """Weight of uploads: uniform (paper), or the precision of their noise, which is public."""
    learning_rate: float = Field(default=0.005, gt=0)
    """Learning rate eta of the upload (paper: 0.005)."""

    @model_validator(mode="after")
    def _paper_clips_examples(self) -> Self:
        if self.mode == "paper" and self.clip == "user":
            raise ValueError(
                "clip = 'examples' with mode = 'paper', whose algorithm 2 compares examples"
            )
        return self

    @property
    def uploads(self) -> int | None:
        return self.participations if self.epochs else None

    def upload_weight(self, client: int) -> float:
        """Weight of a client's upload, which is public."""
        return self.weight(client) if self.weighting == "precision" else 1.0


class OwnNoiseStep(Step):
    """A step that uploads one noisy gradient."""

    Config = OwnNoiseConfig
    config: OwnNoiseConfig

    def bound(
        self,
        gradients: Tensor,
        client: int,
        counts: Tensor | None = None,
        coordinates: int | None = None,
    ) -> float:
        """The clip norm of one client's gradients `[J, m]`: the setting, or algorithm 2's with mode
        `paper`.

        `counts` and `coordinates` as in `fedrec.privacy.optimal_clip`.
        """
        if self.config.mode == "sound" or not len(gradients):
            return self.config.clip_norm
        return optimal_clip(gradients, self.config.noise_multiplier(client), counts, coordinates)

    def uploaded(
        self, mean: Tensor, bound: float, client: int, random: np.random.Generator
    ) -> np.ndarray:
        """The upload, the network's change, `float32 [l]`.

        Args:
            mean: `[l]`, mean of the clipped gradients.
            bound: their clip norm.
            client: the client's id.
            random: source of the noise, where that is reproducible.
        """
        normal = self.normal(random)
        noisy = normal(torch.empty(len(mean), dtype=self.noise_dtype))
        noisy *= self.noise_std(client, bound)
        if math.isfinite(float(mean.sum())):  # otherwise only the noise, as without a gradient
            noisy.sub_(mean.cpu(), alpha=self.rate(client))
        return noisy.float().numpy()

    @property
    def noise_dtype(self) -> torch.dtype:
        """The type in which noise is added: float64 unless it comes from the seed."""
        return torch.float64 if self.config.noise == "secure" else torch.float32

    def normal(self, random: np.random.Generator) -> Callable[[Tensor], Tensor]:
        """A function that fills arrays `[l]` on the CPU with independent standard normal numbers
        and returns them: of the generator, or of the operating system's. PyTorch's float32 takes a
        third of the time of numpy's float64, which was half the time of a run."""
        if self.config.noise == "secure":
            return lambda out: out.copy_(torch.from_numpy(Secure().gaussian(len(out), "own-noise")))
        generator = torch.Generator().manual_seed(int(random.integers(2**63)))
        return lambda out: out.normal_(generator=generator)

    def rate(self, client: int) -> float:
        """Factor of a client's gradient in its upload, without its sign."""
        return self.config.learning_rate * self.config.upload_weight(client)

    def noise_std(self, client: int, bound: float) -> float:
        """Standard deviation of the noise in a client's upload."""
        return self.config.noise_multiplier(client) * bound * self.rate(client)

    def shaped(self, uploaded: np.ndarray, network: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """An upload, `float32 [l]`, as changes of the network's parameters."""
        sizes = [value.numel() for value in network.values()]
        parts = torch.from_numpy(uploaded).to(self.device).split(sizes)
        return {n: part.view(v.shape) for (n, v), part in zip(network.items(), parts, strict=True)}


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


# Gradients of single examples, kept as the two factors of an outer product instead of whole
# matrices.
#
# An affine layer `y = x W + b` that sees an example once has the gradient `x^T g` in W and `g` in
# b, where g is the gradient of the example's loss in y. So one backward pass to the outputs of the
# layers gives the gradients of all examples of all clients, and norms, clipped means and L1
# distances are computed without materialising them: squared norm `(|x|^2 + 1) |g|^2`, L1 norm
# `(|x|_1 + 1) |g|_1` (Goodfellow 2015, Efficient per-example gradient computations). A client's
# examples share x here, because the encoder's input is the client's whole history.


class FactoredGradients(NamedTuple):
    """Gradients of up to J examples of each of C clients.

    Attributes:
        inputs: by layer, `float32 [C, in]`, what enters it (x).
        outputs: by layer, `float32 [J, C, out]`, the examples' gradients in what comes out of it
            (g).
    """

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]

    def norms(self) -> Tensor:
        """L2 norm of each example's gradient over all parameters, `float64 [J, C]`."""
        squares = [
            (self.inputs[name].double().square().sum(-1) + 1) * outputs.double().square().sum(-1)
            for name, outputs in self.outputs.items()
        ]
        return torch.stack(squares).sum(0).sqrt()

    def weighted(self, weights: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Each client's gradients times `weights [J, C]`, added up, as factors: by layer x
        `[C, in]` and the weighted sum of g `[C, out]`, `float32`. An example of weight 0 adds
        nothing, even if its gradient is not finite."""
        counts = (weights != 0).any(0)[:, None]
        factors = {}
        for name, outputs in self.outputs.items():
            each = torch.where(weights[..., None] != 0, weights[..., None] * outputs.double(), 0.0)
            factors[name] = torch.where(counts, self.inputs[name], 0.0), each.sum(0).float()
        return factors

    def rows(self, client: int, examples: int) -> tuple[Tensor, Tensor]:
        """One client's first examples with all layers concatenated, and the norms of the layers'
        inputs.

        Returns:
            `float64 [examples, m]`, the gradients g; and `float64 [2, m]`: the weights of the
            squares and of the magnitudes of each column in squared L2 and L1 norms of whole
            gradients.
        """
        columns = []
        counts = []
        for name, outputs in self.outputs.items():
            gradients = outputs[:examples, client].double()
            inputs = self.inputs[name][client].double()
            both = torch.stack([inputs.square().sum() + 1, inputs.abs().sum() + 1])
            columns.append(gradients)
            counts.append(both[:, None].expand(2, gradients.shape[1]))
        return torch.cat(columns, 1), torch.cat(counts, 1)


class Recorder:
    """A hook on the affine layers of a forward pass whose parameters need no gradients; returns the
    examples' gradients as factors."""

    def __init__(self) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}

    def __call__(self, name: str, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Record the inputs of a layer and its outputs with C = 1 and the clients in dimension B,
        see `fedrec.models.vae.Tap`."""
        if not outputs.requires_grad:
            outputs.requires_grad_()
        self.inputs[name] = inputs.detach()[0]
        self.outputs[name] = outputs
        return outputs

    def gradients(self, losses: Tensor) -> FactoredGradients:
        """The gradients of losses `[C, J]`, where those of a client depend on that client only."""
        clients, examples = losses.shape
        each = torch.eye(examples, device=losses.device)[:, None, :].expand(
            examples, clients, examples
        )
        gradients = torch.autograd.grad(
            losses, list(self.outputs.values()), each, is_grads_batched=True
        )
        outputs = {
            name: gradient[:, 0] for name, gradient in zip(self.outputs, gradients, strict=True)
        }
        return FactoredGradients(self.inputs, outputs)
