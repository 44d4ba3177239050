# SPDX-License-Identifier: Apache-2.0
"""SGD on all clients of a block at once."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from fedrec.cohort.block import Block
from fedrec.cohort.compiled import at_hand
from fedrec.cohort.fused import FusedDescent
from fedrec.cohort.repetition import Rehearsal, Trainees
from fedrec.cohort.sgd import Group, SgdSettings
from fedrec.cohort.tape import Ended, NotTaped, Tape
from fedrec.cohort.trained import Trained
from fedrec.models.base import Model

_AHEAD = 32  # steps whose item inputs are made at once


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
        self._views: _Views | None = None

    def __call__(self, parameters: Mapping[str, Tensor], block: Block, step: int, active: int) -> Tensor:
        """See `Objective`."""
        views = self._views_of(block, active)
        place = step - views.first
        items = views.items_of(self.model, place)
        predicted = self.model.predict(parameters, views.users, items, rows=views.slots)
        return self.model.loss(predicted, views.labels[place], views.weights[place])

    def rehearsal(
        self, block: Block, tape: Tape, leaves: Mapping[str, Tensor], rows: Mapping[str, Tensor]
    ) -> Rehearsal:
        """What the layers on a tape are, which the first step of a block of one client was taken with."""
        views = self._views_of(block, 1)
        inputs = getattr(views.items[0], "inputs", ())
        return Rehearsal(tape.layers, leaves, rows, views.users, inputs, views.labels[0], views.weights[0])

    def _views_of(self, block: Block, active: int) -> _Views:
        """The views of these clients, made again when there are others."""
        if self._views is None or self._views.block is not block or self._views.active != active:
            earlier = self._views if self._views is not None and self._views.block is block else None
            self._views = _Views.of(self.model, block, active, earlier)
        return self._views


@dataclass(frozen=True, eq=False)
class _Views:
    """What belongs to the first `active` clients of a block in the steps that are theirs; made once for these steps.

    Attributes:
        block: the clients.
        active: how many of them.
        first: the first of their steps, from which on `items`, `labels` and `weights` are.
        users: what the model makes of their features.
        slots: places of a step's items among its gathered rows, `int64 [active, B]`.
        items: by step, `int64 [active, B]`.
        labels: by step, `float32 [active, B]`.
        weights: by step, `float32 [active, B]`.
    """

    block: Block
    active: int
    first: int
    users: tuple[Tensor, ...]
    slots: Tensor
    items: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]

    def items_of(self, model: Model, place: int) -> Tensor:
        """A step's items `int64 [active, B]` with their `Model.item_inputs`, made for `_AHEAD` steps at once."""
        if not hasattr(self.items[place], "inputs"):
            for done in self.items[:place]:
                vars(done).pop("inputs", None)
            coming = self.items[place : place + _AHEAD]
            with torch.inference_mode(False):  # autograd may come upon them, if a later step needs it
                made = [own.unbind() for own in model.item_inputs(torch.stack(coming))]
            for number, items in enumerate(coming):
                items.inputs = tuple(own[number] for own in made)  # type: ignore[attr-defined]
        return self.items[place]

    @classmethod
    def of(cls, model: Model, block: Block, active: int, earlier: _Views | None) -> _Views:
        """The views; what the model made of the users is made once, of all that `earlier` had."""
        slots = torch.arange(block.items.shape[2], device=block.items.device).expand(active, -1)
        if earlier is not None and earlier.active > active:
            users = tuple(own[:active] for own in earlier.users)
        else:
            users = model.user_inputs(tuple(codes[:active] for codes in block.users))
        steps = block.steps_of(active)
        span = slice(steps.start, steps.stop)
        views = (numbers[span, :active].unbind() for numbers in (block.items, block.labels, block.weights))
        return cls(block, active, steps.start, users, slots, *views)


