# SPDX-License-Identifier: Apache-2.0
"""The SGD step of one parameter of all clients of a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from fedrec.cohort.block import Block


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
        return torch.tensor(block.steps) - self.late_epochs * torch.tensor(block.last_epoch)


class StandIn(Protocol):
    """Something that takes the steps of a parameter meanwhile, such as `fedrec.cohort.held.HeldMix`."""

    def settle(self) -> None:
        """Give the parameter what it has moved by."""
        ...


@dataclass(eq=False)
class Group:
    """One parameter of all clients, and how a gradient changes it in place.

    Attributes:
        value: `[C, ...]`.
        anchor: what FedProx pulls towards, `[C, ...]`, `[...]` or a number.
        sgd: settings of the steps.
        name: of the parameter.
        block: the clients.
        buffer: momentum, like `value`; None without.
        rate: step size.
        held: what stands for it until `join`; None: nothing.
        seen: what its rows counted when a layer last mixed them.
    """

    value: Tensor
    anchor: Tensor | float
    sgd: SgdSettings
    name: str
    block: Block
    buffer: Tensor | None = field(init=False)
    held: StandIn | None = field(init=False, default=None)
    seen: Sequence[Tensor] = field(init=False, default=())
    _parts: dict[tuple[int, int], Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.buffer = torch.zeros_like(self.value) if self.sgd.momentum else None
        if isinstance(self.anchor, Tensor) and self.anchor.dim() < self.value.dim():
            self.anchor = self.anchor.expand_as(self.value)
        self.rate, self._begins = self.sgd.rate(self.name), self.sgd.begins(self.name, self.block)

    @property
    def fusible(self) -> bool:
        """Whether a layer may take the step in its backward pass: it knows one rate for all, and no autocast."""
        lower = torch.is_autocast_enabled(self.value.device.type)
        return self.sgd.plain and self._begins is None and not lower

    def part(self, start: int, count: int) -> Tensor:
        """Some rows of a weight, `[C, count, out]`, as a tensor of its own, which replaces them until `join`.

        A batched product that changes a part of a larger tensor in place falls apart into one product per client.
        """
        if (start, count) not in self._parts:
            with torch.inference_mode(False):  # later steps may not be in inference mode, and change it all the same
                self._parts[start, count] = self.value.narrow(1, start, count).contiguous()
        return self._parts[start, count]

    @property
    def in_parts(self) -> bool:
        """Whether parts stand for some rows, which `value` does not know of until `join`."""
        return bool(self._parts)

    def join(self) -> None:
        """Make `value` whole again."""
        if self.held is not None:
            self.held.settle()
        for (start, count), part in self._parts.items():
            self.value.narrow(1, start, count).copy_(part)
        self._parts.clear()

    def moves(self, step: int) -> bool:
        """Whether the gradient of this step can matter to any client."""
        if not self.sgd.plain:
            return True
        return self.rate > 0 and (self._begins is None or bool((self._begins <= step).any()))

    def rows(self, places: Tensor, active: int) -> Tensor:
        """Rows of a table `[C, R, d]` by their flat places `int64 [active * B]`, `[active, B, d]`, a copy."""
        rows = self._flat.index_select(0, places).view(active, -1, self.value.shape[-1])
        rows.gathered = True  # type: ignore[attr-defined]
        return rows

    def descend_rows(self, gradient: Tensor | None, places: Tensor, active: int, step: int) -> None:
        """One step with the gradient `[active, B, d]` of gathered rows; a row that was gathered twice gets both."""
        if gradient is None:
            self.descend(None, active, step)
            return
        if self.sgd.plain:
            flat = self._held(gradient, step).reshape(-1, gradient.shape[-1])
            self._flat.index_add_(0, places, flat, alpha=-self.rate)
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

    @cached_property
    def _flat(self) -> Tensor:
        """The rows of a table of all clients end to end, `[C * R, d]`."""
        return self.value.view(-1, self.value.shape[-1])
