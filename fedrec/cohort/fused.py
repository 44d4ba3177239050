# SPDX-License-Identifier: Apache-2.0
"""Layers whose backward pass takes the SGD step of their own parameters.

Plain SGD adds `-learning_rate * inputs^T @ gradient` to a weight. Done at once, the gradient of the weight, the largest
tensor of a step, is never made. `fedrec.cohort.layers` turns to these layers wherever all parameters of a layer are
marked by a `FusedDescent`; who writes a model need not know them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fedrec.cohort.compiled import CompiledPerceptron
from fedrec.cohort.held import HeldMix, same_memory
from fedrec.cohort.sgd import Group
from fedrec.cohort.tape import Ending, Tape, TapeContext

Activation = Literal["relu", "sigmoid", "tanh"]
_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
}
_THRESHOLD_BACKWARD = torch.ops.aten.threshold_backward.default
_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda gradient, outputs: _THRESHOLD_BACKWARD(gradient, outputs, 0),
    "sigmoid": torch.ops.aten.sigmoid_backward.default,
    "tanh": torch.ops.aten.tanh_backward.default,
}


class FusedDescent:
    """Marks a parameter (as its attribute `descent`) that a layer may update in place in its backward pass.

    A parameter may then be used only once in a forward pass.

    Args:
        parameter: the parameter, `[C, ...]`.
        learning_rate: step size.
        anchor: a tensor that requires a gradient, so that autograd visits layers whose other inputs do not; None where
            a tape takes autograd's place.
        group: the parameter of all clients, of which others may stand for parts (`Group.part`, `HeldMix`); None: layers
            work on `parameter` itself.

    Attributes:
        claimed: whether a layer of this forward pass will update it.
        tape: where layers note what they do; None: autograd does.
        compiled: by shapes of inputs, the compiled code for the perceptron whose first weight this is; None: none fits.
    """

    def __init__(
        self,
        parameter: Tensor,
        learning_rate: float,
        anchor: Tensor | None = None,
        group: Group | None = None,
    ) -> None:
        self.parameter, self.learning_rate, self.anchor, self.group = parameter, learning_rate, anchor, group
        self.claimed = False
        self.tape: Tape | None = None
        self._row: Tensor | None = None
        self._ones: Tensor | None = None
        self.compiled: dict[tuple[torch.Size, ...], CompiledPerceptron | None] = {}
        self._parts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    @property
    def row(self) -> Tensor:
        """A bias as `[C, 1, out]`: a view, made once for all steps."""
        if self._row is None:
            self._row = self.parameter.unsqueeze(1)
        return self._row

    def descend_row(self, gradient: Tensor) -> None:
        """The step of a bias, given the gradient `[C, B, out]` of what it was added to."""
        if self._ones is None or self._ones.shape[2] != gradient.shape[1]:
            self._ones = gradient.new_ones(gradient.shape[0], 1, gradient.shape[1])
        self.row.baddbmm_(self._ones, gradient, alpha=-self.learning_rate)  # sooner done than a sum and then the step

    def rows(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Some rows of a weight, `[C, count, out]`, and the same transposed; made once for all steps."""
        if (start, count) not in self._parts:
            if self.group is None or count == self.parameter.shape[1]:
                part = self.parameter.narrow(1, start, count)
            else:
                part = self.group.part(start, count)[: len(self.parameter)]
            self._parts[start, count] = part, part.transpose(1, 2)
        return self._parts[start, count]


def claimed(parameters: Sequence[Tensor]) -> list[FusedDescent] | None:
    """Note that a layer uses these parameters and will update them; None unless all are to be updated there.

    Raises:
        ValueError: one is used already; the first use's update would change what the second computes with.
    """
    descents: list[FusedDescent] = [getattr(parameter, "descent", None) for parameter in parameters]  # type: ignore[misc]
    if not descents or None in descents:
        return None
    for descent in descents:
        if descent.claimed:
            raise ValueError("Expected each parameter in one layer of a forward pass, got one in two of them.")
        descent.claimed = True
    return descents


def fused_rows(fused: list[FusedDescent], shares: Sequence[Tensor], tables: Sequence[Tensor]) -> Tensor:
    """`fedrec.cohort.layers.mixed_rows` of claimed tables."""
    held, tape = _held(fused, shares), fused[0].tape
    if held is not None and tape is not None:
        return tape.apply(_HeldRows, (), held, shares[0].shape[0])
    return _applied(MixedRows, fused[0], (), fused, shares, tables)