def descend(
    model: Model,
    start: Mapping[str, Tensor],
    block: Block,
    sgd: SgdSettings,
    objective: Objective | None = None,
    own: Mapping[str, Tensor] | None = None,
) -> Trained:
    """Train every client of a block on its batches.

    Args:
        model: the model; its `item_tables` become compact.
        start: the parameters that are trained, without cohort dimension; unchanged.
        block: the clients.
        sgd: settings of the gradient steps.
        objective: what is minimised; None: the model's own loss.
        own: where clients start from parameters of their own instead, `[C, ...]` each, unchanged; no item tables.

    Returns:
        The trained parameters of every client.

    Raises:
        ValueError: rows that are in no batch change (weight decay, momentum or a pull), and item tables differ in their
            rates or in being late; one number per client could not say how such rows change.
    """
    item_tables = [name for name in model.item_tables if name in start]
    if not sgd.plain and len({(sgd.rate(name), name in sgd.late) for name in item_tables}) > 1:
        raise ValueError("Expected item tables of one rate, all late or none, with decay, momentum or a pull.")
    cohort, objective = _Cohort.of(start, own or {}, block, sgd, item_tables), objective or Recommending(model)
    losses, taped = torch.zeros(len(block.active), len(block), device=block.touched.device), cohort.fusible
    repeated = _repeated(model, start, cohort) if taped and isinstance(objective, Recommending) else None
    if repeated is not None:
        losses[:, : block.active[0]] = repeated
    for active in dict.fromkeys(block.active if repeated is None else ()):
        steps = block.steps_of(active)
        if taped:
            with _Prefix(cohort, objective, active, taped=True) as prefix:
                done = prefix.taped_steps()
            losses[steps.start : steps.start + len(done), :active] = done
            steps = steps[len(done) :]
        if steps:
            taped = False
            cohort.join()
            with _Prefix(cohort, objective, active, taped=False) as prefix:
                losses[steps.start : steps.stop, :active] = torch.stack([prefix.step(step) for step in steps])
    cohort.join()
    return Trained(start, block, cohort.values(), tuple(item_tables), cohort.untouched.value.view(-1), losses.cpu())


def _repeated(model: Model, start: Mapping[str, Tensor], cohort: _Cohort) -> Tensor | None:
    """All steps in compiled code, if it can take them: losses `[S, a]` of the clients that have any, or None.

    What happens in a step is seen in one of a single client, on a copy of the parameters.
    """
    block = cohort.block
    fusible = all(group.fusible for group in cohort.tables.values())
    if not block.active or not model.repeats or not fusible or not at_hand(block.items.device):
        return None
    own = {name: group.value[:1] for name, group in cohort.dense.items()}
    alone = _Cohort.of(start, own, block.beginning(), cohort.untouched.sgd, list(cohort.tables))
    recommending = Recommending(model)
    with _Prefix(alone, recommending, 1, taped=True) as prefix:
        rehearsal = prefix.rehearsed(recommending)
        recipe = None if rehearsal is None else rehearsal.recipe()
    if recipe is None:
        return None
    users = model.user_inputs(tuple(codes[: block.active[0]] for codes in block.users))
    return recipe.train(Trainees(block, cohort.dense, cohort.tables, users, model.item_inputs(block.touched)))


@dataclass(frozen=True, eq=False)
class _Cohort:
    """Everything that is trained.

    Attributes:
        block: the clients.
        tables: the touched rows of the item tables, `[C, R, d]`.
        dense: all other parameters, `[C, ...]`.
        untouched: `[C, 1]`, what a row that is in no batch is multiplied by: it decays or is pulled like any other.
    """

    block: Block
    tables: dict[str, Group]
    dense: dict[str, Group]
    untouched: Group

    @classmethod
    def of(
        cls,
        start: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        block: Block,
        sgd: SgdSettings,
        item_tables: Sequence[str],
    ) -> _Cohort:
        """Copies of the start, or of what clients have of their own, for every client."""
        cohort, tables, dense = len(block), {}, {}
        for name, value in start.items():
            if name in item_tables:
                rows = value[block.touched]
                tables[name] = Group(rows, rows.clone() if sgd.proximal_mu else 0.0, sgd, name, block)
            else:
                begin = own.get(name, value.expand(cohort, *value.shape))
                dense[name] = Group(begin.clone(), begin, sgd, name, block)
        factors = torch.ones(cohort, 1, device=block.touched.device)
        return cls(block, tables, dense, Group(factors, 1.0, sgd, next(iter(item_tables), ""), block))

    @property
    def fusible(self) -> bool:
        """Whether layers may take the steps of all parameters but the tables."""
        return all(group.fusible for group in self.dense.values())

    def join(self) -> None:
        """Make every parameter whole again."""
        for group in self.dense.values():
            group.join()

    def values(self) -> dict[str, Tensor]:
        """All parameters as they are now."""
        return {name: group.value for name, group in {**self.dense, **self.tables}.items()}


