# SPDX-License-Identifier: Apache-2.0
"""NeuMF (He et al., Neural Collaborative Filtering, WWW 2017): a product of factors and a tower of
layers, joined.

    logit(u, i) = h . [p_u * q_i ; tower([p'_u ; q'_i])] + b

with rows p, q for the product (GMF) and rows p', q' of their own for the tower (MLP), ReLU between
its layers. Trained by Adam on cross-entropy: each liked pair, and a number of items that the user
does not like, drawn again in each epoch. Without a tower it is GMF, without factors MLP, and GMF
with h = 1 is matrix factorization; they are the baselines `gmf`, `mlp` and `mf`.

With `pretrain-epochs` both parts are first trained separately and then joined: rows and layers are
kept, and output weights and bias are multiplied by alpha and 1 - alpha (section 3.4.1), so that
training continues from the weighted mean of both logits.

With `average` the parameters that rank are the exponential moving average of those of all steps.

Where this differs from the paper: by default both parts are trained together from the start, and
the joined model by Adam also after pre-training (`optimiser = "sgd"` is the paper's); an L2 penalty
applies to the users' and items' rows in a batch.
"""

import itertools
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from fedrec.baselines.base import Histories
from fedrec.baselines.examples import ExamplesBaseline, ExamplesConfig
from fedrec.config import Width
from fedrec.models.neumf import NeumfConfig
from fedrec.nn.initial import glorot
from fedrec.rng import stream, torch_stream

_INIT_STD = 0.01  # of the initial embeddings
_CELLS_AT_ONCE = (
    300_000  # users times items pushed through the tower at once; its activations stay in cache
)


class CentralNeumfConfig(ExamplesConfig, NeumfConfig):
    """Settings of NeuMF."""

    factors: int = Field(default=32, ge=0, le=2**16)
    """Number of factors (width of the product); 0: no product."""
    tower: tuple[Width, ...] = (64, 32, 16)
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

    @model_validator(mode="after")
    def _is_trained(self) -> Self:
        if not self.epochs and not self.pretrain_epochs:
            raise ValueError("epochs, or pretrain-epochs, of 1 or more")
        if self.pretrain_epochs and not (self.factors and self.tower):
            raise ValueError("both factors and a tower, for pretrain-epochs")
        return self


class CentralNeumf(ExamplesBaseline):
    """A product of factors and a tower of layers, trained on cross-entropy."""

    name = "neumf"
    Config = CentralNeumfConfig
    paper = "He et al. 2017"
    config: CentralNeumfConfig

    def fit(self, histories: Histories) -> None:
        """Train from fresh parameters, or from those of the parts."""
        config = self.config
        self.fitted = histories
        users = self._joined(histories) if config.pretrain_epochs else self._start(histories)
        part = "joined" if config.pretrain_epochs else "neumf"
        self.train_pairs(users, stream(config.seed, f"baseline-{part}-triples"))

    def _start(self, histories: Histories) -> Tensor:
        """Draws all parameters; the users' rows are returned."""
        generator = torch_stream(self.config.seed, "baseline-neumf")
        users = self._fresh_rows(histories.num_users, generator)
        fresh = self.fresh(generator)
        fresh["items"] = self._fresh_rows(histories.num_items, generator)
        self.shared = {name: value.to(self.device) for name, value in fresh.items()}
        return users.to(self.device)

    def _joined(self, histories: Histories) -> Tensor:
        """Trains both parts alone and takes their parameters; the users' rows are returned."""
        alone = {"epochs": self.config.pretrain_epochs, "pretrain_epochs": 0, "optimiser": "adam"}
        product = CentralNeumf(self.config.model_copy(update={**alone, "tower": ()}))
        tower = CentralNeumf(self.config.model_copy(update={**alone, "factors": 0}))
        for part in (product, tower):
            part.device = self.device
            part.fit(histories)
        share = self.config.product_share
        ours = product.shared
        theirs = tower.shared
        self.shared = theirs | {
            "h": torch.cat([share * ours["h"], (1 - share) * theirs["h"]]),
            "b": share * ours["b"] + (1 - share) * theirs["b"],
            "items": torch.cat([ours["items"], theirs["items"]], dim=1),
        }
        rows = torch.cat([torch.from_numpy(part.own) for part in (product, tower)], dim=1)
        return rows.to(self.device)

    def fresh(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initial parameters other than the rows: Glorot-uniform layers, zero biases."""
        tower = self.config.tower
        last = self.config.factors + (tower[-1] if tower else 0)
        found = {"h": glorot(1, last, generator)[0], "b": torch.zeros(())}
        for place, (before, after) in enumerate(itertools.pairwise(tower)):
            found |= {
                f"W{place}": glorot(after, before, generator),
                f"b{place}": torch.zeros(after),
            }
        return found

    def logits(self, rows: Tensor, items: Tensor, users: np.ndarray) -> Tensor:
        """Logits `[n, B]` of items `int64 [n, B]` for the users' rows `[n, width]`."""
        return self.joined_logits(rows[:, None], self.shared["items"][items])

    def joined_logits(self, users: Tensor, items: Tensor) -> Tensor:
        """Logits of pairs of embeddings, which broadcast.

        Args:
            users: `[..., width]`, rows of users.
            items: `[..., width]`, rows of items.
        """
        parameters = self.shared
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
        items = self.shared["items"]
        width = self.config.factors
        if not self.config.tower:
            return (users * self.shared["h"]) @ items.T + self.shared["b"]
        block = max(1, _CELLS_AT_ONCE // histories.num_items)
        towers = [self._tower_logits(part, items) for part in users.split(block)]
        return (
            torch.cat(towers) + (users[:, :width] * self.shared["h"][:width]) @ items[:, :width].T
        )

    def batch_loss(self, rows: Tensor, items: Tensor, labels: Tensor, users: np.ndarray) -> Tensor:
        """Mean over a batch's liked pairs: rows `[batch, width]`, and items
        `[batch, 1 + negatives]`, liked first."""
        their = F.embedding(items, self.shared["items"])
        logits = self.joined_logits(rows[:, None], their)
        loss = F.softplus(-logits[:, 0]).sum() + F.softplus(logits[:, 1:]).sum()
        if self.config.regularisation:
            loss = loss + self.config.regularisation * (rows.square().sum() + their.square().sum())
        return loss / len(rows)

    def _tower_logits(self, users: Tensor, items: Tensor) -> Tensor:
        """`[users, items]`: the contribution of the tower and b for every pair."""
        parameters = self.shared
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
        return torch.randn(number, width, generator=generator) * _INIT_STD
