# SPDX-License-Identifier: Apache-2.0
"""Autoencoders over whole histories: variational and denoising.

The multinomial variational autoencoder (Liang et al. 2018; Fang et al. 2022, sections 2.3 and
3.3, equation 19).

A user enters by its known liked items, never by an id. The encoder computes mean and log-variance
of a Gaussian over a code z of K numbers, and the decoder maps z to one logit per item, whose
softmax is the probability that the user's next interaction is with that item. Items are ranked with
z at its mean.

Where this differs from the paper:

- Its layer sizes are not given. One hidden layer on either side,
  `I h + h + 2 (h K + K) + K h + h + h I + I` numbers, gives its three counts exactly: 275,802 (I =
  1,682, h = 80, K = 20), 5,384,804 (26,744, 100, 30) and 3,587,070 (17,770, 100, 50). These are the
  sizes of the catalogues before its pre-processing.
- Activation, dropout and input are not given either: tanh, dropout 0.5 and an input of length 1, as
  in Liang et al.
- Equation 6 ends with log p(z | x) where equation 3 has log p(x | z); equation 3 is meant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedrec.config import Config, Width
from fedrec.errors import ExperimentError
from fedrec.models.base import HistoryModel, Parameters
from fedrec.nn.layers import affine, glorot

Tap = Callable[[str, Tensor, Tensor], Tensor]
"""Function called with name, inputs `[C, B, in]` and outputs `[C, B, out]` of an affine layer;
returns the outputs to use."""


class VaeConfig(Config):
    """Settings of the variational autoencoder."""

    hidden: Width = 80
    """Width h of the hidden layers of encoder and decoder."""
    latent: Width = 20
    """Width K of the code (paper: 20, 30 and 50)."""
    dropout: float = Field(default=0.5, ge=0, lt=1)
    """Share of a user's items hidden from the encoder in training, in [0, 1)."""


@dataclass(frozen=True, eq=False)
class Prior:
    """Gaussian prior of each user's code; standard normal by default.

    Attributes:
        mean: `float32 [C, B, K]` or broadcastable to it (mu_k).
        variance: variances, like `mean`, > 0 (gamma_k^2).
    """

    mean: Tensor
    variance: Tensor


@dataclass(frozen=True, eq=False)
class Draw:
    """Random numbers of one forward pass in training.

    Attributes:
        mask: `bool [C, B, items]`, false for items that dropout removes.
        noise: `float32 [C, B, K]`, standard normal, for the code.
    """

    mask: Tensor
    noise: Tensor

    def to(self, device: torch.device) -> Draw:
        """Move the draw to a device."""
        return Draw(self.mask.to(device), self.noise.to(device))


