# SPDX-License-Identifier: Apache-2.0
"""Gradients of single examples, kept as the two factors of an outer product instead of whole
matrices.

An affine layer `y = x W + b` that sees an example once has the gradient `x^T g` in W and `g` in b,
where g is the gradient of the example's loss in y. So one backward pass to the outputs of the
layers gives the gradients of all examples of all clients, and norms, clipped means and L1 distances
are computed without materialising them: squared norm `(|x|^2 + 1) |g|^2`, L1 norm `(|x|_1 + 1)
|g|_1` (Goodfellow 2015, Efficient per-example gradient computations). A client's examples share x
here, because the encoder's input is the client's whole history.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class FactoredGradients:
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
        found = {}
        for name, outputs in self.outputs.items():
            each = torch.where(weights[..., None] != 0, weights[..., None] * outputs.double(), 0.0)
            found[name] = torch.where(counts, self.inputs[name], 0.0), each.sum(0).float()
        return found

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
            own = outputs[:examples, client].double()
            inputs = self.inputs[name][client].double()
            both = torch.stack([inputs.square().sum() + 1, inputs.abs().sum() + 1])
            columns.append(own)
            counts.append(both[:, None].expand(2, own.shape[1]))
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
        found = torch.autograd.grad(
            losses, list(self.outputs.values()), each, is_grads_batched=True
        )
        outputs = {name: gradient[:, 0] for name, gradient in zip(self.outputs, found, strict=True)}
        return FactoredGradients(self.inputs, outputs)
