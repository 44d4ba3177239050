# SPDX-License-Identifier: Apache-2.0
"""The SGD step of one parameter of all clients of a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fedrec.device import on_device
from fedrec.training.block import Block
from fedrec.training.results import add_to_rows

Number = int | Tensor
"""Number of a step; of one on the device `int64 [1]`."""


@dataclass(frozen=True)
class SgdSettings:
    """Settings of one gradient step; their meaning is that of the local SGD step.

    Attributes:
        learning_rate: step size, > 0.
        weight_decay: L2 penalty added to the gradient, >= 0.
        proximal_mu: weight of the proximal term (FedProx), >= 0.
        rates: by name, factors >= 0 on the learning rate; 1 for a parameter that is not named.
        late: names of the parameters that are trained in the last epoch only.
    """

    learning_rate: float
    weight_decay: float = 0.0
    proximal_mu: float = 0.0
    rates: Mapping[str, float] = field(default_factory=dict)
    late: frozenset[str] = frozenset()

    @property
    def plain(self) -> bool:
        """True if a parameter without a gradient stays as it is, so that only the rows of a batch
        need an update."""
        return not (self.weight_decay or self.proximal_mu)

    def rate(self, name: str) -> float:
        """Step size of one parameter."""
        return self.learning_rate * self.rates.get(name, 1.0)


@dataclass(eq=False)
class Group:
    """One parameter of all clients, updated by gradients.

    Attributes:
        value: `[C, ...]`; of plain steps it may be what the clients start from, and is replaced by
            the first one and updated in place from then on.
        anchor: centre of the proximal term, `[C, ...]`, `[...]` or a number.
        sgd: settings of the steps.
        name: of the parameter.
        block: the clients.
        given: whether `value` is not to be changed.
        rate: step size.
    """

    value: Tensor
    anchor: Tensor | float
    sgd: SgdSettings
    name: str
    block: Block
    given: bool = False

    def __post_init__(self) -> None:
        if self.given and not self.sgd.plain:
            self.make_own()
        if isinstance(self.anchor, Tensor) and self.anchor.dim() < self.value.dim():
            self.anchor = self.anchor.expand_as(self.value)
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
        gradient = gradient + self.sgd.weight_decay * value
        anchor = self.anchor[:active] if isinstance(self.anchor, Tensor) else self.anchor
        gradient = gradient + self.sgd.proximal_mu * (value - anchor)
        value.sub_(self._held(gradient, step), alpha=self.rate)

    def _held(self, gradient: Tensor, step: Number) -> Tensor:
        """A gradient `[a, ...]`, zero for the clients whose late parameters are not trained yet."""
        if self._begins is None:
            return gradient
        return of_clients(gradient, self._begins[: len(gradient)] <= step)

    @cached_property
    def _flat(self) -> Tensor:
        """The rows of a table of all clients end to end, `[C * R, d]`."""
        return self.value.view(-1, self.value.shape[-1])


def of_clients(gradient: Tensor, clients: Tensor) -> Tensor:
    """A gradient `[a, ...]`, zero for all but some clients, `bool [a]`."""
    return gradient.where(clients.view(-1, *[1] * (gradient.dim() - 1)), 0.0)


def descend_all(
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
