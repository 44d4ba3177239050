# SPDX-License-Identifier: Apache-2.0
"""All steps of a block in one call of compiled code, for a forward pass whose layers are recognised in a rehearsal.

A step of a small network takes as long to be said in Python as to be computed, and a block that takes one step after
the other, each with all clients, has to fetch their parameters anew in every step. What repeats can do without both.
One client's first forward pass is rehearsed, on a copy, with a tape that notes its layers. If they are a perceptron on
inputs that come from the client's own features, from rows of item tables and from mixes by features of the items, with
the cross-entropy of its only output, and the model says that every step is like the first (`repeatable`), then compiled
code takes all steps, one client after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from fedrec.cohort.block import Block
from fedrec.cohort.compiled import CompiledPerceptron, Examples, Gathered, Held, Mixed, Source
from fedrec.cohort.fused import Biased, CompiledLayers, MixedRows, WeightedCrossEntropy, cross_entropies
from fedrec.cohort.held import HeldMix
from fedrec.cohort.sgd import Group
from fedrec.cohort.tape import Layer

_Function = TypeVar("_Function", bound=Callable[..., Tensor])


def repeatable(function: _Function) -> _Function:
    """Marks a model's `predict` or `loss` that uses the same layers on the same things in every step.

    That is, whatever the numbers are: it may not look at them to choose what to do. One that is overridden has the mark
    only if it is given it again.
    """
    function.repeatable = True  # type: ignore[attr-defined]
    return function


def is_repeatable(function: Callable[..., Tensor]) -> bool:
    """Whether it is marked so; see `repeatable`."""
    return getattr(function, "repeatable", False)


@dataclass(frozen=True, eq=False)
class Trainees:
    """The clients that compiled code may train, those of a block that have steps at all.

    Attributes:
        block: the block; they are its first.
        dense: all parameters but the item tables, by name.
        tables: the touched rows of the item tables, by name.
        users: what the model makes of their features, `[a, ...]`.
        inputs: what it makes of the items of `Block.touched`, `[C, R, ...]`.
    """

    block: Block
    dense: Mapping[str, Group]
    tables: Mapping[str, Group]
    users: Sequence[Tensor]
    inputs: Sequence[Tensor]

    def __len__(self) -> int:
        return self.block.active[0]

    def values(self, name: str) -> Tensor:
        """Their own values of a parameter, `[a, ...]`."""
        return self.dense[name].value[: len(self)]


@dataclass(frozen=True)
class _HeldPart:
    """An input that mixes rows of tables by the users' features: in every step the same, so it stands for them."""

    tables: tuple[str, ...]
    users: tuple[int, ...]

    def source(self, trainees: Trainees) -> Held:
        groups, shares = [trainees.dense[name] for name in self.tables], [trainees.users[place] for place in self.users]
        mix = HeldMix(groups, shares)
        for group in groups:
            group.held = mix
        return Held(*mix.first(len(trainees)))


@dataclass(frozen=True)
class _GatheredPart:
    """An input that is rows of an item table."""

    table: str

    def source(self, trainees: Trainees) -> Gathered:
        group = trainees.tables[self.table]
        return Gathered(group.value.view(-1, group.value.shape[-1]), group.rate)


@dataclass(frozen=True)
class _MixedPart:
    """An input that mixes rows of a table by a feature of the items."""

    table: str
    inputs: int

    def source(self, trainees: Trainees) -> Mixed:
        shares = trainees.inputs[self.inputs]
        rate = trainees.dense[self.table].rate
        return Mixed(trainees.values(self.table), rate, shares.reshape(-1, shares.shape[-1]))


_Part = _HeldPart | _GatheredPart | _MixedPart


