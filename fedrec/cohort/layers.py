# SPDX-License-Identifier: Apache-2.0
"""Layers with a leading cohort dimension: one table or weight per client, one operation for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Activation = Literal["relu", "sigmoid", "tanh"]
_RELU_BACKWARD = torch.ops.aten.threshold_backward.default
_SIGMOID_BACKWARD, _TANH_BACKWARD = torch.ops.aten.sigmoid_backward.default, torch.ops.aten.tanh_backward.default
_ACTIVATIONS = {"relu": torch.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh}


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """Rows of one table per client: `[C, R, d]` and `int64 [C, ...]` give `[C, ..., d]`.

    A table with the attribute `gathered` holds the wanted rows already, in their order, and is given back.
    """
    if getattr(table, "gathered", False):
        return table
    cohort, rows, width = table.shape
    if cohort == 1 or table.stride(0) == 0:  # one table for all: expanding it must not copy it per client
        return F.embedding(index, table[0])
    shift = torch.arange(cohort, device=index.device).view(-1, *[1] * (index.dim() - 1)) * rows
    return F.embedding(index + shift, table.reshape(cohort * rows, width))


def first_rows(gathered: Tensor, count: int) -> Tensor:
    """The first `count` of rows that hold the wanted ones already, `[C, N, d]`, marked as such; see `gather_rows`."""
    rows = gathered[:, :count]
    rows.gathered = True  # type: ignore[attr-defined]
    return rows


def pooled_rows(table: Tensor, index: Tensor) -> Tensor:
    """Mean of the rows named by the last dimension of `index`, -1 skipped: `[C, R, d]`, `[C, ..., w]` -> `[C, ..., d]`.

    An index that names nothing gives zeros. For tables of few rows `mixed_rows([row_shares(index, R)], [table])` gives
    the same faster.
    """
    present = (index >= 0).unsqueeze(-1)
    rows = gather_rows(table, index.clamp(min=0)) * present
    return rows.sum(-2) / present.sum(-2).clamp(min=1)


def row_shares(index: Tensor, rows: int) -> Tensor:
    """How much each row of a table counts in the mean of the rows that an index names, -1 skipped.

    Args:
        index: `int64 [..., w]`.
        rows: number of rows of the table, R.

    Returns:
        `float32 [..., R]`, sums to 1 or, for an index that names nothing, to 0.
    """
    every = torch.arange(rows, device=index.device)
    shares = (index[..., :1] == every).float()
    if index.shape[-1] > 1:
        for place in range(1, index.shape[-1]):
            shares += index[..., place : place + 1] == every
        shares /= (index >= 0).sum(-1, keepdim=True).clamp(min=1)
    return shares


def mixed_rows(shares: Sequence[Tensor], tables: Sequence[Tensor]) -> Tensor:
    """Weighted sums of the rows of tables, joined: each `[C, B, R]` and `[C, R, d]` give `[C, B, sum of d]`.

    Raises:
        ValueError: during local training, a table is used a second time (see `FusedDescent`).
    """
    fused = _claimed(tables)
    if fused is None:
        return torch.cat([torch.bmm(s.to(t.dtype), t) for s, t in zip(shares, tables, strict=True)], -1)
    rates = [descent.learning_rate for descent in fused]
    return _MixedRows.apply(fused[0].anchor, rates, list(shares), list(tables))  # type: ignore[return-value]


def perceptron(
    parts: Sequence[Sequence[Tensor]], weights: Sequence[Tensor], biases: Sequence[Tensor], activation: Activation
) -> Tensor:
    """A multi-layer perceptron per client; the activation stands between layers, not behind the last.

    Args:
        parts: groups of inputs `[C, B, i]` whose join, in order, is the input of the first layer. A group may have
            B = 1, such as what belongs to the user: its product is then taken once and added to all others.
        weights: `[C, in, out]` of each layer.
        biases: `[C, out]` of each layer.
        activation: between the layers.

    Returns:
        `[C, B, out]` of the last layer.

    Raises:
        ValueError: during local training, a weight is used a second time (see `FusedDescent`).
    """
    fused = _claimed([*weights, *biases])
    if fused is not None:
        flat = [part for group in parts for part in group]
        sizes = [len(group) for group in parts]
        rates = [descent.learning_rate for descent in fused]
        settings = (rates, activation, sizes, list(weights), list(biases))
        return _Perceptron.apply(fused[0].anchor, settings, *flat)  # type: ignore[return-value]
    hidden = _first_product([_joined(group) for group in parts], weights[0], biases[0])
    for weight, bias in zip(weights[1:], biases[1:], strict=True):
        hidden = torch.baddbmm(bias.unsqueeze(1), _ACTIVATIONS[activation](hidden), weight)
    return hidden


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over the last dimension of the cross-entropy of logits, `[C, B] -> [C]`."""
    return _WeightedCrossEntropy.apply(logits, labels, weights)  # type: ignore[return-value]


class FusedDescent:
    """Marks a parameter (as its attribute `descent`) that a layer may update in place in its backward pass.

    Plain SGD adds `-learning_rate * inputs^T @ gradient` to a weight. Done at once, the gradient of the weight, the
    largest tensor of a step, is never made. A parameter may then be used only once in a forward pass.

    Args:
        learning_rate: step size.
        anchor: a tensor that requires a gradient, so that autograd visits layers whose other inputs do not.
    """

    def __init__(self, learning_rate: float, anchor: Tensor) -> None:
        self.learning_rate, self.anchor = learning_rate, anchor
        self.claimed = False


