# SPDX-License-Identifier: Apache-2.0
"""Layers with a leading cohort dimension: one table or weight per client, one operation for all of
them."""

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fedrec.nn.declaration import Activation

_ACTIVATIONS = {
    "identity": lambda values: values,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """Rows of one table per client: `[C, R, d]` and `int64 [C, ...]` give `[C, ..., d]`; with the
    result of `all_rows` for several clients the tables themselves."""
    cohort, rows, width = table.shape
    # a shared table must be expanded without copies per client, unless each wants a gradient
    if cohort == 1 or (table.stride(0) == 0 and not (table.is_leaf and table.requires_grad)):
        return F.embedding(index, table[0])
    if index is all_rows(cohort, rows, table.device):
        return table
    shift = torch.arange(cohort, device=index.device).view(-1, *[1] * (index.dim() - 1)) * rows
    return F.embedding(index + shift, table.reshape(cohort * rows, width))


@functools.lru_cache
def all_rows(clients: int, rows: int, device: torch.device) -> Tensor:
    """The places of all rows of tables `[C, R, d]`, `int64 [C, R]`: always the same tensor, by
    which `gather_rows` recognises it and copies nothing. Must not be changed."""
    return torch.arange(rows, device=device).expand(clients, rows)


def pooled_rows(table: Tensor, index: Tensor) -> Tensor:
    """Mean of the rows named by the last dimension of `index`, -1 skipped: `[C, R, d]`,
    `[C, ..., w]` -> `[C, ..., d]`.

    An index without codes gives zeros. For tables with few rows `mixed_rows([row_shares(index, R)],
    [table])` is equivalent and faster.
    """
    present = (index >= 0).unsqueeze(-1)
    rows = gather_rows(table, index.clamp(min=0)) * present
    return rows.sum(-2) / present.sum(-2).clamp(min=1)


def row_shares(index: Tensor, rows: int) -> Tensor:
    """Weight of each row of a table in the mean of the indexed rows, -1 skipped.

    Args:
        index: `int64 [..., w]`.
        rows: number of rows of the table, R.

    Returns:
        `float32 [..., R]`, sums to 1, or to 0 for an index without codes.
    """
    every = torch.arange(rows, device=index.device)
    shares = (index[..., :1] == every).float()
    if index.shape[-1] > 1:
        for place in range(1, index.shape[-1]):
            shares += index[..., place : place + 1] == every
        shares /= (index >= 0).sum(-1, keepdim=True).clamp(min=1)
    return shares


def mixed_rows(shares: Sequence[Tensor], tables: Sequence[Tensor]) -> Tensor:
    """Weighted sums of the rows of tables, joined: each `[C, B, R]` and `[C, R, d]` give
    `[C, B, sum of d]`."""
    return joined([torch.bmm(s.to(t.dtype), t) for s, t in zip(shares, tables, strict=True)])


def perceptron(
    parts: Sequence[Sequence[Tensor]],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: Activation,
) -> Tensor:
    """A multi-layer perceptron per client; the activation is between layers, not after the last.

    Args:
        parts: groups of inputs `[C, B, i]` whose concatenation, in order, is the input of the first
            layer. A group may have B = 1, such as the user's inputs: its product is then computed
            once and added to all examples.
        weights: `[C, in, out]` of each layer.
        biases: `[C, out]` of each layer.
        activation: between the layers.

    Returns:
        `[C, B, out]` of the last layer; `[C, B]` if it has one output.
    """
    hidden = _first_product([joined(group) for group in parts], weights[0], biases[0])
    for weight, bias in zip(weights[1:], biases[1:], strict=True):
        inputs = _ACTIVATIONS[activation](hidden)
        if weight.shape[-1] == 1:
            hidden = (single_output(inputs, weight) + bias).unsqueeze(-1)
        else:
            hidden = torch.baddbmm(bias.unsqueeze(1), inputs, weight)
    return hidden[..., 0] if hidden.shape[-1] == 1 else hidden


def single_output(inputs: Tensor, weight: Tensor) -> Tensor:
    """Products `[C, B]` of inputs `[C, B, i]` with one column per client, `[C, i, 1]`: as a row
    times columns, which takes a third of the time, with its gradient."""
    return torch.bmm(weight.mT, inputs.mT)[:, 0]


def affine(parameters: Mapping[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    """The affine layer with `NAME.weight` `[C, in, out]` and `NAME.bias` `[C, out]`: `[C, ..., in]
    -> [C, ..., out]`."""
    found = torch.baddbmm(
        parameters[f"{name}.bias"].unsqueeze(1),
        inputs.reshape(len(inputs), -1, inputs.shape[-1]),
        parameters[f"{name}.weight"],
    )
    return found.view(*inputs.shape[:-1], -1)


def normalised(parameters: Mapping[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    """Inputs `[C, ..., d]` of mean 0 and variance 1 over the last dimension, times `NAME.weight`
    `[C, d]` plus `NAME.bias` `[C, d]` (Ba, Kiros and Hinton 2016)."""
    weight = parameters[f"{name}.weight"]
    bias = parameters[f"{name}.bias"]
    if len(inputs) == 1:
        return F.layer_norm(inputs, weight.shape[1:], weight[0], bias[0])
    unit = F.layer_norm(inputs, weight.shape[1:])
    shape = (len(inputs), *[1] * (inputs.dim() - 2), -1)
    return torch.addcmul(bias.view(shape), unit, weight.view(shape))


def attended(joined: Tensor, heads: int) -> Tensor:
    """Causal self-attention: each place is the mean of the values up to it, weighted by the softmax
    of its query times their keys over the root of their width.

    Args:
        joined: `[C, B, W, 3 d]`, queries, keys and values of W places.
        heads: number of parts of d that attend on their own.

    Returns:
        `[C, B, W, d]`.
    """
    cohort, sequences, places, _ = joined.shape
    parts = joined.view(cohort * sequences, places, 3, heads, -1).permute(2, 0, 3, 1, 4)
    queries, keys, values = parts
    found = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    return found.transpose(1, 2).reshape(cohort, sequences, places, -1)


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over the last dimension of the cross-entropy of logits, `[..., B] -> [...]`."""
    logits = logits.to(torch.promote_types(logits.dtype, labels.dtype))  # bfloat16 becomes float32
    # Not torch.nn.functional, whose checks take longer than the computation.
    return torch.binary_cross_entropy_with_logits(logits, labels, weights, None, 0).sum(-1)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Parts `[..., i]` concatenated, `[..., sum of i]`; a single part is returned without a
    copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), -1)


def _first_product(groups: Sequence[Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    hidden = bias.unsqueeze(1)
    for group in sorted(range(len(groups)), key=lambda place: groups[place].shape[1]):
        start = sum(other.shape[2] for other in groups[:group])
        hidden = torch.baddbmm(
            hidden, groups[group], weight[:, start : start + groups[group].shape[2]]
        )
    return hidden