class Vae(HistoryModel):
    """Variational autoencoder: encoder, code, decoder."""

    name = "vae"
    Config = VaeConfig
    tasks = ("ranking",)
    paper = "DP-VAE (Fang et al. 2022), section 2.3; Mult-VAE (Liang et al. 2018)"
    config: VaeConfig

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Glorot-uniform weights `[in, out]`, zero biases."""
        items = self.schema.num_items
        hidden = self.config.hidden
        latent = self.config.latent
        shapes = {
            "encoder": (items, hidden),
            "mean": (hidden, latent),
            "log-variance": (hidden, latent),
            "decoder": (latent, hidden),
            "output": (hidden, items),
        }
        parameters = {}
        for name, (fan_in, fan_out) in shapes.items():
            parameters[f"{name}.weight"] = glorot(fan_in, fan_out, generator)
            parameters[f"{name}.bias"] = torch.zeros(fan_out)
        return parameters

    def _hidden(
        self,
        parameters: Parameters,
        histories: Tensor,
        mask: Tensor | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Hidden units of the encoder, `[C, B, h]`.

        Args:
            parameters: each `[C, ...]`.
            histories: `float32 [C, B, items]`, preference of each user for each item, >= 0; rows
                are scaled to length 1.
            mask: see `Draw`; None: no dropout.
            tap: called for every affine layer.
        """
        inputs = F.normalize(histories, dim=-1)
        if mask is not None:
            inputs = inputs * mask / (1 - self.config.dropout)
        return torch.tanh(_affine(parameters, "encoder", inputs, tap))

    def decode(self, parameters: Parameters, codes: Tensor, tap: Tap | None = None) -> Tensor:
        """Logits of the items, `[C, B, items]`, for codes `[C, B, K]`."""
        return _affine(
            parameters, "output", torch.tanh(_affine(parameters, "decoder", codes, tap)), tap
        )

    def history_scores(self, parameters: Parameters, histories: Tensor) -> Tensor:
        """Scores of the whole catalogue, `[C, B, items]`: the logits at the mean of the code."""
        codes = _affine(parameters, "mean", self._hidden(parameters, histories))
        return self.decode(parameters, codes)

    def draw(self, shape: tuple[int, int], generator: torch.Generator) -> Draw:
        """Random numbers of a pass for `[C, B]` users, from a generator on the CPU."""
        mask = torch.rand(*shape, self.schema.num_items, generator=generator) >= self.config.dropout
        return Draw(mask, torch.randn(*shape, self.config.latent, generator=generator))

    def training_loss(
        self, parameters: Parameters, histories: Tensor, generator: torch.Generator, beta: float
    ) -> Tensor:
        """Loss of each user, `[C, B]`, see `HistoryModel.training_loss`."""
        draw = self.draw((histories.shape[0], histories.shape[1]), generator)
        return self.negative_elbo(parameters, histories, draw.to(histories.device), beta)

    def negative_elbo(
        self,
        parameters: Parameters,
        histories: Tensor,
        draw: Draw,
        beta: float,
        prior: Prior | None = None,
    ) -> Tensor:
        """Training loss: the negative of equation 19 for each user, `[C, B]`.

        Args:
            parameters: each `[C, ...]`.
            histories: see `_hidden`.
            draw: the random numbers.
            beta: weight of the divergence from the prior, in [0, 1].
            prior: the users' priors; None: N(0, I), which is equation 7.
        """
        log_chances, distance = self.parts(parameters, histories, draw, prior)
        return beta * distance - (log_chances * histories).sum(-1)

    def parts(
        self,
        parameters: Parameters,
        histories: Tensor,
        draw: Draw,
        prior: Prior | None = None,
        tap: Tap | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Terms of the bound: log-probabilities of the items `[C, B, items]`, and divergences `[C,
        B]`."""
        hidden = self._hidden(parameters, histories, draw.mask, tap)
        mean, log_variance = (
            _affine(parameters, name, hidden, tap) for name in ("mean", "log-variance")
        )
        codes = mean + draw.noise * torch.exp(log_variance / 2)
        return torch.log_softmax(self.decode(parameters, codes, tap), -1), divergence(
            mean, log_variance, prior
        )


def divergence(mean: Tensor, log_variance: Tensor, prior: Prior | None = None) -> Tensor:
    """Kullback-Leibler divergence of diagonal Gaussians from their priors, `[..., K] -> [...]`, in
    nats."""
    if prior is None:
        return (log_variance.exp() + mean.square() - 1 - log_variance).sum(-1) / 2
    scaled = (log_variance.exp() + (mean - prior.mean).square()) / prior.variance
    return (scaled - 1 - log_variance + prior.variance.log()).sum(-1) / 2


def _affine(parameters: Parameters, name: str, inputs: Tensor, tap: Tap | None = None) -> Tensor:
    """Apply an affine layer, `[C, B, in] -> [C, B, out]`, passed to `tap` if given."""
    outputs = affine(parameters, name, inputs)
    return outputs if tap is None else tap(name, inputs, outputs)


# A denoising autoencoder over whole histories (Mult-DAE, Liang et al. 2018, section 2.2.2).
#
# The network of `fedrec.models.vae` with the encoder's mean as the code: only dropout is random,
# and there are no variance and no prior. It is trained by the steps of the variational autoencoder;
# `beta` has no effect, and priors of users' codes are rejected.
#
# Where this differs from the paper: Liang et al. have no layer between code and output. Fang et al.
# 2022 (tables 4 and 11) state only that the code of their autoencoder has 20 numbers.


class AeConfig(VaeConfig):
    """Settings of the autoencoder."""


class Ae(Vae):
    """Denoising autoencoder: encoder and decoder."""

    name = "ae"
    Config = AeConfig
    paper = "Mult-DAE (Liang et al. 2018)"
    config: AeConfig

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initialise like the variational autoencoder, without the layer of log-variances."""
        drawn = super().initial(generator)
        return {name: value for name, value in drawn.items() if not name.startswith("log-variance")}

    def parts(
        self,
        parameters: Parameters,
        histories: Tensor,
        draw: Draw,
        prior: Prior | None = None,
        tap: Tap | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Terms of the bound: log-probabilities of the items `[C, B, items]`, and divergences `[C,
        B]`. The divergence is zero here.

        Raises:
            ExperimentError: priors are given, although codes have no distribution.
        """
        if prior is not None:
            raise ExperimentError(
                "the autoencoder does not support step.priors",
                expected="no step.priors, or model.name = 'vae'",
                got="priors and model.name = 'ae'",
                fix="leave out step.priors, or use the variational autoencoder",
            )
        hidden = self._hidden(parameters, histories, draw.mask, tap)
        codes = _affine(parameters, "mean", hidden, tap)
        return torch.log_softmax(self.decode(parameters, codes, tap), -1), codes.new_zeros(
            codes.shape[:-1]
        )
