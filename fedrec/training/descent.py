# SPDX-License-Identifier: Apache-2.0
"""SGD on all clients of a block at once, by autograd over a leading cohort dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from fedrec.models.base import Model
from fedrec.nn.layers import all_rows
from fedrec.training.block import Block
from fedrec.training.recorded_steps import run_steps
from fedrec.training.results import BlockUpdate, rows_at
from fedrec.training.sgd import Group, SgdSettings, descend_all, of_clients


class Objective(Protocol):
    """The objective of local training.

    Attributes:
        capturable: whether it neither reads from a GPU nor copies to it, and takes its random
            numbers from the block, so that a step can be recorded as a CUDA graph.
    """

    @property
    def capturable(self) -> bool: ...

    def __call__(
        self, parameters: Mapping[str, Tensor], block: Block, step: int, active: int
    ) -> Tensor:
        """Loss of a step for each active client, `[active]`.

        Args:
            parameters: of the first `active` clients, `[active, ...]` each; of an item table the
                rows that the step needs, `[active, N, d]`, in the order of `Block.rows`.
            block: the clients.
            step: which step.
            active: number of clients that still train.
        """
        ...


class Recommending:
    """The model's own loss on the examples of a step."""

    def __init__(self, model: Model) -> None:
        self.model = model

    @property
    def capturable(self) -> bool:
        """True if the model's predictions and loss are those of a declared kernel."""
        return self.model.kernel() is not None

    def __call__(
        self, parameters: Mapping[str, Tensor], block: Block, step: int, active: int
    ) -> Tensor:
        users = tuple(codes[:active] for codes in block.users)
        items = block.items[step, :active]
        rows = all_rows(*items.shape, items.device)
        predicted = self.model.predict(parameters, users, items, rows=rows)
        return self.model.loss(predicted, block.labels[step, :active], block.weights[step, :active])


def descend(
    model: Model,
    start: Mapping[str, Tensor],
    block: Block,
    sgd: SgdSettings,
    objective: Objective | None = None,
    client_params: Mapping[str, Tensor] | None = None,
) -> BlockUpdate:
    """Train every client of a block on its batches.

    Args:
        model: the model; its `item_tables` become compact.
        start: the parameters that are trained, without cohort dimension; unchanged.
        block: the clients.
        sgd: settings of the gradient steps.
        objective: the objective; None: the model's own loss.
        client_params: initial values that differ between clients, `[C, ...]` each, unchanged; of
            an item table the block's touched rows.

    Returns:
        The trained parameters of every client.

    Raises:
        ValueError: rows that are in no batch change (weight decay or a proximal term), and item
            tables differ in their rates or in being late, so that one factor per client cannot
            describe the change.
    """
    item_tables = [name for name in model.item_tables if name in start]
    if not sgd.plain and len({(sgd.rate(name), name in sgd.late) for name in item_tables}) > 1:
        raise ValueError(
            "Expected item tables of one rate, all late or none, with decay or a pull."
        )
    cohort = _Cohort.of(start, client_params or {}, block, sgd, item_tables)
    objective = objective or Recommending(model)
    # otherwise the values of clients who have ended would still change
    capturable = objective.capturable and sgd.plain
    losses = run_steps(block, partial(cohort.step, objective), cohort.moving, capturable)
    means = block.last_epoch_means(losses)
    values = {name: group.make_own() for name, group in {**cohort.dense, **cohort.tables}.items()}
    untouched = None if sgd.plain else cohort.untouched.value.view(-1)
    return BlockUpdate.from_values(start, block, values, item_tables, means, untouched)


@dataclass(frozen=True, eq=False)
class _Cohort:
    """Everything that is trained.

    Attributes:
        block: the clients.
        tables: the touched rows of the item tables, `[C, R, d]`.
        dense: all other parameters, `[C, ...]`.
        untouched: `[C, 1]`, factor on rows that are in no batch: weight decay and proximal term
            apply to them, too.
    """

    block: Block
    tables: dict[str, Group]
    dense: dict[str, Group]
    untouched: Group

    @classmethod
    def of(
        cls,
        start: Mapping[str, Tensor],
        client_params: Mapping[str, Tensor],
        block: Block,
        sgd: SgdSettings,
        item_tables: Sequence[str],
    ) -> _Cohort:
        """The initial values of every client; of item tables a copy of its rows."""
        cohort = len(block)
        tables = {}
        dense = {}
        for name, value in start.items():
            if name in item_tables:
                rows = (
                    client_params[name].clone()
                    if name in client_params
                    else rows_at(value, block.touched)
                )
                tables[name] = Group(
                    rows, rows.clone() if sgd.proximal_mu else 0.0, sgd, name, block
                )
            else:
                begin = client_params.get(name, value.expand(cohort, *value.shape))
                dense[name] = Group(begin, begin, sgd, name, block, given=True)
        factors = torch.ones(cohort, 1, device=block.touched.device)
        return cls(
            block, tables, dense, Group(factors, 1.0, sgd, next(iter(item_tables), ""), block)
        )

    def moving(self, step: int) -> tuple[str, ...]:
        """The parameters whose gradient has an effect in a step."""
        groups = (*self.dense.items(), *self.tables.items())
        return tuple(name for name, group in groups if group.moves(step))

    def step(self, objective: Objective, block: Block, step: int, active: int) -> Tensor:
        """One step of the first `active` clients, of the block or of one of its steps; returns each
        client's loss before the step, `[active]`."""
        number = step if block.number is None else block.number
        indices = block.rows[step, :active].flatten()
        rows = {name: group.rows(indices, active) for name, group in self.tables.items()}
        leaves = {name: group.active(active).detach() for name, group in self.dense.items()}
        moving = self.moving(step if block.number is None else block.like)
        given = {**leaves, **rows}
        for name in moving:
            given[name].requires_grad_()
        loss = objective(given, block, step, active)
        gradients: dict[str, Tensor | None] = {}
        if loss.requires_grad:  # otherwise no parameter changes in this step
            values = torch.autograd.grad(
                loss.sum(), [given[name] for name in moving], allow_unused=True
            )
            gradients = dict(zip(moving, values, strict=True))
        if block.training is not None:
            training = block.training[:active]
            gradients = {
                name: None if values is None else of_clients(values, training)
                for name, values in gradients.items()
            }
        descend_all(list(self.dense.values()), gradients, active, number)
        for name, group in self.tables.items():
            group.descend_rows(gradients.get(name), indices, active, number)
        self.untouched.descend(None, active, number)
        return loss.detach()
