# SPDX-License-Identifier: Apache-2.0
"""NeuMF (He et al., Neural Collaborative Filtering, WWW 2017): a product of factors and a tower of
layers, joined.

    logit(u, i) = h . [p_u * q_i ; tower([p'_u ; q'_i])] + b

with rows p, q for the product (GMF) and rows p', q' of their own for the tower (MLP), ReLU between
its layers. Trained by Adam on cross-entropy: each liked pair, and a number of items that the user
does not like, drawn again in each epoch. Without a tower it is GMF, without factors MLP, and GMF
with h = 1 is matrix factorization; they are the baselines `gmf`, `mlp` and `mf`.

A new user is folded in by gradient descent on its own rows, which start from the mean of all users,
on its liked items and as many drawn items as in training; all other parameters are fixed.

With `pretrain-epochs` both parts are first trained separately and then joined: rows and layers are
kept, and output weights and bias are multiplied by alpha and 1 - alpha (section 3.4.1), so that
training continues from the weighted mean of both logits.

With `average` the parameters that rank are the exponential moving average of those of all steps.

Where this differs from the paper: by default both parts are trained together from the start, and
the joined model by Adam also after pre-training (`optimiser = "sgd"` is the paper's); an L2 penalty
applies to the users' and items' rows in a batch.
"""

from __future__ import annotations

import itertools
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from fedrec.baselines.base import Histories
from fedrec.baselines.neural._moving_average import MovingAverage
from fedrec.baselines.triples import Triples
from fedrec.baselines.user_rows import UserRowsBaseline, UserRowsConfig, own_seed
from fedrec.rng import stream, torch_stream

_CELLS_AT_ONCE = (
    300_000  # users times items pushed through the tower at once; its activations stay in cache
)


class NeumfConfig(UserRowsConfig):
    """Settings of NeuMF."""

    factors: int = Field(default=32, ge=0, le=2**16)
    """Number of factors (width of the product); 0: no product."""
    tower: tuple[int, ...] = (64, 32, 16)
    """Widths of the tower: of the two embeddings together (even), and of each layer; empty: no
    tower."""
    epochs: int = Field(default=10, ge=0)
    """Epochs over the liked pairs."""
    pretrain_epochs: int = Field(default=0, ge=0)
    """Epochs before these in which the product and the tower are trained separately; 0: none."""
    product_share: float = Field(default=0.5, ge=0, le=1)
    """alpha, the product's share in the logit when both are joined after pre-training."""
    optimiser: Literal["adam", "sgd"] = "adam"
    """Of the whole model: Adam, or plain gradient descent. Parts are pre-trained by Adam."""
    batch_size: int = Field(default=1024, ge=1)
    """Liked pairs per step, in addition to their sampled negatives."""
    negatives: int = Field(default=4, ge=1)
    """Negatives sampled per liked pair."""
    learning_rate: float = Field(default=0.001, gt=0)
    """Learning rate of the optimiser; in pre-training of Adam."""
    regularisation: float = Field(default=0.0, ge=0)
    """L2 penalty on the embeddings of a batch, averaged over its liked pairs."""
    average: float = Field(default=0.0, ge=0, lt=1)
    """Decay of the exponential moving average of all parameters, which is used after training: it
    averages about 1 / (1 - average) steps; 0: the last parameters are used."""
    spread: float = Field(default=0.01, gt=0)
    """Standard deviation of the initial embeddings."""
    fold_in_steps: int = Field(default=60, ge=1)
    """Steps of Adam on the embeddings of a user who is folded in."""
    fold_in_rate: float = Field(default=0.02, gt=0)
    """Learning rate of these steps."""

    @model_validator(mode="after")
    def _is_trained(self) -> Self:
        if not self.epochs and not self.pretrain_epochs:
            raise ValueError("epochs, or pretrain-epochs, of 1 or more")
        if self.pretrain_epochs and not (self.factors and self.tower):
            raise ValueError("both factors and a tower, for pretrain-epochs")
        return self

    @model_validator(mode="after")
    def _has_a_part(self) -> Self:
        if not self.factors and not self.tower:
            raise ValueError("factors or a tower")
        if self.tower and (len(self.tower) < 2 or self.tower[0] % 2 or min(self.tower) < 1):
            raise ValueError(
                "a tower of an even width and at least one layer, each of width 1 or more"
            )
        return self


