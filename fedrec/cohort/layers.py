# SPDX-License-Identifier: Apache-2.0
"""Layers with a leading cohort dimension: one table or weight per client, one operation for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fedrec.cohort.fused import (
    Activation,
    Biased,
    WeightedCrossEntropy,
    claimed,
    fused_perceptron,
    fused_rows,
    joined,
)
from fedrec.cohort.tape import Tape

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
    fused = claimed(tables)
    if fused is not None:
        return fused_rows(fused, shares, tables)
    return joined([torch.bmm(s.to(t.dtype), t) for s, t in zip(shares, tables, strict=True)])


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
        `[C, B, out]` of the last layer; `[C, B]` if it has one output.

    Raises:
        ValueError: during local training, a weight is used a second time (see `FusedDescent`).
    """
    fused = claimed([*weights, *biases])
    if fused is not None:
        return fused_perceptron(fused, parts, weights, activation)
    hidden = _first_product([joined(group) for group in parts], weights[0], biases[0])
    for weight, bias in zip(weights[1:], biases[1:], strict=True):
        hidden = torch.baddbmm(bias.unsqueeze(1), _ACTIVATIONS[activation](hidden), weight)
    return hidden.squeeze(-1)


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over the last dimension of the cross-entropy of logits, `[C, B] -> [C]`.

    Where a tape follows (`fedrec.cohort.tape`) its numbers come later, and NaN stands for them.
    """
    tape: Tape | None = getattr(logits, "tape", None)
    if tape is not None:
        return tape.apply(WeightedCrossEntropy, (logits,), logits, labels, weights)
    return WeightedCrossEntropy.apply(logits.float(), labels, weights)  # type: ignore[return-value]


def added_biases(logits: Tensor, biases: Tensor) -> Tensor:
    """Logits `[C, B]` with the gathered biases of their items, `[C, B, 1]`, added."""
    tape: Tape | None = getattr(logits, "tape", None)
    return logits + biases.squeeze(-1) if tape is None else tape.apply(Biased, (logits, biases), logits, biases)


def _first_product(groups: Sequence[Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    hidden, start = bias.unsqueeze(1), 0
    for group in sorted(range(len(groups)), key=lambda place: groups[place].shape[1]):
        start = sum(other.shape[2] for other in groups[:group])
        hidden = torch.baddbmm(hidden, groups[group], weight[:, start : start + groups[group].shape[2]])
    return hidden