@dataclass(frozen=True)
class Recipe:
    """What happens in every step.

    Attributes:
        weights: names of the perceptron's weights.
        biases: names of its biases.
        parts: where its inputs come from.
        shapes: `(examples, width)` of the inputs.
        added: the table whose rows are added to its outputs.
    """

    weights: tuple[str, ...]
    biases: tuple[str, ...]
    parts: tuple[_Part, ...]
    shapes: tuple[tuple[int, int], ...]
    added: _GatheredPart | None

    def train(self, trainees: Trainees) -> Tensor | None:
        """Take all steps of these clients.

        Returns:
            The loss of each before it, `[S, a]`; None, and nothing has moved, where compiled code cannot do it.
        """
        block, names = trainees.block, (*self.weights, *self.biases)
        values, rates = [trainees.values(name) for name in names], [trainees.dense[name].rate for name in names]
        inputs = [torch.empty(1, 1, 1).expand(len(trainees), *shape) for shape in self.shapes]
        layers = len(self.weights)
        passes = CompiledPerceptron.of(inputs, values[:layers], values[layers:], rates, "relu")
        if passes is None:
            return None
        sources: list[Source] = [part.source(trainees) for part in self.parts]
        given = Examples(block.places, block.labels, block.weights, block.steps[: len(trainees)])
        logits = passes.train(sources, given, self.added.source(trainees) if self.added is not None else None)
        if logits is None:
            return None
        return cross_entropies(logits, block.labels, block.weights)[:, : len(trainees)]


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """The layers of a forward pass, and what they may have been given.

    Attributes:
        layers: what ran, in order.
        leaves: all parameters but the item tables, by name.
        rows: the gathered rows of the item tables, by name.
        users: what the model made of the clients' features.
        inputs: what it made of the items.
        labels: of the examples.
        weights: of the examples.
    """

    layers: Sequence[Layer]
    leaves: Mapping[str, Tensor]
    rows: Mapping[str, Tensor]
    users: Sequence[Tensor]
    inputs: Sequence[Tensor]
    labels: Tensor
    weights: Tensor

    def recipe(self) -> Recipe | None:
        """What was done; None if it is something else than what `Recipe` can say."""
        parts = self._parts()
        others = [layer for layer in self.layers if layer.function is not MixedRows]
        functions = [layer.function for layer in others if layer.function is not Biased]
        if parts is None or functions != [CompiledLayers, WeightedCrossEntropy] or not self._chained(others):
            return None
        perceptron, *biased, _ = others
        _, passes, *inputs = perceptron.arguments
        wanted = [parts.pop(id(own), None) for own in inputs]  # each may be used once
        added = [parts.pop(id(layer.arguments[1]), None) for layer in biased]
        names = _places(passes.parameters, self.leaves)
        known = [part for part in wanted if part is not None]
        if len(known) < len(wanted) or len(added) > 1 or names is None:
            return None
        rows = added[0] if added else None
        if added and not isinstance(rows, _GatheredPart):
            return None
        layers, shapes = len(names) // 2, tuple((own.shape[1], own.shape[2]) for own in inputs)
        bias = rows if isinstance(rows, _GatheredPart) else None
        return Recipe(tuple(names[:layers]), tuple(names[layers:]), tuple(known), shapes, bias)

    def _chained(self, layers: Sequence[Layer]) -> bool:
        """Whether layers that give logits follow each other, up to the loss of the labels."""
        for before, after in itertools.pairwise(layers):
            if after.arguments[0] is not before.output:
                return False
        return layers[-1].arguments[1] is self.labels and layers[-1].arguments[2] is self.weights

    def _parts(self) -> dict[int, _Part] | None:
        """What rows and mixes are, by their ids; None: one of them is something else."""
        parts: dict[int, _Part] = {id(own): _GatheredPart(name) for name, own in self.rows.items()}
        for layer in self.layers:
            if layer.function is MixedRows:
                part = self._mix(layer)
                if part is None:
                    return None
                parts[id(layer.output)] = part
        return parts

    def _mix(self, layer: Layer) -> _Part | None:
        _, _, shares, tables = layer.arguments
        names = _places(tables, self.leaves)
        users = _places(shares, dict(enumerate(self.users)))
        inputs = _places(shares, dict(enumerate(self.inputs)))
        if names is None:
            return None
        if users is not None and all(share.shape[1] == 1 for share in shares):
            return _HeldPart(tuple(names), tuple(users))
        return _MixedPart(names[0], inputs[0]) if inputs is not None and len(inputs) == 1 else None


_Place = TypeVar("_Place")


def _places(wanted: Sequence[Tensor], among: Mapping[_Place, Tensor]) -> list[_Place] | None:
    """Which of some tensors these are; None if one is not among them."""
    known = {id(tensor): place for place, tensor in among.items()}
    found = [known[id(tensor)] for tensor in wanted if id(tensor) in known]
    return found if len(found) == len(wanted) else None
