# SPDX-License-Identifier: Apache-2.0
"""A client's part in FedGNN (Wu et al. 2021, algorithm 1): a gradient on the local graph, clipped
and noisy.

The device gets embeddings of the items that it touches and, from the third party, of users who
share its items. It computes the gradient of its mean cross-entropy once, updates its own user
embedding with its part of it, and sends the rest: the gradients of the shared layers, of the items'
rows, and of some pseudo items without interactions, whose gradients are drawn from a normal
distribution with the mean and standard deviation of the true ones. All of it is clipped and gets
Laplace noise. Tokens of its items and its user embedding go to the third party
(`fedrec.graphs.third_party`).

**Guarantee of the noise.** Clipping each coordinate to [-S, S] and noise of scale b make *one
coordinate of one upload* 2 S / b private; the paper calls that the budget (S = 0.1, b = 0.2: 1).
But an upload has many coordinates (all numbers of its rows and of the layers), and a client is in
many rounds: `spent` composes them. With `clip = "message"` the whole upload is clipped to L1 norm
S, and its values cost 2 S / b. In neither case is there a guarantee for which rows are sent:
positives are hidden among negatives and pseudo items, but the rows that recur in each round are the
positives. There is none either for the token counts and the user embedding, which the third party
gets without noise. The noise is drawn from a seed: this is a simulation.

Where this differs from the paper: cross-entropy with drawn negatives instead of squared error; all
of a client's examples are one batch. Its public code clips and perturbs once per central batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from clients.local.examples import labelled
from clients.local.updates import Updates
from clients.step import Step, StepConfig
from fedrec.cohort.batches import Batches
from fedrec.cohort.block import Block
from fedrec.data.client_data import ClientData
from fedrec.data.negatives import draw_negatives
from fedrec.errors import ExperimentError
from fedrec.graphs.third_party import NOTHING, tokens
from fedrec.models.base import Parameters
from fedrec.models.personal.fedgnn import Fedgnn

ITEMS = "item.id"
USER = "user.id"
VECTOR = "user.vector"
NEIGHBOURS = "third.neighbours"
COUNTS = "third.counts"
TOKENS = "third.tokens"
EMBEDDING = "third.user"
_PSEUDO = -1.0  # label of a pseudo item


class FedgnnStepConfig(StepConfig):
    """Settings of a client's part in FedGNN."""

    epochs: int = Field(default=1, ge=0, le=1)
    """1 in training; 0 gives no gradient."""
    user_rate: float = Field(default=1.0, ge=0)
    """Step size of the private user embedding."""
    negatives: int = Field(default=4, ge=1)
    """Unobserved items per positive, trained on as negatives."""
    pseudo: int = Field(default=0, ge=0)
    """Pseudo items: further unobserved items, which get random gradients (paper: 1000)."""
    clip: Literal["coordinate", "message"] = "coordinate"
    """What is clipped: each coordinate (paper), or the L1 norm of the whole upload."""
    clip_norm: float = Field(default=0.1, ge=1e-9)
    """S (paper: 0.1)."""
    noise: float = Field(default=0.0, ge=0)
    """Scale b of the Laplace noise on each coordinate that is sent (paper: 0.2); 0: none, and no
    privacy."""
    token_key: str = Field(default="fedgnn", min_length=1)
    """The key that devices share for tokens of items."""

    def spent(self, coordinates: int, rounds: int) -> float:
        """What the values of a client's uploads cost together, pure differential privacy;
        infinite without noise.

        Args:
            coordinates: numbers in one upload.
            rounds: uploads.
        """
        if not self.noise:
            return float("inf")
        once = 2 * self.clip_norm / self.noise
        return rounds * once * (coordinates if self.clip == "coordinate" else 1)


