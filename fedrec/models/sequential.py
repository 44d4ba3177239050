# SPDX-License-Identifier: Apache-2.0
"""Models of sequences: self-attention and a gated recurrent unit."""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedrec.config import Config, Width
from fedrec.data.client_data import draw_negatives
from fedrec.data.interactions import FeatureNames, Schema
from fedrec.models.base import HistoryForm, HistoryModel, Parameters
from fedrec.nn.layers import (
    ItemVectors,
    affine,
    catalogue_cross_entropy,
    gather_rows,
    normalised,
    recurrent_states,
)

# Common parts of models of sequences: item embeddings, hidden states of the positions of a
# sequence, and the loss of the item that comes next.
#
# With x_1 .. x_n the items of a user from the earliest to the latest, the hidden state h_t depends
# on x_1 .. x_t, and the score of item j as x_{t+1} is h_t . e_j, with the same embeddings e at both
# ends. A user has no parameters, and so all of them are shared. If items have dense vectors v (of
# texts or images), e_j is an embedding of j plus v_j P with a matrix P of its own, from which items
# that no training user had are ranked, too.
#
# Losses of a position t, which are averaged over the positions of a batch:
#
# - `softmax`: cross-entropy of x_{t+1} among all items;
# - `sampled-softmax`: among itself and drawn items, one draw for all positions of a sequence, whose
#   sum of exponentials is scaled by (items - 1) / draws to estimate that of all others;
# - `binary` (SASRec, equation 7): -log s(h_t . e_{x_{t+1}}) - the mean of log(1 - s(h_t . e_j))
#   over items j that are drawn for each position.
#
# Items are drawn outside the sequence. Only the last `longest` items of a user count, as published.

ITEMS = "item.id"
"""Name of the item embeddings."""
INIT_STD = 0.02
"""Standard deviation of initial embeddings, which are then scaled by the root of their width."""
_WIDTH_STEP = 32  # sequences are padded to a multiple, so that many are of one width

Dropped = Callable[[Tensor], Tensor]
"""Dropout of states `[C, B, W, d]`, or the identity."""


class SequenceConfig(Config):
    """Settings of all models of sequences."""

    width: Width = 64
    """Width d of embeddings and hidden states."""
    longest: int = Field(default=50, ge=1)
    """Number of a user's last items used."""
    dropout: float = Field(default=0.2, ge=0, lt=1)
    """Dropout rate in training, in [0, 1), rounded to 1/256."""
    loss: Literal["softmax", "sampled-softmax", "binary"] = "softmax"
    """Loss of a position; `softmax` costs examples times catalogue, and in rounds a client sends a
    change of every item's embedding."""
    negatives: int | None = Field(default=None, ge=1)
    """Items drawn for a position with the loss `binary` (default: 1, as published), or for a
    sequence with `sampled-softmax` (default: 256)."""

    def drawn(self, width: int) -> int:
        """Number of items drawn for a sequence of a given number of positions."""
        if self.loss == "softmax":
            return 0
        if self.loss == "binary":
            return width * (self.negatives or 1)
        return self.negatives or 256


