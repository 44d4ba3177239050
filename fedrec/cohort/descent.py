# SPDX-License-Identifier: Apache-2.0
"""SGD on all clients of a block at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    """

    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal_mu: float = 0.0

    @property
    def plain(self) -> bool:
        """Whether a parameter without a gradient stays as it is, so that only the rows of a batch need an update."""
        return not (self.momentum or self.weight_decay or self.proximal_mu)


def descend(model: Model, start: Mapping[str, Tensor], block: Block, sgd: SgdSettings) -> Trained:
    """Train every client of a block on its batches.

    Args:
        model: the model; its `item_tables` become compact.
        start: the global parameters, without cohort dimension; unchanged.
        block: the clients.
        sgd: settings of the gradient steps.

    Returns:
        The trained parameters of every client.
    """
    cohort = len(block)
    dense = {
        name: _Group(value.expand(cohort, *value.shape).clone(), value, sgd)
        for name, value in start.items()
        if name not in model.item_tables
    }
    tables = {}
    for name in model.item_tables:
        rows = start[name][block.touched]
        tables[name] = _Group(rows, rows.clone() if sgd.proximal_mu else 0.0, sgd)
    # A row that is in no batch decays or is pulled like any other: it becomes its start times one number per client.
    untouched = _Group(torch.ones(cohort, 1, device=block.touched.device), 1.0, sgd)
    losses = torch.zeros(len(block.active), cohort)
    slots = torch.arange(block.items.shape[2], device=block.items.device).expand(cohort, -1)
    for step, active in enumerate(block.active):
        rows = block.rows[step, :active]
        fused = FusedDescent(sgd.learning_rate) if sgd.plain else None
        leaves = {name: group.leaf(active, fused) for name, group in dense.items()}
        gathered = {name: group.rows(rows).requires_grad_() for name, group in tables.items()}
        users, items = tuple(codes[:active] for codes in block.users), block.items[step, :active]
        predicted = model.predict({**leaves, **gathered}, users, items, rows=slots[:active])
        loss = model.loss(predicted, block.labels[step, :active], block.weights[step, :active])
        inputs = [*leaves.values(), *gathered.values()]
        gradients = iter(torch.autograd.grad(loss.sum(), inputs, allow_unused=True))
        for group in dense.values():
            group.descend(next(gradients), active)
        for group in tables.values():
            group.descend_rows(next(gradients), rows)
        untouched.descend(None, active)
        losses[step, :active] = loss.detach().cpu()
    values = {name: group.value for name, group in {**dense, **tables}.items()}
    return Trained(start, block, values, tuple(model.item_tables), untouched.value.view(-1), losses)


@dataclass(eq=False)
class _Group:
    """One parameter of all clients, `[C, ...]`, and how a gradient changes it in place."""

    value: Tensor
    anchor: Tensor | float
    sgd: SgdSettings
    buffer: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        self.buffer = torch.zeros_like(self.value) if self.sgd.momentum else None
        if isinstance(self.anchor, Tensor) and self.anchor.dim() < self.value.dim():
            self.anchor = self.anchor.expand_as(self.value)

    def leaf(self, active: int, fused: FusedDescent | None) -> Tensor:
        """The first `active` clients' values, to be differentiated; they share memory with this group."""
        leaf = self.value[:active].detach().requires_grad_()
        if fused is not None:
            leaf.descent = fused  # type: ignore[attr-defined]
        return leaf

    def rows(self, index: Tensor) -> Tensor:
        """Rows of a table `[C, R, d]`: `int64 [a, B]` gives `[a, B, d]`, a copy."""
        return self._flat().index_select(0, self._places(index)).view(*index.shape, -1)

    def descend_rows(self, gradient: Tensor, index: Tensor) -> None:
        """One step with the gradient `[a, B, d]` of gathered rows; a row that was gathered twice gets both."""
        flat = gradient.reshape(-1, gradient.shape[-1])
        if self.sgd.plain:
            self._flat().index_add_(0, self._places(index), flat, alpha=-self.sgd.learning_rate)
            return
        whole = torch.zeros_like(self.value)
        whole.view(-1, whole.shape[-1]).index_add_(0, self._places(index), flat)
        self.descend(whole[: len(index)], len(index))

    def descend(self, gradient: Tensor | None, active: int) -> None:
        """One step of the first `active` clients; None is a gradient of zero."""
        value = self.value[:active]
        if self.sgd.plain:
            if gradient is not None:
                value.sub_(gradient, alpha=self.sgd.learning_rate)
            return
        gradient = torch.zeros_like(value) if gradient is None else gradient
        gradient = gradient + self.sgd.weight_decay * value
        anchor = self.anchor[:active] if isinstance(self.anchor, Tensor) else self.anchor
        gradient = gradient + self.sgd.proximal_mu * (value - anchor)
        if self.buffer is not None:
            gradient = self.buffer[:active].mul_(self.sgd.momentum).add_(gradient)
        value.sub_(gradient, alpha=self.sgd.learning_rate)

    def _flat(self) -> Tensor:
        return self.value.view(-1, self.value.shape[-1])

    def _places(self, index: Tensor) -> Tensor:
        shift = torch.arange(len(index), device=index.device)[:, None] * self.value.shape[1]
        return (index + shift).reshape(-1)
