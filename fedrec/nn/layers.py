# SPDX-License-Identifier: Apache-2.0
"""Layers with a leading cohort dimension, their initial weights, declared models, and functions
with custom gradients."""

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedrec.data.interactions import Vectors
from fedrec.device import takes_compiled

# Declaration of a model for training in native code: a multilayer perceptron on embeddings, or a
# factorization.
#
# The prediction for item i of a user is
#
#     y = b_i + sum of offsets + MLP([r_1, ..., m_1, ..., m_U, q_i, n_1, ..., n_F]) + h . (p * s_i)
#
# where the r are rows of the user's own, m_u is the mean of the rows of a table that the user's
# u-th feature names, q_i the item's row in the item table, n_f the mean of the rows of a table that
# the item's f-th feature names, and b_i the item's bias. The last layer of the MLP has one output.
# With one layer, no features and the user's factors as its weight, y is a matrix factorization. The
# last term (NeuMF) is the product of another row of the user's own and another row of the item.

Activation = Literal["identity", "relu", "sigmoid", "tanh"]
Loss = Literal["logistic", "squared"]


@dataclass(frozen=True)
class Layer:
    """An affine layer.

    Attributes:
        weight: name of the parameter `[in, out]`, or `[in]` for one output.
        bias: name of the parameter `[out]`; None without one.
    """

    weight: str
    bias: str | None = None


@dataclass(frozen=True, eq=False)
class ItemFeature:
    """A public item feature, represented by an embedding.

    Attributes:
        table: name of the parameter `[categories, d]`.
        codes: `int64 [items, width]`, the categories of each item, -1 for none.
    """

    table: str
    codes: np.ndarray

    @cached_property
    def categories(self) -> int:
        """Smallest number of categories for all codes; cached, because it needs a pass over all
        items."""
        return int(self.codes.max(initial=-1)) + 1


@dataclass(frozen=True)
class Product:
    """Elementwise product of a user's and an item's row, an additional input of the last layer.

    Attributes:
        user: name of the parameter `[k]`.
        item_table: name of the parameter `[items, k]`. The first k rows of the last layer's weight
            `[k + in, 1]` meet the product.
    """

    user: str
    item_table: str


@dataclass(frozen=True, eq=False)
class KernelModel:
    """Declaration of a model that native code can train. All names are of parameters.

    Attributes:
        layers: the affine layers of the MLP, in order; the last has one output.
        activation: between layers, not after the last.
        loss: `logistic` (cross-entropy of the logit y) or `squared` (of the rating y), averaged
            over a batch.
        user_tables: one table `[categories, d]` per feature of the users, in the order of the
            features; empty: they are not used.
        item_table: the item table `[items, d]`; None: items are represented by their features only.
        item_features: features of the items.
        item_bias: the table `[items, 1]` of biases; None without one.
        offsets: parameters of one number that are added to every prediction.
        user_rows: parameters `[d]`, each a row of the user's own.
        product: a product of two more rows; None without one.
    """

    layers: tuple[Layer, ...]
    activation: Activation
    loss: Loss
    user_tables: tuple[str, ...] = ()
    item_table: str | None = None
    item_features: tuple[ItemFeature, ...] = ()
    item_bias: str | None = None
    offsets: tuple[str, ...] = ()
    user_rows: tuple[str, ...] = ()
    product: Product | None = None

    @property
    def product_table(self) -> str | None:
        """Name of the item table of the product; None without one."""
        return self.product.item_table if self.product is not None else None

    @property
    def item_tables(self) -> tuple[str, ...]:
        """Names of the parameters with one row per item."""
        tables = (self.item_table, self.item_bias, self.product_table)
        return tuple(name for name in tables if name is not None)

    @property
    def dense(self) -> tuple[str, ...]:
        """Names of all other parameters, in the order of their memory layout."""
        layers = [
            name for layer in self.layers for name in (layer.weight, layer.bias) if name is not None
        ]
        return (
            *((self.product.user,) if self.product is not None else ()),
            *self.user_rows,
            *self.user_tables,
            *(feature.table for feature in self.item_features),
            *layers,
            *self.offsets,
        )

    @cached_property
    def item_codes(self) -> tuple[np.ndarray, np.ndarray]:
        """Concatenated codes of all features, padding last within each feature, and the reciprocal
        of the number of codes.

        Returns:
            `int64 [items, width]`, -1 for none, and `float32 [items, F]`.
        """
        codes = [-np.sort(-feature.codes, axis=1) for feature in self.item_features]
        if not codes:
            return np.zeros((0, 0), dtype=np.int64), np.zeros((0, 0), dtype=np.float32)
        counts = np.stack([(feature_codes >= 0).sum(1) for feature_codes in codes], axis=1)
        return np.ascontiguousarray(np.concatenate(codes, axis=1)), (
            1 / np.maximum(counts, 1)
        ).astype(np.float32)


