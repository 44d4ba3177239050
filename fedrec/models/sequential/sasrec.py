# SPDX-License-Identifier: Apache-2.0
"""Self-attention over the last items of a user (Kang and McAuley, Self-Attentive Sequential
Recommendation, ICDM 2018).

Embeddings of items and of their places, then `blocks` of causal self-attention and of a two-layer
network of width d, each as x + dropout(g(norm(x))) (section 3.3), and a last normalisation.

Where this differs from the paper and its code: keys and values are normalised as queries are, as
the formula of section 3.3 says; its code takes them without. An affine layer follows the attention,
as in Vaswani et al. 2017, and dropout is on the outputs of both parts and on the embeddings, not on
weights of attention. Places are counted from the end of the sequence, which is what the paper's
padding in front of it comes to. The default loss is the softmax over the catalogue, with which
SASRec ranks better (Klenitskiy and Vasilev, RecSys 2023); `loss = "binary"` is as published.
"""

import math
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedrec.device import takes_compiled
from fedrec.models.base import Parameters
from fedrec.models.sequential.base import INIT_STD, SequenceConfig, SequenceModel
from fedrec.nn.layers import affine, attended, gather_rows, normalised
from fedrec.protocol.orders import COMPILED_LOSS


class SasRecConfig(SequenceConfig):
    """Settings of SASRec."""

    blocks: int = Field(default=2, ge=1)
    """Number of blocks of attention and network."""
    heads: int = Field(default=1, ge=1)
    """Heads of attention; they divide `width`."""

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> "SasRecConfig":
        if self.width % self.heads:
            raise ValueError("heads that divide width")
        return self


class SasRec(SequenceModel):
    """Item embeddings, embeddings of places, blocks."""

    name = "sasrec"
    Config = SasRecConfig
    paper = "SASRec (Kang and McAuley 2018)"
    config: SasRecConfig

    @property
    def dropped(self) -> int:
        """On the embeddings, and on both parts of each block."""
        return 1 + 2 * self.config.blocks

    @property
    def compiled(self) -> str | None:
        """That of the sampled softmax."""
        return COMPILED_LOSS if self.config.loss == "sampled-softmax" else None

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Normal embeddings and weights `[in, out]`, zero biases, norms of 1.

        Weights are so small that a first state is nearly the embedding of the last item: with
        Glorot's what blocks add hides it, and training takes longer.
        """
        width = self.config.width
        drawn = self.initial_items(generator)
        drawn["place"] = INIT_STD * torch.randn(self.config.longest, width, generator=generator)
        for block in range(self.config.blocks):
            for name, out in (("attention", 3), ("output", 1), ("inner", 1), ("outer", 1)):
                weight = torch.randn(width, out * width, generator=generator)
                drawn[f"block{block}.{name}.weight"] = INIT_STD * weight
                drawn[f"block{block}.{name}.bias"] = torch.zeros(out * width)
        for norm in self._norms:
            drawn[f"{norm}.weight"] = torch.ones(width)
            drawn[f"{norm}.bias"] = torch.zeros(width)
        return drawn

    def encode(
        self, parameters: Parameters, inputs: Tensor, counts: Tensor, kept: Tensor | None
    ) -> Tensor:
        """Hidden states, `[C, B, W, d]`, see `SequenceModel.encode`."""
        masks = [None] * self.dropped if kept is None else list(kept)
        values = _dropped(inputs + self._places(parameters["place"], counts, inputs), masks[0])
        for block in range(self.config.blocks):
            name = f"block{block}"
            joined = affine(
                parameters, f"{name}.attention", normalised(parameters, f"{name}.norm1", values)
            )
            found = affine(parameters, f"{name}.output", attended(joined, self.config.heads))
            values = values + _dropped(found, masks[1 + 2 * block])
            inner = affine(
                parameters, f"{name}.inner", normalised(parameters, f"{name}.norm2", values)
            )
            found = affine(parameters, f"{name}.outer", torch.relu(inner))
            values = values + _dropped(found, masks[2 + 2 * block])
        return normalised(parameters, "norm", values)

    def drawn_loss(
        self,
        parameters: Parameters,
        embedded: Tensor,
        drawn: int,
        counts: Tensor,
        kept: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """See `SequenceModel.drawn_loss`; of one sequence for each of several clients in compiled
        code: PyTorch's operations pass over the numbers of all of them, which leave the caches."""
        if not (self.compiled and takes_compiled(embedded) and embedded.shape[1] == 1):
            return super().drawn_loss(parameters, embedded, drawn, counts, kept, weights)
        if kept is None:
            places = embedded.shape[2] - drawn - 1
            kept = embedded.new_ones(self.dropped, len(embedded), 1, places, self.config.width)
        scale = math.log((self.schema.num_items - 1) / drawn)
        dense = [parameters[name] for name in self._dense]
        weights = torch.ones(len(embedded)) if weights is None else weights[:, 0]
        given = (
            drawn,
            counts[:, 0],
            weights,
            kept[:, :, 0].transpose(0, 1),
            self.config.heads,
            scale,
        )
        return _SampledLoss.apply(embedded.squeeze(1), *given, parameters["place"], *dense)

    def _places(self, table: Tensor, counts: Tensor, inputs: Tensor) -> Tensor:
        """Embeddings of the places of sequences, counted from their ends, `[C, B, W, d]`."""
        from_end = counts[..., None] - 1 - torch.arange(inputs.shape[2], device=counts.device)
        return gather_rows(table, from_end.clamp(min=0))

    @property
    def _dense(self) -> list[str]:
        """The parameters of blocks and last normalisation, in the order of compiled code."""
        layers = ("norm1", "attention", "output", "norm2", "inner", "outer")
        blocks = range(self.config.blocks)
        names = [f"block{block}.{layer}" for block in blocks for layer in layers] + ["norm"]
        return [f"{name}.{part}" for name in names for part in ("weight", "bias")]

    @property
    def _norms(self) -> list[str]:
        blocks = range(self.config.blocks)
        return [f"block{block}.norm{part}" for block in blocks for part in (1, 2)] + ["norm"]