def _claimed(parameters: Sequence[Tensor]) -> list[FusedDescent] | None:
    """Note that a layer uses these parameters and will update them; None unless all are to be updated there.

    Raises:
        ValueError: one is used already; the first use's update would change what the second computes with.
    """
    descents: list[FusedDescent] = [parameter.descent for parameter in parameters if hasattr(parameter, "descent")]  # type: ignore[attr-defined]
    if not descents or len(descents) < len(parameters):
        return None
    for descent in descents:
        if descent.claimed:
            raise ValueError("Expected each parameter in one layer of a forward pass, got one in two of them.")
        descent.claimed = True
    return descents


def _joined(group: Sequence[Tensor]) -> Tensor:
    return group[0] if len(group) == 1 else torch.cat(list(group), -1)


def _first_product(groups: Sequence[Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    hidden, start = bias.unsqueeze(1), 0
    for group in sorted(range(len(groups)), key=lambda place: groups[place].shape[1]):
        start = sum(other.shape[2] for other in groups[:group])
        hidden = torch.baddbmm(hidden, groups[group], weight[:, start : start + groups[group].shape[2]])
    return hidden


class _MixedRows(torch.autograd.Function):
    """`mixed_rows`, whose backward pass takes the SGD step of the tables."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rates: list[float], shares: list[Tensor], tables: list[Tensor]) -> Tensor:
        ctx.rates, ctx.shares, ctx.tables = rates, shares, tables
        return _joined([torch.bmm(share, table) for share, table in zip(shares, tables, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:  # type: ignore[override]
        start = 0
        for rate, share, table in zip(ctx.rates, ctx.shares, ctx.tables, strict=True):
            own = gradient.narrow(-1, start, table.shape[2])
            table.baddbmm_(share.transpose(1, 2), own, alpha=-rate)
            start += table.shape[2]
        return None, None, None, None


class _Perceptron(torch.autograd.Function):
    """`perceptron`, whose backward pass takes the SGD steps of all layers."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, settings: tuple[Any, ...], *parts: Tensor) -> Tensor:
        ctx.settings, ctx.widths = settings, [part.shape[2] for part in parts]
        _, activation, sizes, weights, biases = settings
        activate = getattr(torch, f"{activation}_")
        places = iter(parts)
        ctx.groups = [_joined([next(places) for _ in range(size)]) for size in sizes]
        hidden = _first_product(ctx.groups, weights[0], biases[0])
        ctx.hidden = []
        for weight, bias in zip(weights[1:], biases[1:], strict=True):
            ctx.hidden.append(activate(hidden))
            hidden = torch.baddbmm(bias.unsqueeze(1), hidden, weight)
        return hidden

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rates, activation, _, weights, biases = ctx.settings
        rate, bias_rate = rates[: len(weights)], rates[len(weights) :]
        for layer in range(len(weights) - 1, 0, -1):
            hidden = ctx.hidden[layer - 1]
            before = _through(activation, torch.bmm(gradient, weights[layer].transpose(1, 2)), hidden)
            weights[layer].baddbmm_(hidden.transpose(1, 2), gradient, alpha=-rate[layer])
            biases[layer].sub_(gradient.sum(1), alpha=bias_rate[layer])
            gradient = before
        summed = gradient.sum(1, keepdim=True)
        biases[0].sub_(summed.squeeze(1), alpha=bias_rate[0])
        to_parts, start = [], 0
        for group in ctx.groups:
            own = summed if group.shape[1] == 1 else gradient
            weight = weights[0].narrow(1, start, group.shape[2])
            to_parts.append(torch.bmm(own, weight.transpose(1, 2)))
            weight.baddbmm_(group.transpose(1, 2), own, alpha=-rate[0])
            start += group.shape[2]
        return None, None, *_split(to_parts, ctx.settings[2], ctx.widths)


class _WeightedCrossEntropy(torch.autograd.Function):
    """The gradient is (sigmoid(logit) - label) times the weight: one operation where autograd would make six."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(torch.sigmoid(logits).sub_(labels).mul_(weights))
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mul_(weights).sum(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (to_logits,) = ctx.saved_tensors
        return to_logits * gradient.unsqueeze(-1), None, None


def _split(groups: Sequence[Tensor], sizes: Sequence[int], widths: Sequence[int]) -> list[Tensor]:
    """The gradient of each part from the gradients of the joined groups."""
    places, found = iter(widths), []
    for group, size in zip(groups, sizes, strict=True):
        own = [next(places) for _ in range(size)]
        found += [group] if size == 1 else list(group.split(own, -1))
    return found


def _through(activation: Activation, gradient: Tensor, outputs: Tensor) -> Tensor:
    """Gradient before an activation from the gradient behind it and its outputs."""
    if activation == "relu":
        return _RELU_BACKWARD(gradient, outputs, 0)
    return (_SIGMOID_BACKWARD if activation == "sigmoid" else _TANH_BACKWARD)(gradient, outputs)
