# SPDX-License-Identifier: Apache-2.0
"""A device solves for its own factors, and sends sums for the items' (FCF, Ammad-ud-din et al.
2019, section 4).

With c the weight of a liked item and 1 that of any other, the device's factors given the items' are

    x = (Y^T Y + (c - 1) sum over liked of y_i y_i^T + lambda I)^-1 c sum over liked of y_i

as in `fedrec.baselines.closed_form`. They are private: they stay on the device. What is sent
is x x^T for the whole catalogue (`user.gram`) and, for each liked item i, either

* `item.right`: c x - (c - 1) (x . y_i) x. From these the server computes half the negative gradient
  of the squared errors with respect to y_i, sum over users of `item.right` - `user.gram` y_i, and
  takes a step (strategy `fcf`);
* or, with `model.moments`, `item.right`: x and `item.moments`: x x^T, so that the server can solve
  for y_i (strategy `fed-als`).

For other items nothing is sent, and the device needs no row of them. With `low-rated` = r, an item
that was rated and is not positive counts r times in every sum over liked items, and what is sent
for it is r times the above.

Where this differs from the paper: it weighs a liked item by 1 + alpha r; here c is a setting (with
alpha r, as in the `implicit` library, c = alpha r). Widely used code for FCF gives unobserved items
no weight; here they have 1.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from clients.step import Replaced, Step, StepConfig
from fedrec.data.interactions import LowRatedConfig
from fedrec.device import products_in
from fedrec.models.base import Parameters
from fedrec.models.mf import Ials
from fedrec.sums.products import packed
from fedrec.training.block import Block
from fedrec.training.draws import ExampleDraw, WeightedDraw
from fedrec.training.results import BlockChange, BlockUpdate, ChangedRows, Dense, Factored

MOMENTS = "item.moments"


class AlsConfig(StepConfig, LowRatedConfig):
    """Settings of solving for a user; with `epochs = 0` nothing is done, any other number solves
    once."""

    epochs: int = Field(default=1, ge=0)
    """0: nothing happens; any other number: the user is solved for once, exactly."""
    weight: float = Field(default=8.0, ge=1)
    """c, the weight of a liked item, where that of any other is 1."""
    regularisation: float = Field(default=10.0, gt=0)
    """Lambda, > 0."""


class _Solved(NamedTuple):
    """Users that were solved for.

    Attributes:
        factors: `[C, d]`.
        fitted: `[C, R]`, products with the rows of the items; of no meaning for padding.
        shares: `[C, R]`, the weight of each item: 1 if it is liked; 0 for padding.
    """

    factors: Tensor
    fitted: Tensor
    shares: Tensor


class Als(Step):
    """Solves for the user's factors and sends sums for the items'."""

    name = "als"
    Config = AlsConfig
    trains = Ials
    private = (Replaced("user.factors"),)
    symmetric = ("user.gram",)
    paper = "FCF (Ammad-ud-din et al. 2019), section 4"
    config: AlsConfig

    def draw(self) -> ExampleDraw:
        """The items that count and their weights; nothing is drawn."""
        return WeightedDraw(min(self.config.epochs, 1), others=self.config.low_rated)

    def train_block(
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> BlockUpdate:
        """Train every client of a block. The linear systems of all users are solved together."""
        with products_in("float32", block.touched.device):  # its linear systems
            solved = self._solve(parameters, block)
        factors = solved.factors
        shares = solved.shares.unsqueeze(-1)
        outer = factors.unsqueeze(2) * factors.unsqueeze(1)
        # in a round nothing is saved for who has nothing to solve for
        before = (client_params or {}).get("user.factors", factors)
        private = torch.where(self._idle(block), before, factors)
        changes: dict[str, BlockChange] = {
            "user.factors": Dense(private, parameters["user.factors"]),
            "user.gram": Dense(outer, parameters["user.gram"]),
        }
        if MOMENTS in parameters:  # of which each item gets its share, without copies
            right = factors.unsqueeze(1) * shares
            changes[MOMENTS] = Factored(ChangedRows.compact(block, shares), packed(outer))
        else:
            pulls = self.config.weight - (self.config.weight - 1) * solved.fitted
            right = pulls.unsqueeze(-1) * factors.unsqueeze(1) * shares
        changes["item.right"] = ChangedRows.compact(block, right, parameters["item.right"])
        losses = self._losses(solved, parameters, block)
        return BlockUpdate(parameters, block, changes, losses)

    def _solve(self, parameters: Mapping[str, Tensor], block: Block) -> _Solved:
        shares = torch.zeros(block.touched.shape).to(parameters["item.factors"])
        if block.active:  # padding has label 0
            shares.scatter_add_(1, block.places[0], block.labels[0].to(shares))
        rows = parameters["item.factors"][block.touched]
        weighted = rows * shares.unsqueeze(-1)
        gram = parameters["item.gram"]
        extra = self.config.weight - 1
        matrix = torch.baddbmm(
            gram.expand(len(rows), -1, -1), weighted.transpose(1, 2), rows, alpha=extra
        )
        matrix.diagonal(dim1=1, dim2=2).add_(self.config.regularisation)
        right = self.config.weight * weighted.sum(1, keepdim=True).transpose(1, 2)
        factors = torch.cholesky_solve(right, torch.linalg.cholesky(matrix)).squeeze(-1)
        fitted = torch.bmm(rows, factors.unsqueeze(-1)).squeeze(-1)
        return _Solved(factors, fitted, shares)

    def _losses(self, solved: _Solved, parameters: Mapping[str, Tensor], block: Block) -> Tensor:
        """Mean weighted squared error over the catalogue, `float64 [C]`; NaN for a client that
        likes nothing."""
        factors = solved.factors.double()
        fitted = solved.fitted.double()
        shares = solved.shares.double()
        every = ((factors @ parameters["item.gram"].double()) * factors).sum(1)
        liked = (shares * (self.config.weight * (1 - fitted).square() - fitted.square())).sum(1)
        means = (every + liked) / self.model.schema.num_items
        return torch.where(self._idle(block)[:, 0], math.nan, means)

    def _idle(self, block: Block) -> Tensor:
        """`bool [C, 1]`: who has nothing to solve for."""
        return torch.tensor(block.touched_counts, device=block.touched.device)[:, None] == 0