def _dropped(values: Tensor, kept: Tensor | None) -> Tensor:
    return values if kept is None else values * kept


class _SampledLoss(torch.autograd.Function):
    """The sampled softmax in compiled code, with its gradients, see
    `fedrec.models.sequential._native`."""

    @staticmethod
    def forward(
        ctx: Any,
        embedded: Tensor,
        drawn: int,
        counts: Tensor,
        weights: Tensor,
        kept: Tensor,
        heads: int,
        scale: float,
        *parameters: Tensor,
    ) -> Tensor:
        from fedrec.models.sequential._native import (
            losses_with_gradients,  # imports Numba, which is slow and not always needed
        )

        shared = all(one.stride(0) == 0 for one in parameters)  # stays in the caches
        places, *dense = (one[:1] if shared else one for one in parameters)
        flat = torch.cat([one.flatten(1) for one in dense], 1)
        given = (one.contiguous() for one in (embedded, counts, weights, kept, places, flat))
        rows, ends, shares, masks, table, vectors = (one.numpy() for one in given)
        losses = embedded.new_empty(len(embedded))
        found = [one.new_empty(len(embedded), *one.shape[1:]) for one in (embedded, places, flat)]
        to = (one.numpy() for one in (losses, *found))
        losses_with_gradients(rows, drawn, ends, shares, masks, heads, scale, table, vectors, *to)
        ctx.save_for_backward(*found)
        ctx.shapes = [one.shape[1:] for one in dense]
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        factor = gradients[0]
        found = ctx.saved_tensors
        if bool((factor != 1).any()):  # otherwise a pass over all numbers is saved
            found = [one * factor.view(-1, *[1] * (one.dim() - 1)) for one in found]
        embedded, places, flat = found
        parts = flat.split([shape.numel() for shape in ctx.shapes], 1)
        dense = [one.unflatten(1, shape) for one, shape in zip(parts, ctx.shapes, strict=True)]
        return embedded, None, None, None, None, None, None, places, *dense
