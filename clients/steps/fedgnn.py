# SPDX-License-Identifier: Apache-2.0
"""A client's part in FedGNN (Wu et al. 2021, algorithm 1): a clipped gradient on the local graph.

The device gets embeddings of the items that it touches and, from the third party, of users who
share its items. It computes the gradient of its mean cross-entropy once, updates its own user
embedding with its part of it, and sends the rest: the gradients of the shared layers, of the items'
rows, each coordinate clipped. Tokens of its items and its user embedding go to the third party
(`fedrec.graphs`).

**No guarantee.** The paper adds Laplace noise of scale b to each coordinate and calls 2 S / b the
budget. That is the cost of *one coordinate of one upload*, but an upload has many coordinates (all
numbers of its rows and of the layers), and a client is in many rounds. Which rows are sent has no
guarantee: positives are hidden among negatives, but the rows that recur in each round are the
positives. Neither do the token counts and the user embedding, which the third party gets.

Where this differs from the paper: no noise; cross-entropy with drawn negatives instead of squared
error, and no pseudo items beside them; all of a client's examples are one batch. Its public code
clips once per central batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from clients.step import Step, StepConfig
from fedrec.graphs import COUNTS, EMBEDDING, NEIGHBOURS, NOTHING, TOKENS, tokens
from fedrec.models.base import Parameters
from fedrec.models.personal import Fedgnn
from fedrec.nn.layers import gather_rows
from fedrec.training.block import UNLIMITED, Block
from fedrec.training.draws import ExampleDraw
from fedrec.training.results import BlockUpdate

ITEMS = "item.id"
USER = "user.id"
VECTOR = "user.vector"
_PADDING = -1.0  # label of no example
_NEGATIVES = 4  # items per positive, drawn outside the positives
_TOKEN_KEY = "fedgnn"  # which devices share


class FedgnnStepConfig(StepConfig):
    """Settings of a client's part in FedGNN."""

    epochs: int = Field(default=1, ge=0, le=1)
    """1 in training; 0 gives no gradient."""
    user_rate: float = Field(default=1.0, ge=0)
    """Step size of the private user embedding."""
    clip_norm: float = Field(default=0.1, ge=1e-9)
    """S, the bound of each coordinate (paper: 0.1)."""


class _Graphs(NamedTuple):
    """The examples and local graphs of C clients. A client's examples are the rows of its compact
    table, each once.

    Attributes:
        liked: of each client the items of its local graph.
        labels: `float32 [C, R]`: 1, 0, or -1 for padding.
        positions: `int64 [C, n]`, which examples are the items of the local graph, -1 for padding.
    """

    liked: list[list[int]]
    labels: Tensor
    positions: Tensor

    @classmethod
    def of(cls, block: Block, clients: Tensor, slots: int) -> _Graphs:
        """Local graphs of some clients of a block, `int64 [C]`, with up to so many items in a local
        graph."""
        every = block.labels.new_full(block.touched.shape, _PADDING)
        every.scatter_reduce_(1, block.places[0], block.labels[0], "amax")  # of padding, 0
        labels = every.index_select(0, clients)
        given = block.touched.index_select(0, clients).cpu().numpy()
        chosen = [_chosen(np.flatnonzero(row == 1), slots) for row in labels.cpu().numpy()]
        at = np.full((len(clients), max(map(len, chosen))), -1)
        for index, row in enumerate(chosen):
            at[index, : len(row)] = row
        liked = [row[which].tolist() for row, which in zip(given, chosen, strict=True)]
        return cls(liked, labels, torch.from_numpy(at).to(labels.device))