def fused_perceptron(
    fused: list[FusedDescent],
    parts: Sequence[Sequence[Tensor]],
    weights: Sequence[Tensor],
    activation: Activation,
) -> Tensor:
    """`fedrec.cohort.layers.perceptron`; `fused` are its weights and then its biases."""
    _let_go(fused)
    flat = [part for group in parts for part in group]
    passes = _compiled(fused, flat, len(weights), activation)
    if passes is not None:
        return _applied(CompiledLayers, fused[0], flat, passes, *flat)
    settings = fused, activation, [len(group) for group in parts], weights
    return _applied(_Perceptron, fused[0], flat, settings, *flat)


class WeightedCrossEntropy(Ending):
    """The gradient is (sigmoid(logit) - label) times the weight: one operation where autograd would make six."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        ctx.to_logits = torch.sigmoid(logits).sub_(labels).mul_(weights)
        if not isinstance(ctx, TapeContext):
            return cross_entropies(logits, labels, weights)
        ctx.later = logits, labels, weights
        return logits.new_full(logits.shape[:1], math.nan)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.to_logits * gradient.unsqueeze(-1), None, None

    @staticmethod
    def backward_of_sum(ctx: Any) -> tuple[Tensor, None, None]:
        """See `Ending.backward_of_sum`."""
        return ctx.to_logits, None, None

    @staticmethod
    def losses(contexts: Sequence[Any]) -> Tensor:
        """See `Ending.losses`."""
        return cross_entropies(*map(torch.stack, zip(*(ctx.later for ctx in contexts), strict=True)))


class Biased(torch.autograd.Function):
    """Logits `[C, B]` plus biases `[C, B, 1]`; here only so that a tape knows it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, biases: Tensor) -> Tensor:
        return logits + biases.squeeze(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient, gradient.unsqueeze(-1)


def joined(group: Sequence[Tensor]) -> Tensor:
    """Tensors `[C, B, i]` as one, `[C, B, sum of i]`."""
    return group[0] if len(group) == 1 else torch.cat(tuple(group), -1)


class MixedRows(torch.autograd.Function):
    """Weighted sums of the rows of tables, joined."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, fused: list[FusedDescent], shares: Sequence[Tensor], tables: Sequence[Tensor]
    ) -> Tensor:
        ctx.fused, ctx.shares, ctx.tables = fused, shares, tables
        return joined([torch.bmm(share, table) for share, table in zip(shares, tables, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:  # type: ignore[override]
        start = 0
        for descent, share, table in zip(ctx.fused, ctx.shares, ctx.tables, strict=True):
            own = gradient if len(ctx.tables) == 1 else gradient.narrow(-1, start, table.shape[2])
            table.baddbmm_(share.transpose(1, 2), own, alpha=-descent.learning_rate)
            start += table.shape[2]
        return None, None, None, None


class _HeldRows(torch.autograd.Function):
    """A mix that stands for its tables."""

    @staticmethod
    def forward(ctx: Any, held: HeldMix, clients: int) -> Tensor:
        ctx.held = held
        return held.value(clients)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:  # type: ignore[override]
        ctx.held.descend(gradient)
        return None, None


class _Perceptron(torch.autograd.Function):
    """A multi-layer perceptron: the steps of all its layers."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, settings: tuple[Any, ...], *parts: Tensor) -> Tensor:
        ctx.settings, ctx.widths = settings, [part.shape[2] for part in parts]
        fused, activation, sizes, weights = settings
        activate, places = _IN_PLACE[activation], iter(parts)
        ctx.groups, start = [], 0
        for size in sizes:
            group = joined([next(places) for _ in range(size)])
            ctx.groups.append((group, *fused[0].rows(start, group.shape[2])))
            start += group.shape[2]
        bias_rows = [descent.row for descent in fused[len(weights) :]]
        hidden = bias_rows[0]
        for group, rows, _ in sorted(ctx.groups, key=lambda own: own[0].shape[1]):
            hidden = torch.baddbmm(hidden, group, rows)
        ctx.hidden = []
        for weight, bias in zip(weights[1:], bias_rows[1:], strict=True):
            ctx.hidden.append(activate(hidden))
            hidden = torch.baddbmm(bias, hidden, weight)
        return hidden.squeeze_(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        fused, activation, sizes, weights = ctx.settings
        layers, through = len(weights), _BACKWARD[activation]
        gradient = gradient if gradient.dim() == 3 else gradient.unsqueeze(-1)
        for layer in range(layers - 1, 0, -1):
            weight, descent, hidden = weights[layer], fused[layer], ctx.hidden[layer - 1]
            before = torch.bmm(gradient, descent.rows(0, weight.shape[1])[1])
            weight.baddbmm_(hidden.transpose(1, 2), gradient, alpha=-descent.learning_rate)
            fused[layers + layer].descend_row(gradient)
            gradient = through(before, hidden)
        summed = gradient.sum(1, keepdim=True)
        fused[layers].row.sub_(summed, alpha=fused[layers].learning_rate)
        to_groups = []
        for group, rows, transposed in ctx.groups:
            own = summed if group.shape[1] == 1 else gradient
            to_groups.append(torch.bmm(own, transposed))
            rows.baddbmm_(group.transpose(1, 2), own, alpha=-fused[0].learning_rate)
        return None, None, *_split(to_groups, sizes, ctx.widths)


class CompiledLayers(torch.autograd.Function):
    """The same in compiled code."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, passes: CompiledPerceptron, *parts: Tensor) -> Tensor:
        ctx.passes, ctx.parts = passes, [part.contiguous() for part in parts]
        return passes.forward(ctx.parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, None, *ctx.passes.backward(ctx.parts, gradient)


def _compiled(
    fused: Sequence[FusedDescent], parts: Sequence[Tensor], layers: int, activation: Activation
) -> CompiledPerceptron | None:
    """The compiled code for a perceptron, made once for all steps with inputs of these shapes; None: there is none."""
    known, group = fused[0].compiled, fused[0].group
    if group is not None and group.in_parts:  # what stands for it moved meanwhile
        return None
    shapes = tuple(part.shape for part in parts)
    if shapes not in known:
        parameters, rates = [own.parameter for own in fused], [own.learning_rate for own in fused]
        known[shapes] = CompiledPerceptron.of(parts, parameters[:layers], parameters[layers:], rates, activation)
    return known[shapes]


def cross_entropies(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums over the last dimension of the cross-entropies of logits, `[..., B] -> [...]`."""
    # Not by way of torch.nn.functional, whose checks take longer than the work.
    return torch.binary_cross_entropy_with_logits(logits, labels, weights, None, 0).sum(-1)


def _applied(function: Any, fused: FusedDescent, known: Sequence[Tensor], *arguments: Any) -> Tensor:
    """Run a layer; the tape, if there is one, or autograd takes note of it."""
    if fused.tape is None:
        return function.apply(fused.anchor, *arguments)
    return fused.tape.apply(function, known, None, *arguments)


def _held(fused: Sequence[FusedDescent], shares: Sequence[Tensor]) -> HeldMix | None:
    """The mix that stands for tables; None unless a tape sees the same shares of them again."""
    groups = [descent.group for descent in fused if descent.group is not None]
    held = groups[0].held if groups else None
    if isinstance(held, HeldMix) and held.fits(groups, shares):
        return held
    _let_go(fused)
    if len(groups) < len(fused) or fused[0].tape is None or any(share.shape[1] > 1 for share in shares):
        return None
    seen, groups[0].seen = groups[0].seen, shares  # kept alive, or other shares could come to lie in the same memory
    if len(seen) != len(shares) or not all(map(same_memory, shares, seen)):
        return None
    held = HeldMix(groups, shares)
    for group in groups:
        group.held = held
    return held


def _let_go(fused: Sequence[FusedDescent]) -> None:
    """Make tables stand for themselves again."""
    for descent in fused:
        if descent.group is not None and descent.group.held is not None:
            descent.group.held.settle()


def _split(groups: Sequence[Tensor], sizes: Sequence[int], widths: Sequence[int]) -> list[Tensor]:
    """The gradient of each part from the gradients of the joined groups."""
    found, place = [], 0
    for group, size in zip(groups, sizes, strict=True):
        found += [group] if size == 1 else group.split_with_sizes(widths[place : place + size], -1)
        place += size
    return found