class FedgnnStep(Step):
    """Sends a clipped and noisy gradient on the local graph."""

    Config = FedgnnStepConfig
    trains = Fedgnn
    tasks = ("ranking",)
    private = (USER, VECTOR)
    model: Fedgnn
    generated = True
    paper = "FedGNN (Wu et al. 2021), algorithm 1"
    config: FedgnnStepConfig

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """One client's examples; they name the rows that it needs."""
        if not self.config.epochs:
            return Batches.whole([])
        items, labels = self._examples(data, random)
        return replace(Batches.whole([(items, labels)]), examples=int((labels >= 0).sum()))

    def train_block(
        self, parameters: Parameters, block: Block, own: Parameters | None = None
    ) -> Updates:
        """Minus the clipped and noisy gradient of every client of a block, the message to the third
        party, and the change of what it keeps; local graphs are processed one by one.

        Raises:
            ExperimentError: there are no neighbours among what the server sent.
        """
        given = own or {}
        still = {name: value for name, value in given.items() if name not in (NEIGHBOURS, COUNTS)}
        found = Updates.none(parameters, block, still, (ITEMS,))
        if not self.config.epochs:
            return found
        if NEIGHBOURS not in given:
            raise ExperimentError(
                "step 'fedgnn' needs neighbours from the third party of its strategy",
                expected="strategy.name = 'fedgnn', and no fine-tuning in evaluation",
                got="training without neighbours",
                fix="--set evaluation.fine-tune={epochs=0}",
            )
        losses = found.losses()
        shift = torch.arange(len(block)) * block.touched.shape[1]
        for place in range(block.active[0] if block.active else 0):
            real = slice(0, int(block.sizes[0, place]))
            items = block.items[0, place, real].cpu().numpy()
            labels = block.labels[0, place, real].cpu().numpy()
            if not (labels == 1).any():
                continue
            alone = {name: value[place] for name, value in given.items()}
            rows = block.places[0, place, real] - shift[place].to(block.places.device)
            changed, losses[place] = self._changes(alone, items, labels, rows)
            for name, value in changed.items():
                found.changes[name][place] = value
        return replace(found, last_losses=losses)

    def _changes(
        self, parameters: Mapping[str, Tensor], items: np.ndarray, labels: np.ndarray, rows: Tensor
    ) -> tuple[dict[str, Tensor], float]:
        """What one client sends, the change of its private state, and its loss before the step.

        Args:
            parameters: without cohort dimension.
            items: `int64 [B]`, ascending, distinct.
            labels: `float32 [B]`.
            rows: `int64 [B]`, where each item's row is in the item table.
        """
        slots = parameters[NEIGHBOURS].shape[0]
        liked = _chosen(items[labels == 1], slots)
        places = rows[torch.from_numpy(np.flatnonzero(np.isin(items, liked))).to(rows.device)]
        near, counts = (parameters[n][: len(liked)] for n in (NEIGHBOURS, COUNTS))
        there = torch.arange(near.shape[1], device=near.device) < counts[:, None]
        leaves = {
            name: value.detach().requires_grad_()
            for name, value in parameters.items()
            if name not in (NEIGHBOURS, COUNTS, TOKENS, EMBEDDING, VECTOR)
        }
        vector = self.model.vector(leaves, leaves[ITEMS][places], near.to(self.device), there)
        real = torch.from_numpy(labels >= 0).to(rows.device)
        targets = torch.from_numpy(labels).to(vector)[real]
        loss = F.binary_cross_entropy_with_logits(leaves[ITEMS][rows[real]] @ vector, targets)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        found = dict(zip(leaves, gradients, strict=True))
        kept = {
            USER: self.config.user_rate * found.pop(USER),
            VECTOR: parameters[VECTOR] - vector.detach(),
        }
        # the noise of a simulation: a function of the examples, which are drawn from the stream
        source = np.random.default_rng(items)
        found[ITEMS] = self._with_pseudo(found[ITEMS], rows, real, source)
        learned = self._protected(found, rows, source) | kept
        own = np.full(slots, NOTHING, dtype=np.int64)
        own[: len(liked)] = tokens(liked.tolist(), self.config.token_key)
        embedding = parameters[USER] - kept[USER]
        changes = {name: -value for name, value in learned.items()}
        message = {TOKENS: torch.from_numpy(own), EMBEDDING: embedding}
        return changes | message, float(loss.detach())

    def _with_pseudo(
        self, table: Tensor, rows: Tensor, real: Tensor, source: np.random.Generator
    ) -> Tensor:
        """The gradient of the item table with random rows for the pseudo items."""
        pseudo = rows[~real]
        if not len(pseudo):
            return table
        true = table[rows[real]]
        drawn = source.standard_normal((len(pseudo), table.shape[1]))
        made = true.mean() + true.std() * torch.from_numpy(drawn).to(table)
        return table.index_copy(0, pseudo, made)

    def _protected(
        self, found: Mapping[str, Tensor], rows: Tensor, source: np.random.Generator
    ) -> dict[str, Tensor]:
        """Clipped gradients with noise on all coordinates that are sent: of the item table the
        named rows."""
        sent = {n: value[rows] if n == ITEMS else value for n, value in found.items()}
        bound = self.config.clip_norm
        if self.config.clip == "message":
            norm = sum(float(value.double().abs().sum()) for value in sent.values())
            sent = {n: value * min(1.0, bound / max(norm, 1e-30)) for n, value in sent.items()}
        else:
            sent = {n: value.clamp(-bound, bound) for n, value in sent.items()}
        if self.config.noise:
            scale = self.config.noise
            drawn = {n: scale * source.laplace(size=tuple(v.shape)) for n, v in sent.items()}
            sent = {n: v + torch.from_numpy(drawn[n]).to(v) for n, v in sent.items()}
        table = torch.zeros_like(found[ITEMS]).index_copy(0, rows, sent[ITEMS])
        return sent | {ITEMS: table}

    def _examples(
        self, data: ClientData, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Distinct items and their labels: 1 and 0, and -1 for pseudo items."""
        count = self.config.negatives
        items = self.model.schema.num_items
        chosen, labels = labelled(data, self.model.schema, count, "ignore", random)
        chosen, first = np.unique(chosen, return_index=True)
        labels = labels[first]
        if self.config.pseudo and 0 < len(chosen) < items:
            room = min(self.config.pseudo, items - len(chosen))
            pseudo = draw_negatives(chosen, items, room, random)
            chosen = np.concatenate([chosen, pseudo])
            labels = np.concatenate([labels, np.full(len(pseudo), _PSEUDO, dtype=np.float32)])
            chosen, first = np.unique(chosen, return_index=True)
            labels = labels[first]
        return chosen, labels


def _chosen(liked: np.ndarray, slots: int) -> np.ndarray:
    """The items of the local graph, ascending: all, or as many as there are slots, evenly
    spaced."""
    if len(liked) <= slots:
        return liked
    return liked[np.linspace(0, len(liked) - 1, slots).astype(np.int64)]
