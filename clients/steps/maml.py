# SPDX-License-Identifier: Apache-2.0
"""Model-agnostic meta-learning on the device (Finn, Abbeel and Levine 2017; for recommendation Chen
et al. 2018).

A client's examples are divided into support and query. It adapts to the support by some full
gradient steps,

    theta_u = theta - a1 grad L_support(theta), ...

and sends minus the gradient of the query's loss with respect to theta, the parameters before the
adaptation; a strategy such as `reptile` moves along the mean of these, with a2 as its server rate.
`order = 2` differentiates through the adaptation, `order = 1` takes the query's gradient at theta_u
instead. When a user is served there is no query: with `query-share = 0` the step is only the
adaptation, on all of the user's data.

Where this differs from the papers: Chen et al. do not say how they divide support and query; here a
share of the positives, at random in each round, with negatives of their own each. Parameters may
have different rates (`rates`) in the adaptation.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.step import Step, StepConfig
from clients.steps.descent import rates_by_name
from fedrec.data.client_data import ClientData, draw_negatives
from fedrec.models.base import Parameters
from fedrec.training.block import Batches, Block
from fedrec.training.results import BlockUpdate
from fedrec.training.sgd import Recommending

_Examples = tuple[np.ndarray, np.ndarray]


class MamlConfig(StepConfig):
    """Settings of meta-learning; `epochs` is the number of steps of the adaptation, each on the
    whole support."""

    epochs: int = Field(default=1, ge=0)
    """Full gradient steps on the support; 0 changes and sends nothing."""
    learning_rate: float = Field(default=0.1, ge=0)
    """Step size of the adaptation (a1); 0: a plain gradient is sent (FedSGD)."""
    rates: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Factors on it by pattern of parameter names, such as `{"item.id" = 0.0}`; no parameter may
    fit two."""
    order: Literal[1, 2] = 2
    """2: the gradient through the adaptation; 1: that at the adapted parameters (first-order
    MAML)."""
    query_share: float = Field(default=0.2, ge=0, lt=1)
    """Share of the client's positives (rating: of its rows) in the query, at least one; 0: there is
    no query, and the step is only the adaptation, as when a user is served."""
    negatives: int = Field(default=4, ge=0)
    """Unobserved items per positive, in support and query (ranking only)."""


