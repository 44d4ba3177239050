# SPDX-License-Identifier: Apache-2.0
"""Settings and steps of SGD, and SGD on all clients of a block by autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from fedrec.device import on_device
from fedrec.models.base import Model
from fedrec.nn.layers import all_rows
from fedrec.training.block import Block
from fedrec.training.recorded_steps import run_steps
from fedrec.training.results import BlockUpdate, add_to_rows, rows_at

Number = int | Tensor
"""Number of a step; of one on the device `int64 [1]`."""


@dataclass(frozen=True)
class SgdSettings:
    """Settings of one gradient step; their meaning is that of the local SGD step.

    Attributes:
        learning_rate: step size, > 0.
        proximal_mu: weight of the proximal term (FedProx), >= 0.
        rates: by name, factors >= 0 on the learning rate; 1 for a parameter that is not named.
        late: names of the parameters that are trained in the last epoch only.
    """

    learning_rate: float
    proximal_mu: float = 0.0
    rates: Mapping[str, float] = field(default_factory=dict)
    late: frozenset[str] = frozenset()

    @property
    def plain(self) -> bool:
        """True if a parameter without a gradient stays as it is, so that only the rows of a batch
        need an update."""
        return not self.proximal_mu

    def rate(self, name: str) -> float:
        """Step size of one parameter."""
        return self.learning_rate * self.rates.get(name, 1.0)


@dataclass(eq=False)
class Group:
    """One parameter of all clients, updated by gradients.

    Attributes:
        value: `[C, ...]`; of plain steps it may be what the clients start from, and is replaced by
            the first one and updated in place from then on.
        sgd: settings of the steps.
        name: of the parameter.
        block: the clients.
        given: whether `value` is not to be changed.
        rate: step size.
    """

    value: Tensor
    sgd: SgdSettings
    name: str
    block: Block
    given: bool = False

    def __post_init__(self) -> None:
        self._anchor = self.value  # centre of the proximal term
        if not self.sgd.plain:
            self.given = True
            self.make_own()
        self.rate = self.sgd.rate(self.name)
        self.late = self.name in self.sgd.late
        block = self.block
        begins = torch.tensor(block.steps) - torch.tensor(block.last_epoch) if self.late else None
        self._first = 0 if begins is None else int(begins.min())
        self._begins = None if begins is None else on_device(begins, self.value.device)

    def make_own(self) -> Tensor:
        """Copy the value if it is not to be changed; returns it, `[C, ...]`."""
        if self.given:
            self.value = self.value.clone(memory_format=torch.contiguous_format)
            self.given = False
        return self.value

    def moves(self, step: int) -> bool:
        """True if the gradient of this step has an effect for any client."""
        if not self.sgd.plain:
            return True
        return self.rate > 0 and self._first <= step

    def rows(self, rows: Tensor, active: int) -> Tensor:
        """Copies of rows `[active, B, d]` of a table `[C, R, d]` at `int64 [active * B]`."""
        return self._flat.index_select(0, rows).view(active, -1, self.value.shape[-1])

    def descend_rows(
        self, gradient: Tensor | None, rows: Tensor, active: int, step: Number
    ) -> None:
        """One step with the gradient `[active, B, d]` of gathered rows; a row that was gathered
        twice gets both gradients."""
        if gradient is None:
            self.descend(None, active, step)
            return
        if self.sgd.plain:
            flat = self._held(gradient, step).reshape(-1, gradient.shape[-1])
            add_to_rows(self._flat, rows, flat, -self.rate)
            return
        whole = torch.zeros_like(self.value)
        flat = gradient.reshape(-1, gradient.shape[-1])
        add_to_rows(whole.view(-1, whole.shape[-1]), rows, flat, 1.0)
        self.descend(whole[:active], active, step)

    def active(self, clients: int) -> Tensor:
        """The values of so many clients, `[clients, ...]`, in the same memory."""
        return self.value if clients == self.value.shape[0] else self.value[:clients]

    def descend(self, gradient: Tensor | None, active: int, step: Number) -> None:
        """One step of the first `active` clients with the gradient `[active, ...]`; None is a
        gradient of zero."""
        if gradient is not None:
            self.make_own()
        value = self.active(active)
        if self.sgd.plain:
            if gradient is not None:
                value.sub_(self._held(gradient, step), alpha=self.rate)
            return
        gradient = torch.zeros_like(value) if gradient is None else gradient
        gradient = gradient + self.sgd.proximal_mu * (value - self._anchor[:active])
        value.sub_(self._held(gradient, step), alpha=self.rate)

    def _held(self, gradient: Tensor, step: Number) -> Tensor:
        """A gradient `[a, ...]`, zero for the clients whose late parameters are not trained yet."""
        if self._begins is None:
            return gradient
        return _of_clients(gradient, self._begins[: len(gradient)] <= step)

    @cached_property
    def _flat(self) -> Tensor:
        """The rows of a table of all clients end to end, `[C * R, d]`."""
        return self.value.view(-1, self.value.shape[-1])


def _of_clients(gradient: Tensor, clients: Tensor) -> Tensor:
    """A gradient `[a, ...]`, zero for all but some clients, `bool [a]`."""
    return gradient.where(clients.view(-1, *[1] * (gradient.dim() - 1)), 0.0)


def _descend_all(
    groups: Sequence[Group], gradients: Mapping[str, Tensor | None], active: int, step: Number
) -> None:
    """`Group.descend` of many parameters, with the gradients `[active, ...]` by name; those of one
    rate in one call."""
    together: dict[tuple[float, bool], list[tuple[Group, Tensor]]] = {}
    for group in groups:
        gradient = gradients.get(group.name)
        if not group.sgd.plain or group.late:
            group.descend(gradient, active, step)
        elif gradient is not None:
            if active < len(group.value):
                group.make_own()
            together.setdefault((group.rate, group.given), []).append((group, gradient))
    for (rate, given), moves in together.items():
        values = [group.active(active) for group, _ in moves]
        changes = [gradient for _, gradient in moves]
        if not given:
            torch._foreach_add_(values, changes, alpha=-rate)  # pyright: ignore[reportPrivateImportUsage]
            continue
        moved = torch._foreach_add(values, changes, alpha=-rate)  # pyright: ignore[reportPrivateImportUsage]
        for (group, _), value in zip(moves, moved, strict=True):
            group.value = value
            group.given = False


# SGD on all clients of a block at once, by autograd over a leading cohort dimension.


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
    """
    item_tables = [name for name in model.item_tables if name in start]
    cohort = _Cohort.of(start, client_params or {}, block, sgd, item_tables)
    objective = objective or Recommending(model)
    # otherwise the values of clients who have ended would still change
    capturable = objective.capturable and sgd.plain
    losses = run_steps(block, partial(cohort.step, objective), cohort.moving, capturable)
    means = block.last_epoch_means(losses)
    values = {name: group.make_own() for name, group in {**cohort.dense, **cohort.tables}.items()}
    return BlockUpdate.from_values(start, block, values, item_tables, means)


@dataclass(frozen=True, eq=False)
class _Cohort:
    """Everything that is trained.

    Attributes:
        block: the clients.
        tables: the touched rows of the item tables, `[C, R, d]`.
        dense: all other parameters, `[C, ...]`.
    """

    block: Block
    tables: dict[str, Group]
    dense: dict[str, Group]

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
                tables[name] = Group(rows, sgd, name, block)
            else:
                begin = client_params.get(name, value.expand(cohort, *value.shape))
                dense[name] = Group(begin, sgd, name, block, given=True)
        return cls(block, tables, dense)

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
                name: None if values is None else _of_clients(values, training)
                for name, values in gradients.items()
            }
        _descend_all(list(self.dense.values()), gradients, active, number)
        for name, group in self.tables.items():
            group.descend_rows(gradients.get(name), indices, active, number)
        return loss.detach()