class FedgnnStep(Step):
    """Sends a clipped gradient on the local graph."""

    name = "fedgnn"
    Config = FedgnnStepConfig
    trains = Fedgnn
    private = (USER, VECTOR)
    model: Fedgnn
    generated = True
    paper = "FedGNN (Wu et al. 2021), algorithm 1"
    config: FedgnnStepConfig

    def draw(self) -> ExampleDraw:
        """A client's positive items and negatives; they name the rows that it needs."""
        return ExampleDraw(self.config.epochs, UNLIMITED, _NEGATIVES, shuffled=False)

    def train_block(
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> BlockUpdate:
        """Minus the clipped gradient of every client of a block, the message to the third party,
        and the change of what it keeps."""
        given = client_params or {}
        block = replace(block, examples=block.touched_counts)  # each item is one
        changes = {
            name: torch.zeros_like(value)
            for name, value in given.items()
            if name not in (NEIGHBOURS, COUNTS)
        }
        losses = torch.full((len(block),), torch.nan)
        updates = BlockUpdate.from_changes(parameters, block, changes, (ITEMS,), losses, given)
        if not self.config.epochs:
            return updates
        # padding has label 0
        clients = (block.labels[:1] == 1).any(2).any(0).nonzero()[:, 0]
        if not len(clients):
            return updates
        graphs = _Graphs.of(block, clients, given[NEIGHBOURS].shape[1])
        theirs = {name: value.index_select(0, clients) for name, value in given.items()}
        changed, measured = self._changes(theirs, graphs)
        for name, value in changed.items():
            changes[name].index_copy_(0, clients, value)
        means = measured.new_full((len(block),), torch.nan).index_copy_(0, clients, measured)
        return replace(updates, last_losses=means)

    def _changes(
        self, parameters: Mapping[str, Tensor], graphs: _Graphs
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The clients' updates, changes of their private state, and losses before the step, `[C]`.

        Args:
            parameters: `[C, ...]` each.
            graphs: their examples and local graphs.
        """
        leaves = {
            name: value.detach().requires_grad_()
            for name, value in parameters.items()
            if name not in (NEIGHBOURS, COUNTS, TOKENS, EMBEDDING, VECTOR)
        }
        vector = self._vector(leaves, parameters, graphs)
        logits = torch.bmm(leaves[ITEMS], vector.unsqueeze(-1))
        weights = (graphs.labels >= 0).to(vector)
        targets = graphs.labels.clamp(min=0).to(vector)
        each = F.binary_cross_entropy_with_logits(logits.squeeze(-1), targets, reduction="none")
        losses = (each * weights).sum(1) / weights.sum(1)
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()))
        upload = dict(zip(leaves, gradients, strict=True))
        private = {
            USER: self.config.user_rate * upload.pop(USER),
            VECTOR: parameters[VECTOR] - vector.detach(),
        }
        bound = self.config.clip_norm
        upload = {name: value.clamp(-bound, bound) for name, value in upload.items()}
        changes = {name: -value for name, value in (upload | private).items()}
        item_tokens = torch.full_like(parameters[TOKENS], NOTHING)
        for index, liked in enumerate(graphs.liked):
            item_tokens[index, : len(liked)] = torch.from_numpy(tokens(liked, _TOKEN_KEY))
        message = {TOKENS: item_tokens, EMBEDDING: parameters[USER] - private[USER]}
        return changes | message, losses.detach()

    def _vector(
        self, leaves: Mapping[str, Tensor], parameters: Mapping[str, Tensor], graphs: _Graphs
    ) -> Tensor:
        """The users' vectors from their local graphs, `[C, d]`."""
        most = graphs.positions.shape[1]
        near = parameters[NEIGHBOURS][:, :most]
        counts = parameters[COUNTS][:, :most, None]
        real = graphs.positions >= 0
        there = torch.arange(near.shape[2], device=near.device) < counts
        liked = gather_rows(leaves[ITEMS], graphs.positions.clamp(min=0))
        return self.model.vector(leaves, liked, real, near, there & real.unsqueeze(-1))


def _chosen(liked: np.ndarray, slots: int) -> np.ndarray:
    """The likes of the local graph, ascending: all, or as many as there are slots, evenly
    spaced."""
    if len(liked) <= slots:
        return liked
    return liked[np.linspace(0, len(liked) - 1, slots).astype(np.int64)]