class Neumf(UserRowsBaseline):
    """A product of factors and a tower of layers, trained on cross-entropy."""

    Config = NeumfConfig
    paper = "He et al. 2017"
    config: NeumfConfig

    def fit(self, histories: Histories) -> None:
        """Train from fresh parameters, or from those of the parts."""
        config = self.config
        self.fitted = histories
        users = self._joined(histories) if config.pretrain_epochs else self._start(histories)
        part = "joined" if config.pretrain_epochs else "neumf"
        random = stream(config.seed, f"baseline-{part}-triples")
        self._train(users, Triples(histories.csr(), "pairs", random))

    def _start(self, histories: Histories) -> Tensor:
        """Draws all parameters; the users' rows are returned."""
        generator = torch_stream(self.config.seed, "baseline-neumf")
        users = self._fresh_rows(histories.num_users, generator)
        fresh = self.fresh(generator)
        fresh["items"] = self._fresh_rows(histories.num_items, generator)
        self._parameters = {name: value.to(self.device) for name, value in fresh.items()}
        return users.to(self.device)

    def _joined(self, histories: Histories) -> Tensor:
        """Trains both parts alone and takes their parameters; the users' rows are returned."""
        alone = {"epochs": self.config.pretrain_epochs, "pretrain_epochs": 0, "optimiser": "adam"}
        product = Neumf(self.config.model_copy(update={**alone, "tower": ()}))
        tower = Neumf(self.config.model_copy(update={**alone, "factors": 0}))
        for part in (product, tower):
            part.device = self.device
            part.fit(histories)
        share = self.config.product_share
        ours = product._parameters
        theirs = tower._parameters
        self._parameters = theirs | {
            "h": torch.cat([share * ours["h"], (1 - share) * theirs["h"]]),
            "b": share * ours["b"] + (1 - share) * theirs["b"],
            "items": torch.cat([ours["items"], theirs["items"]], dim=1),
        }
        rows = torch.cat([torch.from_numpy(part.own) for part in (product, tower)], dim=1)
        return rows.to(self.device)

    def _train(self, users: Tensor, triples: Triples) -> None:
        """All passes over the liked pairs, from the present parameters and the users' rows."""
        config = self.config
        trained = [one.requires_grad_() for one in (users, *self._parameters.values())]
        if config.optimiser == "sgd":
            optimiser: torch.optim.Optimizer = torch.optim.SGD(trained, lr=config.learning_rate)
        else:
            optimiser = torch.optim.Adam(trained, lr=config.learning_rate, fused=True)
        mean = MovingAverage(trained, config.average)
        for _ in range(config.epochs):
            for own, good, other in triples.epoch(config.batch_size):
                others = [other, *(triples.others(own) for _ in range(config.negatives - 1))]
                items = torch.from_numpy(np.stack([good, *others], axis=1)).to(self.device)
                rows = F.embedding(torch.from_numpy(own).to(self.device), users)
                self._batch_loss(rows, items).backward()
                optimiser.step()
                optimiser.zero_grad()
                mean.add(trained)
        last, *shared = (value.detach() for value in mean.values or trained)
        self._parameters = dict(zip(self._parameters, shared, strict=True))
        self.own = last.cpu().numpy()

    def fresh(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initial parameters other than the rows: Glorot-uniform layers, zero biases."""
        tower = self.config.tower
        last = self.config.factors + (tower[-1] if tower else 0)
        found = {"h": _glorot(1, last, generator)[0], "b": torch.zeros(())}
        for place, (before, after) in enumerate(itertools.pairwise(tower)):
            found |= {
                f"W{place}": _glorot(after, before, generator),
                f"b{place}": torch.zeros(after),
            }
        return found

    def logits(self, users: Tensor, items: Tensor) -> Tensor:
        """Logits of pairs of embeddings, which broadcast.

        Args:
            users: `[..., width]`, rows of users.
            items: `[..., width]`, rows of items.
        """
        parameters = self._parameters
        width = self.config.factors
        total = parameters["b"]
        if width:
            total = total + (
                (users[..., :width] * parameters["h"][:width]) * items[..., :width]
            ).sum(-1)
        if self.config.tower:
            half = self.config.tower[0] // 2
            # The first layer of a pair is a sum of one of the user and one of the item, each
            # computed once.
            own, their = parameters["W0"].split(half, dim=1)
            hidden = users[..., width:] @ own.T + items[..., width:] @ their.T + parameters["b0"]
            for place in range(1, len(self.config.tower) - 1):
                hidden = hidden.relu() @ parameters[f"W{place}"].T + parameters[f"b{place}"]
            total = total + hidden.relu() @ parameters["h"][width:]
        return total

    @torch.no_grad()
    def scores(self, histories: Histories) -> Tensor:
        """Logits of the catalogue, `float32 [users, items]`."""
        users = torch.from_numpy(self.rows(histories)).to(self.device)
        items = self._parameters["items"]
        width = self.config.factors
        if not self.config.tower:
            return (users * self._parameters["h"]) @ items.T + self._parameters["b"]
        block = max(1, _CELLS_AT_ONCE // histories.num_items)
        towers = [self._tower_logits(part, items) for part in users.split(block)]
        return (
            torch.cat(towers)
            + (users[:, :width] * self._parameters["h"][:width]) @ items[:, :width].T
        )

    @torch.enable_grad()
    def folded_in(self, histories: Histories) -> np.ndarray:
        """`float32 [users, width]`: rows of users that were not in training, each computed from its
        own items only. Users without items get the mean row."""
        start = torch.from_numpy(self.own.mean(0)).expand(histories.num_users, -1).contiguous()
        counts = np.diff(histories.csr().indptr)
        if not counts.any():
            return start.numpy()
        rows = start.to(self.device).requires_grad_()
        config = self.config
        able = torch.from_numpy(counts > 0).to(self.device)
        adam = torch.optim.Adam([rows], lr=config.fold_in_rate)
        for items, labels, weights in self._own_examples(histories):
            losses = F.binary_cross_entropy_with_logits(
                self.logits(rows[:, None], self._parameters["items"][items]),
                labels,
                weights,
                reduction="sum",
            )
            (losses + config.regularisation * rows[able].square().sum()).backward()
            adam.step()
            adam.zero_grad()
        return rows.detach().cpu().numpy()

    def _batch_loss(self, users: Tensor, items: Tensor) -> Tensor:
        """Mean over a batch's liked pairs: rows `[batch, width]`, and items
        `[batch, 1 + negatives]`, liked first."""
        their = F.embedding(items, self._parameters["items"])
        logits = self.logits(users[:, None], their)
        loss = F.softplus(-logits[:, 0]).sum() + F.softplus(logits[:, 1:]).sum()
        if self.config.regularisation:
            loss = loss + self.config.regularisation * (users.square().sum() + their.square().sum())
        return loss / len(users)

    def _tower_logits(self, users: Tensor, items: Tensor) -> Tensor:
        """`[users, items]`: the contribution of the tower and b for every pair."""
        parameters = self._parameters
        width = self.config.factors
        own, their = parameters["W0"].split(self.config.tower[0] // 2, dim=1)
        hidden = (users[:, width:] @ own.T)[:, None] + (
            items[:, width:] @ their.T + parameters["b0"]
        )
        for place in range(1, len(self.config.tower) - 1):
            hidden = F.linear(hidden.relu_(), parameters[f"W{place}"], parameters[f"b{place}"])
        return hidden.relu_() @ parameters["h"][width:] + parameters["b"]

    def _fresh_rows(self, number: int, generator: torch.Generator) -> Tensor:
        width = self.config.factors + (self.config.tower[0] // 2 if self.config.tower else 0)
        return torch.randn(number, width, generator=generator) * self.config.spread

    def _own_examples(self, histories: Histories) -> list[tuple[Tensor, Tensor, Tensor]]:
        """For each step: items, labels and weights, `[users, examples]`; those of a user depend on
        its own items only."""
        liked = histories.csr()
        config = self.config
        counts = np.diff(liked.indptr)
        longest = counts.max()
        shape = (config.fold_in_steps, histories.num_users, counts.max() * (1 + config.negatives))
        items = np.zeros(shape, np.int64)
        labels = np.zeros(shape[1:], np.float32)
        weights = np.zeros(shape[1:], np.float32)
        labels[:, :longest] = 1.0
        for user in np.flatnonzero((counts > 0) & (counts < histories.num_items)):
            own = liked[[user]]
            random = stream(own_seed(liked[[user]].indices), "fold-in")
            number = counts[user]
            drawn = counts[user] * config.negatives
            triples = Triples(own, "pairs", random)
            others = triples.others(np.zeros(config.fold_in_steps * drawn, np.int64))
            items[:, user, :number] = own.indices
            items[:, user, longest : longest + drawn] = others.reshape(-1, drawn)
            weights[user, :number] = weights[user, longest : longest + drawn] = 1 / number
        on_device = [torch.from_numpy(part).to(self.device) for part in (items, labels, weights)]
        return [(step, on_device[1], on_device[2]) for step in on_device[0]]


def _glorot(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    bound = (6 / (rows + columns)) ** 0.5
    return (torch.rand(rows, columns, generator=generator) * 2 - 1) * bound
