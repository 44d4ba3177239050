# SPDX-License-Identifier: Apache-2.0
"""SGD on all clients of a block at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fedrec.cohort.block import Block
from fedrec.cohort.layers import FusedDescent
from fedrec.cohort.trained import Trained
from fedrec.models.base import Model


@dataclass(frozen=True)
class SgdSettings:
    """Settings of one gradient step; their meaning is that of the local SGD step.

    Attributes:
        learning_rate: step size, > 0.
        momentum: heavy-ball momentum in [0, 1); starts at zero.
        weight_decay: L2 penalty added to the gradient, >= 0.
        proximal_mu: pull towards the global parameters, >= 0.
        rates: by name, factors >= 0 on the learning rate; 1 for a parameter that is not named.
        late: names of the parameters that move in the last `late_epochs` epochs only.
        late_epochs: see `late`.
    """

    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal_mu: float = 0.0
    rates: Mapping[str, float] = field(default_factory=dict)
    late: frozenset[str] = frozenset()
    late_epochs: int = 1

    @property
    def plain(self) -> bool:
        """Whether a parameter without a gradient stays as it is, so that only the rows of a batch need an update."""
        return not (self.momentum or self.weight_decay or self.proximal_mu)

    def rate(self, name: str) -> float:
        """Step size of one parameter."""
        return self.learning_rate * self.rates.get(name, 1.0)

    def begins(self, name: str, block: Block) -> Tensor | None:
        """`int64 [C]`: the first step, from 0, in which a late parameter of each client moves; None: not late."""
        if name not in self.late:
            return None
        steps = (torch.tensor(block.active)[:, None] > torch.arange(len(block))).sum(0)
        return steps - self.late_epochs * torch.tensor(block.last_epoch)


class Objective(Protocol):
    """What local training minimises."""

    def __call__(self, parameters: Mapping[str, Tensor], block: Block, step: int, active: int) -> Tensor:
        """Loss of a step, `[active]`.

        Args:
            parameters: of the first `active` clients, `[active, ...]` each; of an item table the rows that the step
                needs, `[active, N, d]`, in the order of `Block.places`.
            block: the clients.
            step: which step.
            active: how many clients still train.
        """
        ...


class Recommending:
    """The model's own loss on the examples of a step."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._views: tuple[Block, int, tuple[Tensor, ...], Tensor] | None = None

    def __call__(self, parameters: Mapping[str, Tensor], block: Block, step: int, active: int) -> Tensor:
        """See `Objective`."""
        users, slots = self._prefix(block, active)
        predicted = self.model.predict(parameters, users, block.items[step, :active], rows=slots)
        return self.model.loss(predicted, block.labels[step, :active], block.weights[step, :active])

    def _prefix(self, block: Block, active: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Codes and item slots of the first `active` clients; made once for all steps with the same clients."""
        if self._views is None or self._views[0] is not block or self._views[1] != active:
            slots = torch.arange(block.items.shape[2], device=block.items.device).expand(active, -1)
            users = self.model.user_inputs(tuple(codes[:active] for codes in block.users))
            self._views = block, active, users, slots
        return self._views[2:]


def descend(
    model: Model, start: Mapping[str, Tensor], block: Block, sgd: SgdSettings, objective: Objective | None = None
) -> Trained:
    """Train every client of a block on its batches.

    Args:
        model: the model; its `item_tables` become compact.
        start: the parameters that are trained, without cohort dimension; unchanged.
        block: the clients.
        sgd: settings of the gradient steps.
        objective: what is minimised; None: the model's own loss.

    Returns:
        The trained parameters of every client.

    Raises:
        ValueError: rows that are in no batch change (weight decay, momentum or a pull), and item tables differ in their
            rates or in being late; one number per client could not say how such rows change.
    """
    cohort, objective = len(block), objective or Recommending(model)
    item_tables = [name for name in model.item_tables if name in start]
    if not sgd.plain and len({(sgd.rate(name), name in sgd.late) for name in item_tables}) > 1:
        raise ValueError("Expected item tables of one rate, all late or none, with decay, momentum or a pull.")
    dense = {
        name: _Group(value.expand(cohort, *value.shape).clone(), value, sgd, name, block)
        for name, value in start.items()
        if name not in item_tables
    }
    tables = {}
    for name in item_tables:
        rows = start[name][block.touched]
        tables[name] = _Group(rows, rows.clone() if sgd.proximal_mu else 0.0, sgd, name, block)
    # A row that is in no batch decays or is pulled like any other: it becomes its start times one number per client.
    factors = torch.ones(cohort, 1, device=block.touched.device)
    untouched = _Group(factors, 1.0, sgd, next(iter(item_tables), ""), block)
    losses = torch.zeros(len(block.active), cohort, device=block.touched.device)
    prefix = None
    for step, active in enumerate(block.active):
        if prefix is None or prefix.active != active:
            prefix = _Prefix(block, dense, active)
        losses[step, :active] = prefix.descend(objective, block, step, tables)
        untouched.descend(None, active, step)
    values = {name: group.value for name, group in {**dense, **tables}.items()}
    return Trained(start, block, values, tuple(item_tables), untouched.value.view(-1), losses.cpu())


class _Prefix:
    """The first `active` clients of a block, those that still train: views of what belongs to them.

    The views are made once for all steps with the same clients, because making them costs as much as a small product.
    """

    def __init__(self, block: Block, dense: Mapping[str, _Group], active: int) -> None:
        self.active, self.dense = active, dense
        self.anchor = torch.zeros((), device=block.items.device, requires_grad=True)
        self.ones = torch.ones(active, device=block.items.device)
        self.leaves = {name: group.leaf(active) for name, group in dense.items()}
        fused = {name: group.rate for name, group in dense.items() if group.fusible}
        self.descents = {name: FusedDescent(rate, self.anchor) for name, rate in fused.items()}
        for name, descent in self.descents.items():
            self.leaves[name].descent = descent  # type: ignore[attr-defined]

    def descend(self, objective: Objective, block: Block, step: int, tables: Mapping[str, _Group]) -> Tensor:
        """One step of these clients; returns each one's loss before it."""
        active = self.active
        for descent in self.descents.values():
            descent.claimed = False
        places = block.places[step, :active].reshape(-1)
        gathered = {name: group.rows(places, active, step) for name, group in tables.items()}
        loss = objective({**self.leaves, **gathered}, block, step, active)
        left = [name for name in self.leaves if name not in self.descents or not self.descents[name].claimed]
        moving = [name for name, group in tables.items() if group.moves(step)]
        inputs = [self.anchor, *(self.leaves[name] for name in left), *(gathered[name] for name in moving)]
        gradients = iter(torch.autograd.grad(loss, inputs, self.ones, allow_unused=True)[1:])
        for name in left:
            self.dense[name].descend(next(gradients), active, step)
        for name in moving:
            tables[name].descend_rows(next(gradients), places, active, step)
        return loss.detach()


@dataclass(eq=False)
class _Group:
    """One parameter of all clients, `[C, ...]`, and how a gradient changes it in place."""

    value: Tensor
    anchor: Tensor | float
    sgd: SgdSettings
    name: str
    block: Block
    buffer: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        self.buffer = torch.zeros_like(self.value) if self.sgd.momentum else None
        if isinstance(self.anchor, Tensor) and self.anchor.dim() < self.value.dim():
            self.anchor = self.anchor.expand_as(self.value)
        self.rate, self._begins = self.sgd.rate(self.name), self.sgd.begins(self.name, self.block)

    @property
    def fusible(self) -> bool:
        """Whether a layer may take the step in its backward pass: it knows one rate for all clients."""
        return self.sgd.plain and self._begins is None

    def moves(self, step: int) -> bool:
        """Whether the gradient of this step can matter to any client."""
        if not self.sgd.plain:
            return True
        return self.rate > 0 and (self._begins is None or bool((self._begins <= step).any()))

    def leaf(self, active: int) -> Tensor:
        """The first `active` clients' values, to be differentiated; they share memory with this group."""
        return self.value[:active].detach().requires_grad_()

    def rows(self, places: Tensor, active: int, step: int) -> Tensor:
        """Rows of a table `[C, R, d]` by their flat places `int64 [active * B]`, `[active, B, d]`, a copy."""
        rows = self._flat().index_select(0, places).view(active, -1, self.value.shape[-1])
        rows.requires_grad_(self.moves(step))
        rows.gathered = True  # type: ignore[attr-defined]
        return rows

    def descend_rows(self, gradient: Tensor | None, places: Tensor, active: int, step: int) -> None:
        """One step with the gradient `[active, B, d]` of gathered rows; a row that was gathered twice gets both."""
        if gradient is None:
            self.descend(None, active, step)
            return
        if self.sgd.plain:
            flat = self._held(gradient, step).reshape(-1, gradient.shape[-1])
            self._flat().index_add_(0, places, flat, alpha=-self.rate)
            return
        whole = torch.zeros_like(self.value)
        whole.view(-1, whole.shape[-1]).index_add_(0, places, gradient.reshape(-1, gradient.shape[-1]))
        self.descend(whole[:active], active, step)

    def descend(self, gradient: Tensor | None, active: int, step: int) -> None:
        """One step of the first `active` clients; None is a gradient of zero."""
        value = self.value[:active]
        if self.sgd.plain:
            if gradient is not None:
                value.sub_(self._held(gradient, step), alpha=self.rate)
            return
        gradient = torch.zeros_like(value) if gradient is None else gradient
        gradient = gradient + self.sgd.weight_decay * value
        anchor = self.anchor[:active] if isinstance(self.anchor, Tensor) else self.anchor
        gradient = gradient + self.sgd.proximal_mu * (value - anchor)
        if self.buffer is not None:
            gradient = self.buffer[:active].mul_(self.sgd.momentum).add_(gradient)
        value.sub_(self._held(gradient, step), alpha=self.rate)

    def _held(self, gradient: Tensor, step: int) -> Tensor:
        """A gradient `[a, ...]`, zero for the clients whose late parameters do not move yet."""
        if self._begins is None:
            return gradient
        moving = (self._begins[: len(gradient)] <= step).to(gradient)
        return gradient * moving.view(-1, *[1] * (gradient.dim() - 1))

    def _flat(self) -> Tensor:
        return self.value.view(-1, self.value.shape[-1])