class Maml(Step):
    """Adapts to some examples and sends the gradient of the loss on the others."""

    name = "maml"
    Config = MamlConfig
    paper = "Finn et al. 2017, algorithm 1; Chen et al. 2018 (NN-SELF in PrivRec)"
    config: MamlConfig

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """One batch for each step of the adaptation, and one for the query."""
        support, query = self._divided(data, random)
        if not len(support[0]):
            return Batches.whole([])
        queries = [query] if self.config.query_share else []
        return Batches.whole([support] * self.config.epochs + queries)

    def train_block(
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> BlockUpdate:
        """Train every client of a block. Clients without examples, which come last in a block, stay
        as they are."""
        tables = tuple(name for name in self.model.item_tables if name in parameters)
        rates = rates_by_name(parameters, self.config.rates)
        active = block.active[0] if block.active else 0
        values = {
            name: value[block.touched]
            if name in tables
            else value.expand(len(block), *value.shape).clone()
            for name, value in parameters.items()
        }
        losses = torch.full(
            (len(block),), math.nan, dtype=torch.float64, device=block.touched.device
        )
        if active:
            start = {
                name: value[:active].detach().clone().requires_grad_()
                for name, value in values.items()
            }
            delta, loss = self._moved(start, block, active, tables, rates)
            for name, moved in delta.items():
                values[name][:active] += moved
            losses[:active] = loss.detach().double()
        return BlockUpdate.from_values(parameters, block, values, tables, losses)

    def _moved(
        self,
        start: dict[str, Tensor],
        block: Block,
        active: int,
        tables: tuple[str, ...],
        rates: dict[str, float],
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The updates of the first clients of a block, `[active, ...]` each, and their reported
        losses `[active]`."""
        objective = Recommending(self.model)
        values = start
        steps = range(len(block.active))
        batch = _trimmed(block, 0)  # the support is that of all steps of the adaptation
        loss = torch.tensor(math.nan)
        for step in steps[: self.config.epochs]:
            loss = objective(_gathered(values, batch, step, active, tables), batch, step, active)
            values = self._adapted(values, loss.sum(), rates)
        if not self.config.query_share:
            return {name: (value - start[name]).detach() for name, value in values.items()}, loss
        step = steps[-1]
        batch = _trimmed(block, step)
        loss = objective(_gathered(values, batch, step, active, tables), batch, step, active)
        return _minus_gradients(loss.sum(), values if self.config.order == 1 else start), loss

    def _adapted(
        self, values: dict[str, Tensor], loss: Tensor, rates: Mapping[str, float]
    ) -> dict[str, Tensor]:
        """One step of the adaptation."""
        second = self.config.order == 2 and self.config.query_share > 0
        names = list(values)
        gradients = torch.autograd.grad(
            loss,
            [values[n] for n in names],
            create_graph=second,
            allow_unused=True,
            materialize_grads=True,
        )
        moved = {}
        for name, gradient in zip(names, gradients, strict=True):
            value = values[name] - self.config.learning_rate * rates[name] * gradient
            moved[name] = value if second else value.detach().requires_grad_()
        return moved

    def prepare(self, parameters: Parameters, generator: torch.Generator) -> dict[str, Tensor]:
        """Refuse rates of parameters that do not exist."""
        rates_by_name(parameters, self.config.rates)
        return {}

    def _divided(
        self, data: ClientData, random: np.random.Generator
    ) -> tuple[_Examples, _Examples]:
        """Support and query; nothing if there is to be a query and there are fewer than two
        positives (rating: rows)."""
        rating = self.model.schema.task == "rating"
        count = len(data.items) if rating else len(data.positives)
        queried = max(1, round(self.config.query_share * count)) if self.config.query_share else 0
        if not self.config.epochs or count <= queried:
            none = np.empty(0, np.int64), np.empty(0, np.float32)
            return none, none
        order = random.permutation(count)
        parts = order[queried:], order[:queried]
        if rating:
            return tuple((data.items[part], data.labels[part]) for part in parts)  # type: ignore
        support, query = (
            self._with_negatives(data, data.positives[part], random) for part in parts
        )
        return support, query

    def _with_negatives(
        self, data: ClientData, liked: np.ndarray, random: np.random.Generator
    ) -> _Examples:
        """Some positives, and this many sampled items outside all of the client's, if there are
        any."""
        items = self.model.schema.num_items
        known = data.never_negative
        count = self.config.negatives * len(liked) if len(known) < items else 0
        drawn = draw_negatives(known, items, count, random) if count else liked[:0]
        labels = np.concatenate([np.ones(len(liked), np.float32), np.zeros(count, np.float32)])
        return np.concatenate([liked, drawn]), labels


def _trimmed(block: Block, step: int) -> Block:
    """The block as wide as a step's largest batch: a query is far smaller than its support. Sums
    are rounded differently for it beside other clients."""
    width = int(block.sizes[step].max())
    parts = {name: getattr(block, name)[..., :width] for name in ("items", "rows", "labels")}
    return replace(block, **parts)


def _gathered(
    values: Mapping[str, Tensor], block: Block, step: int, active: int, tables: tuple[str, ...]
) -> dict[str, Tensor]:
    """Parameters as an objective takes them: of item tables the rows of a step's items,
    `[active, N, d]`."""
    rows = block.rows[step, :active].flatten()
    return {
        name: value.flatten(0, 1).index_select(0, rows).view(active, -1, value.shape[-1])
        if name in tables
        else value
        for name, value in values.items()
    }


def _minus_gradients(loss: Tensor, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(
        loss, list(values.values()), allow_unused=True, materialize_grads=True
    )
    return {name: -gradient for name, gradient in zip(values, gradients, strict=True)}