# Layers with a leading cohort dimension: one table or weight per client, one operation for all of
# them.

_FEW_ROWS = 64
_ACTIVATIONS = {
    "identity": lambda values: values,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """Gather rows of one table per client: `[C, R, d]` and `int64 [C, ...]` give `[C, ..., d]`;
    with the result of `all_rows` for several clients the tables themselves."""
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
    """Indices of all rows of tables `[C, R, d]`, `int64 [C, R]`: a cached tensor that must not be
    changed, so that `gather_rows` recognises it and copies nothing."""
    return torch.arange(rows, device=device).expand(clients, rows)


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
        for column in range(1, index.shape[-1]):
            shares += index[..., column : column + 1] == every
        shares /= (index >= 0).sum(-1, keepdim=True).clamp(min=1)
    return shares


def shares_or_codes(codes: Tensor, rows: int) -> Tensor:
    """Rows of a table that a mean is of: as shares `float32 [..., R]` if the table has few rows, so
    that a product with all of them is cheaper than gathering some, or as the codes
    `int64 [..., w]` themselves."""
    return row_shares(codes, rows) if rows <= _FEW_ROWS else codes


def mean_rows(table: Tensor, index: Tensor) -> Tensor:
    """Means of rows of tables `[C, R, d]`, `[C, B, d]`; `index` is a result of `shares_or_codes`.
    Codes of -1 are skipped; without codes the mean is zero."""
    if index.is_floating_point():
        return torch.bmm(index.to(table.dtype), table)
    present = (index >= 0).unsqueeze(-1)
    rows = gather_rows(table, index.clamp(min=0)) * present
    return rows.sum(-2) / present.sum(-2).clamp(min=1)


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
    """Products `[C, B]` of inputs `[C, B, i]` with one column per client, `[C, i, 1]`: computed as
    row times columns, three times as fast with its gradient."""
    return torch.bmm(weight.mT, inputs.mT)[:, 0]


def affine(parameters: Mapping[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    """Apply the affine layer with `NAME.weight` `[C, in, out]` and `NAME.bias` `[C, out]`: `[C,
    ..., in] -> [C, ..., out]`."""
    bias = parameters[f"{name}.bias"].unsqueeze(1)
    outputs = torch.baddbmm(bias, inputs.flatten(1, -2), parameters[f"{name}.weight"])
    return outputs.unflatten(1, inputs.shape[1:-1])


def normalised(parameters: Mapping[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    """Layer normalisation of inputs `[C, ..., d]` with `NAME.weight` `[C, d]` and `NAME.bias` `[C,
    d]` (Ba, Kiros and Hinton 2016)."""
    weight = parameters[f"{name}.weight"]
    bias = parameters[f"{name}.bias"]
    if len(inputs) == 1:
        return F.layer_norm(inputs, weight.shape[1:], weight[0], bias[0])
    unit = F.layer_norm(inputs, weight.shape[1:])
    shape = (len(inputs), *[1] * (inputs.dim() - 2), -1)
    return torch.addcmul(bias.view(shape), unit, weight.view(shape))


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over the last dimension of the cross-entropy of logits, `[..., B] -> [...]`."""
    logits = logits.to(torch.promote_types(logits.dtype, labels.dtype))  # bfloat16 becomes float32
    # Not torch.nn.functional, whose checks take longer than the computation.
    return torch.binary_cross_entropy_with_logits(logits, labels, weights, None, 0).sum(-1)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate parts `[..., i]` to `[..., sum of i]`; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), -1)


def _first_product(groups: Sequence[Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    hidden = bias.unsqueeze(1)
    for group in sorted(range(len(groups)), key=lambda number: groups[number].shape[1]):
        start = sum(other.shape[2] for other in groups[:group])
        hidden = torch.baddbmm(
            hidden, groups[group], weight[:, start : start + groups[group].shape[2]]
        )
    return hidden


# Public dense vectors of items, such as embeddings of texts or images, in a model.


class ItemVectors:
    """Linear projection of item vectors to the width of embeddings.

    Args:
        vectors: the vectors; they are standardised.

    Attributes:
        name: name of the projection matrix `[width, d]` among the parameters.
        width: width of the vectors.
    """

    def __init__(self, vectors: Vectors) -> None:
        self.name = f"item.{vectors.name}"
        self.width = vectors.values.shape[1]
        self._values = torch.from_numpy(vectors.standardised())

    def rows(self, parameters: Mapping[str, Tensor], items: Tensor) -> Tensor:
        """Projections of items `int64 [C, N]` by each slice's matrix, `[C, N, d]`."""
        if self._values.device != items.device:
            self._values = self._values.to(items.device)
        return self._values[items] @ parameters[self.name]


def uniform(rows: int, columns: int, bound: float, generator: torch.Generator) -> Tensor:
    """Weights `[rows, columns]`, uniform in [-bound, bound)."""
    return (2 * torch.rand(rows, columns, generator=generator) - 1) * bound


def glorot(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Glorot-uniform weights `[rows, columns]`."""
    return uniform(rows, columns, math.sqrt(6 / (rows + columns)), generator)


def kaiming(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Kaiming-uniform weights `[rows, columns]`, for ReLU (He et al. 2015)."""
    return uniform(rows, columns, math.sqrt(6 / rows), generator)


# PyTorch's optimisers without its compiler.
#
# `torch.optim` tells the compiler to leave some of its methods alone, and imports `torch._dynamo`
# for that with the first optimiser of a process, which takes longer than `import torch` itself.
# Nothing is compiled here; the arithmetic is PyTorch's.

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


def _uncompiled(optimiser: type[Kind]) -> type[Kind]:
    """Return a subclass of an optimiser with its methods unwrapped."""
    methods = {
        "add_param_group": inspect.unwrap(optimiser.add_param_group),
        "zero_grad": inspect.unwrap(optimiser.zero_grad),
        "step": torch.no_grad()(inspect.unwrap(optimiser.step)),
    }
    return cast(type[Kind], type(optimiser.__name__, (optimiser,), methods))


Adam = _uncompiled(torch.optim.Adam)
AdamW = _uncompiled(torch.optim.AdamW)


# The states of gated recurrent units (Cho et al. 2014, in the form of `torch.nn.GRU`), with a
# leading cohort dimension.
#
#     r, z = s(g + h U + c),  n = tanh(g' + r * (h U' + c')),  h <- (1 - z) n + z h
#
# PyTorch's operations pass over the numbers of all clients at every position, and add up a gradient
# of every client's weight there. If several clients are trained on a processor, compiled code
# processes them sequentially.


def recurrent_states(
    given: Tensor, weight: Tensor, bias: Tensor, present: Tensor | None = None
) -> Tensor:
    """Recurrent states after each position, from an initial state of zeros.

    Args:
        given: `[C, W, B, 3 d]`, contributions of the inputs of W positions of B sequences to reset
            gate, update gate and new state.
        weight: `[C, d, 3 d]`, of the state.
        bias: `[C, 3 d]`, likewise.
        present: `bool [C, W, B]`, false where a sequence has no item, which does not change its
            state; None: all have one.

    Returns:
        `[C, W, B, d]`.
    """
    if takes_compiled(given) and weight.dtype == given.dtype:
        return _States.apply(given, weight, bias, present)
    width = weight.shape[1]
    state = given.new_zeros(len(given), given.shape[2], width)
    states = []
    for step, inputs in enumerate(given.unbind(1)):
        added = torch.baddbmm(bias.unsqueeze(1), state, weight)
        gates = torch.sigmoid(inputs[..., : 2 * width] + added[..., : 2 * width])
        reset, update = gates.chunk(2, -1)
        new = torch.tanh(torch.addcmul(inputs[..., 2 * width :], reset, added[..., 2 * width :]))
        after = torch.lerp(new, state, update)
        state = after if present is None else after.where(present[:, step, :, None], state)
        states.append(state)
    return torch.stack(states, 1)


class _States(torch.autograd.Function):
    """Autograd function of `recurrent_states` in compiled code, see `fedrec.kernel.recurrence`."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, weight: Tensor, bias: Tensor, present: Tensor | None
    ) -> Tensor:
        from fedrec.kernel.recurrence import (
            recurrent_forward,  # imports Numba, which is slow and not always needed
        )

        width = weight.shape[1]
        if weight.stride(0) == bias.stride(0) == 0:  # one for all clients stays in the caches
            weight, bias = (tensor[:1] for tensor in (weight, bias))
        real = given.new_empty(len(given), 0, 0, dtype=torch.bool) if present is None else present
        given, real, weight, bias = (tensor.contiguous() for tensor in (given, real, weight, bias))
        states = given.new_empty(*given.shape[:3], width)
        gates = torch.empty_like(given)
        recalled = torch.empty_like(states)
        passed = states, gates, recalled
        recurrent_forward(*(tensor.numpy() for tensor in (given, real, weight, bias, *passed)))
        ctx.save_for_backward(real, weight, *passed)
        return states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        from fedrec.kernel.recurrence import recurrent_backward

        real, weight, states, gates, recalled = ctx.saved_tensors
        to_given = torch.empty_like(gates)
        to_weight = weight.new_empty(len(states), *weight.shape[1:])
        to_bias = weight.new_empty(len(states), weight.shape[2])
        used = gradients[0].contiguous(), real, weight, states, gates, recalled
        to = to_given.numpy(), to_weight.numpy(), to_bias.numpy()
        recurrent_backward(*(tensor.numpy() for tensor in used), to)
        return to_given, to_weight, to_bias, None


# The cross-entropy of a softmax over a catalogue without the logits of all examples in memory.
#
#     loss = sum over examples n of w_n (log(sum over items j of exp(h_n . e_j)) - h_n . e_t(n))
#
# The gradient is computed right with the logits, of a catalogue for a few examples at a time: the
# logits of 10,000 examples and items take 400 MB, hidden states and embeddings a hundredth.

_LOGITS_AT_ONCE = 1 << 18  # 1 MB; products of larger parts are slower, as logits leave the cache


def catalogue_cross_entropy(
    hidden: Tensor, table: Tensor, targets: Tensor, weights: Tensor
) -> Tensor:
    """Weighted cross-entropy of the targets among all items.

    Args:
        hidden: `[C, N, d]`, the hidden states of N examples of each client.
        table: `[C, items, d]`, the embeddings of the items.
        targets: `int64 [C, N]`.
        weights: `[C, N]`, without gradient.

    Returns:
        `[C]`, in nats.
    """
    return _CatalogueCrossEntropy.apply(hidden, table, targets, weights)


class _CatalogueCrossEntropy(torch.autograd.Function):
    """Autograd function of `catalogue_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, table: Tensor, targets: Tensor, weights: Tensor
    ) -> Tensor:
        total = hidden.new_zeros(len(hidden))
        of_hidden = torch.empty_like(hidden)
        of_table = torch.zeros_like(table)
        size = max(1, _LOGITS_AT_ONCE // (table.shape[0] * table.shape[1]))
        for start in range(0, hidden.shape[1], size):
            part = slice(start, start + size)
            wanted = targets[:, part, None]
            scale = weights[:, part, None]
            logits = torch.bmm(hidden[:, part], table.mT)
            chosen = logits.gather(2, wanted)
            most = logits.amax(2, keepdim=True)
            logits.sub_(most).exp_()
            sums = logits.sum(2, keepdim=True)
            total += (scale * (sums.log() + most - chosen)).sum((1, 2))
            logits.mul_(scale / sums)
            logits.scatter_add_(2, wanted, -scale)
            of_hidden[:, part] = torch.bmm(logits, table)
            of_table.baddbmm_(logits.mT, hidden[:, part])
        ctx.save_for_backward(of_hidden, of_table)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        scale = gradients[0][:, None, None]
        of_hidden, of_table = ctx.saved_tensors
        return of_hidden * scale, of_table * scale, None, None