class SequenceModel(HistoryModel):
    """Base of sequence models: item embeddings, hidden states and losses."""

    Config = SequenceConfig
    tasks = ("ranking",)
    item_tables = (ITEMS,)
    config: SequenceConfig

    def __init__(self, config: SequenceConfig, schema: Schema) -> None:
        super().__init__(config, schema)
        self.form = HistoryForm(longest=config.longest)
        self.scale = math.sqrt(config.width)  # of the embeddings that enter
        self._vectors = [ItemVectors(vectors) for vectors in schema.item_features.vectors]

    @classmethod
    def features_used(cls, config: SequenceConfig, known: FeatureNames) -> FeatureNames:
        """Side features used: dense vectors of the items."""
        return FeatureNames(item_vectors=known.item_vectors)

    @abstractmethod
    def encode(
        self, parameters: Parameters, inputs: Tensor, counts: Tensor, dropped: Dropped
    ) -> Tensor:
        """Hidden states.

        Args:
            parameters: each `[C, ...]`.
            inputs: `[C, B, W, d]`, embeddings of the items of B sequences of each slice, from the
                earliest to the latest; numbers after the last have no effect on the others.
            counts: `int64 [C, B]`, numbers of items.
            dropped: applied to the embeddings and to outputs of layers, always in this order.

        Returns:
            `[C, B, W, d]`, the state after each position.
        """

    def _initial_items(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initialise normal embeddings and the projection matrices of item vectors."""
        rows = {ITEMS: self.schema.num_items} | {
            vectors.name: vectors.width for vectors in self._vectors
        }
        width = self.config.width
        return {n: torch.randn(r, width, generator=generator) * INIT_STD for n, r in rows.items()}

    def _embeddings(self, parameters: Parameters, items: Tensor | None = None) -> Tensor:
        """Embeddings e `[C, N, d]` of items `int64 [C, N]`, in the order of the parameters' rows;
        None: of the whole catalogue."""
        embedded = parameters[ITEMS]
        if items is None:
            items = torch.arange(embedded.shape[1], device=embedded.device).expand(
                len(embedded), -1
            )
        for vectors in self._vectors:
            embedded = embedded + vectors.rows(parameters, items)
        return embedded

    def history_scores(self, parameters: Parameters, histories: Tensor) -> Tensor:
        """Scores of the whole catalogue as the next item, `[C, B, items]`, from sequences `int64
        [C, B, longest]`; 0 for users without items."""
        counts = (histories >= 0).sum(-1)
        # an exported graph has no sizes that depend on the history
        longest = histories.shape[-1] if torch.compiler.is_compiling() else int(counts.max())
        width = max(1, longest)
        table = self._embeddings(parameters)
        embedded = gather_rows(table, histories[..., :width].clamp(min=0))
        states = self.encode(parameters, embedded * self.scale, counts, _unchanged)
        last = (counts - 1).clamp(min=0)[..., None, None].expand(-1, -1, 1, states.shape[-1])
        final = states.gather(2, last)[:, :, 0] * (counts > 0)[..., None]
        return final @ table.mT

    def training_loss(
        self, parameters: Parameters, histories: Tensor, generator: torch.Generator, beta: float
    ) -> Tensor:
        """Mean loss over all positions of each slice, repeated for each user, `[C, B]`; `histories`
        are sequences `int64 [C, B, longest + 1]`."""
        losses = []
        for client, sequences in enumerate(histories):
            client_params = {name: value[client : client + 1] for name, value in parameters.items()}
            losses.append(self._mean_loss(client_params, sequences, generator))
        return torch.stack(losses)[:, None].expand(histories.shape[:2])

    def _mean_loss(
        self, parameters: Parameters, sequences: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Mean loss over all positions of sequences `int64 [B, longest + 1]`, batched by similar
        length."""
        counts = (sequences >= 0).sum(-1) - 1
        widths = padded_width(counts.cpu().numpy(), self.config.longest)
        total = torch.zeros(1, device=sequences.device)
        for width in np.unique(widths[widths > 0]).tolist():
            some = torch.from_numpy(widths == width).to(sequences.device)
            rows = sequences[some, : width + 1]
            drawn = self._negatives(rows, generator)
            items = torch.cat([drawn.to(rows.device), rows], 1)[None]
            total = total + sequence_loss(
                self, parameters, items, drawn.shape[1], counts[some][None], [generator]
            )
        return total[0] / counts.clamp(min=0).sum().clamp(min=1)

    def _negatives(self, sequences: Tensor, generator: torch.Generator) -> Tensor:
        """Draw items outside each sequence `int64 [B, W + 1]`, `[B, drawn(W)]`."""
        count = self.config.drawn(sequences.shape[1] - 1)
        if not count:
            return torch.empty(len(sequences), 0, dtype=torch.int64)
        random = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
        client_items = [np.unique(items[items >= 0]) for items in sequences.cpu().numpy()]
        drawn = [
            draw_negatives(items, self.schema.num_items, count, random) for items in client_items
        ]
        return torch.from_numpy(np.stack(drawn))


def sequence_loss(
    model: SequenceModel,
    parameters: Parameters,
    items: Tensor,
    drawn: int,
    counts: Tensor,
    generators: Sequence[torch.Generator],
    weights: Tensor | None = None,
    *,
    compact: bool = False,
) -> Tensor:
    """Sum of the losses of all positions of each slice's sequences, `[C]`.

    Args:
        model: the model of sequences.
        parameters: each `[C, ...]`.
        items: `int64 [C, B, drawn + W + 1]`: items drawn for a sequence, then the sequence; any
            after its last.
        drawn: number of drawn items, see `SequenceConfig.drawn`.
        counts: `int64 [C, B]`, number of items that have a next one.
        generators: of dropout, one for each slice, on the CPU.
        weights: `[C, B]`, of a sequence's positions, without gradient; None: 1.
        compact: whether item tables have one row for each of `items`, with B = 1, instead of
            one for each item of the catalogue.
    """
    table = model._embeddings(parameters, items[:, 0] if compact else None)
    embedded = table[:, None] if compact else gather_rows(table, items.clamp(min=0))
    others, sequence = embedded.split((drawn, items.shape[-1] - drawn), 2)
    dropout = Dropout(model.config.dropout, generators)
    states = model.encode(parameters, sequence[:, :, :-1] * model.scale, counts, dropout)
    real = _weighted(states, counts, weights)
    if model.config.loss == "softmax":
        return _softmax_loss(states, table, items[..., 1:].clamp(min=0), real)
    wanted = (states * sequence[:, :, 1:]).sum(-1)
    if model.config.loss == "binary":
        others = others.unflatten(2, (states.shape[2], -1))
        refused = F.softplus((others * states.unsqueeze(3)).sum(-1)).mean(-1)
        return ((F.softplus(-wanted) + refused) * real).sum((1, 2))
    scale = math.log((model.schema.num_items - 1) / drawn)
    refused = (states @ others.mT).logsumexp(-1) + scale
    return ((torch.logaddexp(refused, wanted) - wanted) * real).sum((1, 2))


def padded_width(counts: np.ndarray, longest: int) -> np.ndarray:
    """Padded width for sequences of the given lengths, `int64 [...]`; 0 without any."""
    return np.maximum(np.minimum(-(-counts // _WIDTH_STEP) * _WIDTH_STEP, longest), 0)


class Dropout:
    """Dropout of states, with factors drawn anew in each call.

    Args:
        rate: share of the numbers that become 0, in [0, 1), rounded to 1/256.
        generators: one for each slice of the cohort dimension, on the CPU.
    """

    def __init__(self, rate: float, generators: Sequence[torch.Generator]) -> None:
        self._hidden = round(rate * 256)
        self._generators = generators

    def __call__(self, values: Tensor) -> Tensor:
        """Return values `[C, ...]`, some set to 0 and the others scaled."""
        if not self._hidden:
            return values
        size = values[0].numel()
        drawn = torch.empty(len(values), -(-size // 8), dtype=torch.int64)
        for numbers_of_client, generator in zip(drawn, self._generators, strict=True):
            numbers_of_client.random_(-(2**63), None, generator=generator)
        numbers = drawn.view(torch.uint8)[:, :size].numpy()
        # by PyTorch this takes three times as long
        factors = (numbers >= self._hidden) * np.float32(256 / (256 - self._hidden))
        return values * torch.from_numpy(factors).view(values.shape).to(values.device)


def _unchanged(values: Tensor) -> Tensor:
    return values


def _weighted(states: Tensor, counts: Tensor, weights: Tensor | None) -> Tensor:
    """Weights of the positions of states `[C, B, W, d]`, 0 after the end of a sequence, in the type
    of the states, `[C, B, W]`."""
    real = torch.arange(states.shape[2], device=states.device) < counts[..., None]
    return real.to(states) if weights is None else real * weights[..., None].to(states)


def _softmax_loss(states: Tensor, table: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of the cross-entropies of the targets `int64 [C, B, W]` among all rows of the
    table, `[C]`."""
    if len(states) == 1:  # padding costs nothing
        real = weights != 0
        states = states[real][None, None]
        targets = targets[real][None, None]
        weights = weights[real][None, None]
    return catalogue_cross_entropy(
        states.flatten(1, 2), table, targets.flatten(1), weights.flatten(1)
    )


# Self-attention over the last items of a user (Kang and McAuley, Self-Attentive Sequential
# Recommendation, ICDM 2018).
#
# Embeddings of items and of their positions, then `blocks` of causal self-attention and of a
# two-layer network of width d, each as x + dropout(g(norm(x))) (section 3.3), and a last
# normalisation.
#
# Where this differs from the paper and its code: keys and values are normalised like queries, as
# in the formula of section 3.3, but not in its code. An affine layer follows the attention, as in
# Vaswani et al. 2017, and dropout is on the outputs of both parts and on the embeddings, not on
# weights of attention. Positions are counted from the end of the sequence, equivalent to the
# paper's padding in front. The default loss is the softmax over the catalogue, with which SASRec
# ranks better (Klenitskiy and Vasilev, RecSys 2023); `loss = "binary"` is as published.


class SasRecConfig(SequenceConfig):
    """Settings of SASRec."""

    blocks: int = Field(default=2, ge=1)
    """Number of blocks of attention and network."""


class SasRec(SequenceModel):
    """SASRec: item embeddings, position embeddings and self-attention blocks."""

    name = "sasrec"
    Config = SasRecConfig
    paper = "SASRec (Kang and McAuley 2018)"
    config: SasRecConfig

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Normal embeddings and weights `[in, out]`, zero biases, norms of 1.

        Weights are so small that a first state is nearly the embedding of the last item: with
        Glorot's what blocks add hides it, and training takes longer.
        """
        width = self.config.width
        drawn = self._initial_items(generator)
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
        self, parameters: Parameters, inputs: Tensor, counts: Tensor, dropped: Dropped
    ) -> Tensor:
        """Hidden states, `[C, B, W, d]`, see `SequenceModel.encode`."""
        values = dropped(inputs + self._places(parameters["place"], counts, inputs))
        for block in range(self.config.blocks):
            name = f"block{block}"
            inputs = normalised(parameters, f"{name}.norm1", values)
            query, key, value = affine(parameters, f"{name}.attention", inputs).chunk(3, -1)
            means = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            values = values + dropped(affine(parameters, f"{name}.output", means))
            inputs = normalised(parameters, f"{name}.norm2", values)
            inner = affine(parameters, f"{name}.inner", inputs)
            outputs = affine(parameters, f"{name}.outer", torch.relu(inner))
            values = values + dropped(outputs)
        return normalised(parameters, "norm", values)

    def _places(self, table: Tensor, counts: Tensor, inputs: Tensor) -> Tensor:
        """Position embeddings, counted from the ends of sequences, `[C, B, W, d]`."""
        from_end = counts[..., None] - 1 - torch.arange(inputs.shape[2], device=counts.device)
        return gather_rows(table, from_end.clamp(min=0))

    @property
    def _norms(self) -> list[str]:
        blocks = range(self.config.blocks)
        return [f"block{block}.norm{part}" for block in blocks for part in (1, 2)] + ["norm"]


# A gated recurrent unit over the last items of a user (Hidasi et al., Session-based Recommendations
# with Recurrent Neural Networks, ICLR 2016).
#
#     r, z = s(x W + b + h U + c),  n = tanh(x W' + b' + r * (h U' + c')),  h <- (1 - z) n + z h
#
# Where this differs from the paper: a sequence is all of a user's items, without sessions, from h =
# 0. Input and output share their embeddings, without item biases (`constrained_embedding` of the
# authors' code), so hidden states are as wide as embeddings. Losses are those of all models of
# sequences here, instead of TOP1 and BPR among the items of a batch: clients have no batch in
# common. Dropout is on embeddings and on the last layer's states.


class Gru4RecConfig(SequenceConfig):
    """Settings of GRU4Rec."""

    layers: int = Field(default=1, ge=1)
    """Number of recurrent layers."""


class Gru4Rec(SequenceModel):
    """GRU4Rec: item embeddings and recurrent layers."""

    name = "gru4rec"
    Config = Gru4RecConfig
    paper = "GRU4Rec (Hidasi et al. 2016)"
    config: Gru4RecConfig

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Normal embeddings; weights `[in, out]` uniform within 1 / sqrt(d), as in PyTorch, and
        zero biases."""
        width = self.config.width
        drawn = self._initial_items(generator)
        for layer in range(self.config.layers):
            for name in (f"layer{layer}.input", f"layer{layer}.state"):
                uniform = torch.rand(width, 3 * width, generator=generator)
                drawn[f"{name}.weight"] = (2 * uniform - 1) / width**0.5
                drawn[f"{name}.bias"] = torch.zeros(3 * width)
        return drawn

    def encode(
        self, parameters: Parameters, inputs: Tensor, counts: Tensor, dropped: Dropped
    ) -> Tensor:
        """Hidden states, `[C, B, W, d]`, see `SequenceModel.encode`."""
        values = dropped(inputs)
        for layer in range(self.config.layers):
            name = f"layer{layer}"
            given = affine(parameters, f"{name}.input", values).transpose(1, 2)
            weight = parameters[f"{name}.state.weight"]
            bias = parameters[f"{name}.state.bias"]
            values = recurrent_states(given, weight, bias).transpose(1, 2)
        return dropped(values)
