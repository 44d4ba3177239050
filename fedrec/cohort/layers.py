# SPDX-License-Identifier: Apache-2.0
"""Layers with a leading cohort dimension: one table or weight per client, one operation for all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """Rows of one table per client: `[C, R, d]` and `int64 [C, ...]` give `[C, ..., d]`."""
    cohort, rows, width = table.shape
    if cohort == 1 or table.stride(0) == 0:  # one table for all: expanding it must not copy it per client
        return F.embedding(index, table[0])
    shift = torch.arange(cohort, device=index.device).view(-1, *[1] * (index.dim() - 1)) * rows
    return F.embedding(index + shift, table.reshape(cohort * rows, width))


def pooled_rows(table: Tensor, index: Tensor) -> Tensor:
    """Mean of the rows named by the last dimension of `index`, -1 skipped: `[C, R, d]`, `[C, ..., w]` -> `[C, ..., d]`.

    An index that names nothing gives zeros.
    """
    present = (index >= 0).unsqueeze(-1)
    rows = gather_rows(table, index.clamp(min=0)) * present
    return rows.sum(-2) / present.sum(-2).clamp(min=1)


def affine(inputs: Tensor, weight: Tensor, bias: Tensor, rows: slice = slice(None)) -> Tensor:
    """A linear layer per client: `[C, B, i]` times `[C, i, o]` plus `[C, B or 1, o]` gives `[C, B, o]`.

    Args:
        inputs: what goes in.
        weight: the weights; of these only the `rows` are used, so that parts of an input can be put in apart.
        bias: added to the product.
        rows: which rows of the weights belong to `inputs`.
    """
    descent = getattr(weight, "descent", None)
    if descent is None:
        return torch.baddbmm(bias, inputs, weight[:, rows])
    descent.claim(weight, rows)
    return _Descending.apply(inputs, bias, weight, rows, descent.learning_rate)  # type: ignore[return-value]


class FusedDescent:
    """Marks weights (as their attribute `descent`) that `affine` updates in place in its backward pass.

    Plain SGD adds `-learning_rate * inputs^T @ gradient` to a weight. Done at once, the gradient of the weight, the
    largest tensor of a step, is never made. A row of a weight may then be used only once in a forward pass.
    """

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self._used: dict[int, set[int]] = {}

    def claim(self, weight: Tensor, rows: slice) -> None:
        """Note that these rows of a weight are used.

        Raises:
            ValueError: they are already; the first use's update would change what the second computes with.
        """
        wanted = set(range(*rows.indices(weight.shape[1])))
        used = self._used.setdefault(id(weight), set())
        if used & wanted:
            raise ValueError(
                "Expected each row of a weight in one `affine` of a forward pass, got a row in two of them."
            )
        used |= wanted


class _Descending(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, bias: Tensor, weight: Tensor, rows: slice, learning_rate: float) -> Tensor:
        ctx.weight, ctx.learning_rate = weight.detach()[:, rows], learning_rate
        ctx.bias_rows = bias.shape[1]
        ctx.save_for_backward(inputs)
        return torch.baddbmm(bias, inputs, ctx.weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:  # type: ignore[override]
        (inputs,) = ctx.saved_tensors
        to_inputs = torch.bmm(gradient, ctx.weight.transpose(1, 2)) if ctx.needs_input_grad[0] else None
        to_bias = gradient if ctx.bias_rows == gradient.shape[1] else gradient.sum(1, keepdim=True)
        ctx.weight.baddbmm_(inputs.transpose(1, 2), gradient, alpha=-ctx.learning_rate)
        return to_inputs, to_bias if ctx.needs_input_grad[1] else None, None, None, None