class _Prefix:
    """The first `active` clients of a block, those that still train: views of what belongs to them.

    The views are made once for all steps with the same clients, because making them costs as much as a small product.
    """

    def __init__(self, cohort: _Cohort, objective: Objective, active: int, taped: bool) -> None:
        self.cohort, self.objective, self.active = cohort, objective, active
        device = cohort.block.items.device
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self.ones = torch.ones(active, device=device)
        self._steps = cohort.block.steps_of(active)
        places = cohort.block.places[self._steps.start : self._steps.stop, :active]
        self._places = places.reshape(len(self._steps), -1).unbind()
        self.leaves = {name: group.value[:active].detach() for name, group in cohort.dense.items()}
        self.descents: dict[str, FusedDescent] = {}
        for name, group in cohort.dense.items():
            if group.fusible:
                whole = group if taped else None
                self.descents[name] = FusedDescent(self.leaves[name], group.rate, self.anchor, whole)
                self.leaves[name].descent = self.descents[name]  # type: ignore[attr-defined]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Part leaves from their marks: they name each other, so the memory of the block would never be free again."""
        for name in self.descents:
            del self.leaves[name].descent  # type: ignore[attr-defined]
        self.descents.clear()

    def rehearsed(self, recommending: Recommending) -> Rehearsal | None:
        """The first forward pass of one client, after which nothing has moved; None: a tape cannot follow it."""
        with torch.no_grad():
            _, rows, _ = self._begin(0)
            tape = self._tape(rows)
            try:
                recommending({**self.leaves, **rows}, self.cohort.block, 0, self.active)
                return recommending.rehearsal(self.cohort.block, tape, self.leaves, rows)
            except NotTaped:
                return None
            finally:
                tape.close()

    def taped_steps(self) -> Tensor:
        """All steps of these clients without autograd, or those before the first whose objective needs it.

        Returns:
            Each one's loss before each step that was done, `[steps, active]`.
        """
        endings: list[Ended] = []
        with contextlib.suppress(NotTaped):
            with torch.no_grad():  # not inference mode, which is faster: what a model keeps now must do for autograd
                endings.append(self._taped_step(self._steps.start))
            with torch.inference_mode():
                for step in self._steps[1:]:
                    endings.append(self._taped_step(step))
        grouped = itertools.groupby(endings, key=operator.itemgetter(0))
        losses = [ending.losses([context for _, context in own]) for ending, own in grouped]
        return torch.cat([self.ones.new_empty(0, self.active), *losses])

    def step(self, step: int) -> Tensor:
        """One step of these clients; returns each one's loss before it."""
        active = self.active
        places, rows, moving = self._begin(step)
        for descent in self.descents.values():
            descent.claimed, descent.tape = False, None
        for leaf in [*self.leaves.values(), *(rows[name] for name in moving)]:
            leaf.requires_grad_()
        loss = self.objective({**self.leaves, **rows}, self.cohort.block, step, active)
        left = [name for name in self.leaves if name not in self.descents or not self.descents[name].claimed]
        inputs = [self.anchor, *(self.leaves[name] for name in left), *(rows[name] for name in moving)]
        gradients = iter(torch.autograd.grad(loss, inputs, self.ones, allow_unused=True)[1:])
        for name in left:
            self.cohort.dense[name].descend(next(gradients), active, step)
        for name in moving:
            self.cohort.tables[name].descend_rows(next(gradients), places, active, step)
        self.cohort.untouched.descend(None, active, step)
        return loss.detach()

    def _taped_step(self, step: int) -> Ended:
        """`step` without autograd; raises `NotTaped` if the objective needs it, and then nothing has changed.

        Returns:
            What its losses are computed from later.
        """
        places, rows, moving = self._begin(step)
        tape = self._tape(rows)
        try:
            loss = self.objective({**self.leaves, **rows}, self.cohort.block, step, self.active)
            gradients, ending = tape.gradients(loss, [rows[name] for name in moving])
        finally:
            tape.close()
        for name, gradient in zip(moving, gradients, strict=True):
            self.cohort.tables[name].descend_rows(gradient, places, self.active, step)
        return ending

    def _tape(self, rows: Mapping[str, Tensor]) -> Tape:
        """Takes note of the layers of the forward pass that comes."""
        tape = Tape(rows.values())
        for descent in self.descents.values():
            descent.claimed, descent.tape = False, tape
        return tape

    def _begin(self, step: int) -> tuple[Tensor, dict[str, Tensor], list[str]]:
        """Places of a step's item rows, the rows themselves by table, and the tables that move."""
        tables = self.cohort.tables
        places = self._places[step - self._steps.start]
        rows = {name: group.rows(places, self.active) for name, group in tables.items()}
        return places, rows, [name for name, group in tables.items() if group.moves(step)]
