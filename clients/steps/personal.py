# SPDX-License-Identifier: Apache-2.0
"""Steps whose clients have a score function of their own and item embeddings of their own or beside
the shared ones."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.step import Replaced, Step, StepConfig, Train
from clients.steps.descent import unchanged
from fedrec.errors import ExperimentError
from fedrec.models.base import Parameters
from fedrec.models.personal import Fedrap, Gpfedrec, Pfedrec
from fedrec.nn.layers import all_rows, single_output, weighted_cross_entropy
from fedrec.training.block import Block
from fedrec.training.draws import ExampleDraw
from fedrec.training.kernel import Guidance, device_refusal, kernel_refusal, train_block
from fedrec.training.recorded_steps import run_steps
from fedrec.training.results import BlockUpdate, ChangedRows, add_to_rows, rows_at
from fedrec.training.sgd import SgdSettings

# Steps on shuffled batches of positives and of negatives that are drawn once a round.

SHUFFLED_BATCH = 256  # examples per gradient step
_NEGATIVES = 4  # unobserved items per positive (ranking)


class _ShuffledConfig(StepConfig):
    """Settings of steps on shuffled batches of 256 examples, with 4 unobserved items per
    positive."""

    epochs: int = Field(default=1, ge=0)
    """Passes over the examples; 0 trains nothing."""
    learning_rate: float = Field(default=0.1, gt=0)
    """Step size of the private network or score function."""


class _ShuffledStep(Step):
    """Base of steps on shuffled batches."""

    config: _ShuffledConfig

    def draw(self) -> ExampleDraw:
        """The rows and negatives, shuffled in each epoch."""
        return ExampleDraw(self.config.epochs, SHUFFLED_BATCH, _NEGATIVES)


# Dual personalisation on the device (PFedRec, Zhang et al. 2023, algorithm 1): first the score
# function, then items.
#
# In each batch the private score function takes a gradient step with the item embeddings held; then
# the embeddings take one under the new score function. What is sent is the change of the
# embeddings.
#
# Where this differs from the paper's public code: negatives are drawn outside the training
# positives only (there, outside the held-out ones as well: `split.leaky-negatives`). Item
# embeddings have a rate of their own here too, but as a plain factor (`item-rate`) and not as a
# rate times the number of items times another factor, which undoes the server's mean over many
# clients of whom few touch a row: here the strategy corrects for that, by its server rate or by
# `fed-adam`.

WEIGHT = "score.weight"
BIAS = "score.bias"
ITEMS = "item.id"


class PfedrecStepConfig(_ShuffledConfig):
    """Settings of dual personalisation."""

    item_rate: float = Field(default=50.0, ge=0)
    """Factor on the learning rate for the item embeddings, as a row is in few of a batch's
    examples and the loss is their mean."""


class PfedrecStep(_ShuffledStep):
    """Trains a private score function and the shared item embeddings in turns."""

    name = "pfedrec"
    Config = PfedrecStepConfig
    trains = Pfedrec
    private = (WEIGHT, BIAS)
    paper = "PFedRec (Zhang et al. 2023), algorithm 1"
    config: PfedrecStepConfig

    def train_block(
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> BlockUpdate:
        """Train all clients of a block at once, with gradients in closed form."""
        values = _start(parameters, block, client_params or {}, self.private)
        losses = run_steps(block, partial(self._turns_together, values))
        means = block.last_epoch_means(losses)
        return BlockUpdate.from_values(parameters, block, values, (ITEMS,), means)

    def _turns_together(
        self, values: dict[str, Tensor], block: Block, step: int, active: int
    ) -> Tensor:
        """Train the first `active` clients; their losses `[active]`."""
        width = values[ITEMS].shape[-1]
        flat = values[ITEMS].view(-1, width)
        rate = self.config.learning_rate
        positions = block.rows[step, :active].flatten()
        rows = flat.index_select(0, positions).view(active, -1, width)
        labels = block.labels[step, :active]
        weights = block.weights[step, :active]
        weight = values[WEIGHT][:active]
        bias = values[BIAS][:active]
        predicted = single_output(rows, weight) + bias
        losses = weighted_cross_entropy(predicted, labels, weights)
        error = (torch.sigmoid(predicted) - labels) * weights
        weight.sub_(torch.bmm(error.unsqueeze(1), rows).mT, alpha=rate)
        bias.sub_(error.sum(1, keepdim=True), alpha=rate)
        predicted = single_output(rows, weight) + bias
        error = (torch.sigmoid(predicted) - labels) * weights
        moved = (error.unsqueeze(-1) * weight.transpose(1, 2)).flatten(0, 1)
        add_to_rows(flat, positions, moved, -rate * self.config.item_rate)
        return losses


# A client's part in GPFedRec (Zhang et al., KDD 2024, algorithm 1): train under the guidance of
# similar users.
#
# For each item that it touches the device gets the shared embedding, from which it starts, and the
# mean of similar users' embeddings, its guidance g. A gradient step per batch moves the private
# user embedding and network and the touched rows e, and these are pulled towards their guidance:
#
#     e <- e - rate de - pull (e - g)
#
# which is a step on the cross-entropy plus (pull / 2 rate) |e - g|^2. The client sends the change
# of its rows; strategy `gpfedrec` documents what the server learns from it.
#
# Where this differs from the paper's public code: rows that no batch touches are not pulled. There
# the weight of the mean squared difference is 1 and the rate 8 times the number of items, which is
# a pull of 0.05 per batch on MovieLens-100K. User embeddings have a rate of their own here, too, as
# a plain factor; there it is 80 times the network's.

GUIDE = "item.guide"
OWN = "item.own"
_Descent = Callable[[Parameters, Tensor, Block], tuple[dict[str, Tensor], Tensor]]


class GpfedrecStepConfig(_ShuffledConfig):
    """Settings of guided local training."""

    user_rate: float = Field(default=20.0, ge=0)
    """Factor on the learning rate for the user's embedding."""
    item_rate: float = Field(default=50.0, ge=0)
    """Factor on the learning rate for the item embeddings, as a row is in few of a batch's
    examples and the loss is their mean."""
    pull: float = Field(default=0.05, ge=0, lt=1)
    """Share of the way towards its guidance that each touched row goes in each batch (paper's code
    on MovieLens-100K: 0.05); 0: no guidance."""


class GpfedrecStep(_ShuffledStep):
    """Trains a private network, and rows of item embeddings under guidance."""

    name = "gpfedrec"
    Config = GpfedrecStepConfig
    trains = Gpfedrec
    private = (Replaced(OWN), "user.id", "layer*")
    generated = True
    paper = "GPFedRec (Zhang et al. 2024), algorithm 1"
    config: GpfedrecStepConfig
    model: Gpfedrec

    def train_block(
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> BlockUpdate:
        """Train every client of a block under guidance."""
        return self._guided(self._descend, parameters, block, client_params)

    def in_kernel(self) -> Train | str:
        """All steps in native code."""
        refusal = kernel_refusal(self.model.network(), self._settings(), self.device)
        return refusal or partial(self._guided, self._descend_in_kernel)

    def _guided(
        self,
        descend: _Descent,
        parameters: Parameters,
        block: Block,
        client_params: Parameters | None = None,
    ) -> BlockUpdate:
        """Updates and private state of the clients of a block after their steps."""
        given = client_params or {}
        if not block.active:
            start = {name: value for name, value in given.items() if name != GUIDE}
            return unchanged(parameters, block, start, (ITEMS,))
        width = block.touched.shape[1]
        counts = torch.tensor(block.touched_counts, device=self.device)
        real = (torch.arange(width, device=self.device) < counts[:, None]).unsqueeze(-1)
        guide = torch.where(real, given[GUIDE], given[ITEMS])
        start = {name: value for name, value in given.items() if name not in (GUIDE, OWN)}
        values, means = descend(start, guide, block)
        changes = {name: value - given[name] for name, value in values.items()}
        trained = BlockUpdate.from_changes(parameters, block, changes, (ITEMS,), means, given)
        table = ChangedRows.compact(block, changes[ITEMS])
        return replace(trained, changes={**trained.changes, OWN: table})

    def _settings(self) -> SgdSettings:
        """Settings of the gradient steps."""
        config = self.config
        rates = {ITEMS: config.item_rate, "user.id": config.user_rate}
        return SgdSettings(config.learning_rate, rates=rates)

    def _descend_in_kernel(
        self, start: Parameters, guide: Tensor, block: Block
    ) -> tuple[dict[str, Tensor], Tensor]:
        """All steps in native code, as `_descend`."""
        shared = {name: value[0] for name, value in start.items()}
        guidance = Guidance(self.config.pull, guide)
        trained = train_block(
            self.model.network(), shared, block, self._settings(), start, guidance
        )
        values = {name: trained.values(name) for name in start}
        return values, torch.as_tensor(trained.last_losses).float()

    def _descend(
        self, start: Parameters, guide: Tensor, block: Block
    ) -> tuple[dict[str, Tensor], Tensor]:
        """All steps of a block by autograd: the trained values, and each client's mean loss over
        the last epoch, `[C]`."""
        values = {name: value.clone() for name, value in start.items()}
        work = partial(self._descend_together, values, guide)
        losses = run_steps(block, work)
        return values, block.last_epoch_means(losses).float()

    def _descend_together(
        self, values: dict[str, Tensor], guide: Tensor, block: Block, step: int, active: int
    ) -> Tensor:
        """A gradient step and the pull of the first `active` clients, in place; their losses
        before, `[active]`. Only the rows of the batch take part in the gradient."""
        sgd = self._settings()
        table = values[ITEMS]
        width = block.items.shape[2]
        positions = block.rows[step, :active, :width]
        shift = torch.arange(active, device=self.device)[:, None] * table.shape[1]
        real = block.weights[step, :active] > 0
        positions = torch.where(real, positions, shift).flatten()
        flat = table.view(-1, table.shape[-1])
        leaves = {n: v[:active].detach().requires_grad_() for n, v in values.items() if n != ITEMS}
        touched = flat.index_select(0, positions).view(active, width, -1)
        leaves[ITEMS] = touched.requires_grad_()
        rows = all_rows(active, width, flat.device)
        predicted = self.model.predict(leaves, (), block.items[step, :active], rows=rows)
        losses = self.model.loss(
            predicted, block.labels[step, :active], block.weights[step, :active]
        )
        gradients = dict(
            zip(leaves, torch.autograd.grad(losses.sum(), list(leaves.values())), strict=True)
        )
        pull = self.config.pull
        if block.training is not None:
            pull = pull * block.training[:active, None, None]
        table[:active].lerp_(guide[:active], pull)
        moved = gradients.pop(ITEMS).flatten(0, 1)
        add_to_rows(flat, positions, moved, -sgd.rate(ITEMS))
        for name, gradient in gradients.items():
            values[name][:active].sub_(gradient, alpha=sgd.rate(name))
        return losses.detach()


# A client's part in FedRAP (Li, Long and Zhou, ICLR 2024, algorithm 1).
#
# One gradient step per batch on the score function, the personal part D and the shared part C of
# the item embeddings, with the loss
#
#     cross-entropy - lambda mean (d - c)^2 + mu mean |c|
#
# where the means are over all numbers of the batch's rows. The second term pushes both parts apart,
# the third makes the shared one sparse. Both weights rise with the rounds, a = 0, 1, ...: lambda
# tanh(a / 10) and mu tanh(a / 10). What is sent is the change of C.
#
# Where this differs from the paper: its public code computes the rising weights and never uses
# them, lowers the rate after each batch and round (here it is constant), and draws negatives once
# for the whole run and outside of the held-out positives as well (`split.leaky-negatives`); D,
# which is never reset, then learns which items are held out. The second term has no lower bound: if
# a weight or rate is too large the parts diverge, and the run ends with an error.

PERSONAL = "item.personal"


class FedrapStepConfig(_ShuffledConfig):
    """Settings of additive personalisation."""

    shared_rate: float = Field(default=50.0, ge=0)
    """Factor on the learning rate for the shared part C, as a row is in few of a batch's examples;
    0: the shared part does not change, and clients learn separately."""
    personal_rate: float = Field(default=50.0, ge=0)
    """Factor on the learning rate for the personal part D; 0 leaves it at zero, and all items are
    shared."""
    apart: float = Field(default=0.1, ge=0)
    """Weight lambda of the squared difference between both parts."""
    sparse: float = Field(default=0.1, ge=0)
    """Weight mu of the absolute values of the shared part."""

    def in_round(self, round_number: int) -> Self:
        """The settings of a training round, from 1: with the round's weights."""
        risen = math.tanh((round_number - 1) / 10)
        return self.model_copy(update={"apart": self.apart * risen, "sparse": self.sparse * risen})


class FedrapStep(_ShuffledStep):
    """Trains a private score function, a private and a shared part of the item embeddings."""

    name = "fedrap"
    Config = FedrapStepConfig
    trains = Fedrap
    private = (PERSONAL, WEIGHT, BIAS)
    paper = "FedRAP (Li et al. 2024), algorithm 1"
    config: FedrapStepConfig

    def train_block(
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> BlockUpdate:
        """Train every client of a block. Gradients in closed form, for all clients of a block at
        once: of the touched rows of the shared part, and of the whole table of the personal one."""
        values = _start(parameters, block, client_params or {}, self.private)
        losses = run_steps(block, partial(self._descend_together, values))
        return _trained(parameters, block, values, block.last_epoch_means(losses))

    def in_kernel(self) -> Train | str:
        return device_refusal(self.device) or self._train_in_kernel

    def _train_in_kernel(
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> BlockUpdate:
        from fedrec.training.steps import (
            train_additive,  # imports Numba, which the other paths do not need
        )

        values = _start(parameters, block, client_params or {}, self.private)
        arrays = {name: value.numpy() for name, value in values.items()}
        losses = np.full(len(block), np.nan)
        rates = self._rates()
        train_additive(
            (block.items.numpy(), block.rows.numpy(), block.labels.numpy(), block.sizes.numpy()),
            np.array(block.steps, dtype=np.int64),
            np.array(block.last_epoch, dtype=np.int64),
            (arrays[WEIGHT][:, :, 0], arrays[BIAS][:, 0]),
            arrays[ITEMS],
            arrays[PERSONAL],
            np.array([rates[name] for name in (WEIGHT, ITEMS, PERSONAL)], dtype=np.float32),
            np.array([self.config.apart, self.config.sparse], dtype=np.float32),
            losses,
        )
        return _trained(parameters, block, values, losses)

    def _rates(self) -> dict[str, float]:
        rate = self.config.learning_rate
        return {
            WEIGHT: rate,
            BIAS: rate,
            ITEMS: rate * self.config.shared_rate,
            PERSONAL: rate * self.config.personal_rate,
        }

    def _descend_together(
        self, values: dict[str, Tensor], block: Block, step: int, active: int
    ) -> Tensor:
        """Train the first `active` clients; their cross-entropies `[active]`."""
        config = self.config
        rates = self._rates()
        width = values[ITEMS].shape[-1]
        flat = {name: values[name].view(-1, width) for name in (ITEMS, PERSONAL)}
        first = torch.arange(active, device=block.items.device)[:, None] * values[PERSONAL].shape[1]
        rows = {
            ITEMS: block.rows[step, :active].flatten(),
            PERSONAL: (block.items[step, :active] + first).flatten(),
        }
        shared, personal = (
            flat[name].index_select(0, rows[name]).view(active, -1, width)
            for name in (ITEMS, PERSONAL)
        )
        labels = block.labels[step, :active]
        weights = block.weights[step, :active]
        weight = values[WEIGHT][:active]
        added = shared + personal
        predicted = single_output(added, weight) + values[BIAS][:active]
        losses = weighted_cross_entropy(predicted, labels, weights)
        error = (torch.sigmoid(predicted) - labels) * weights
        fitted = error.unsqueeze(-1) * weight.transpose(1, 2)
        share = weights.unsqueeze(-1) / width
        parted = 2 * config.apart * share * (personal - shared)
        moves = {
            ITEMS: fitted + parted + config.sparse * share * shared.sign(),
            PERSONAL: fitted - parted,
        }
        weight.sub_(torch.bmm(error.unsqueeze(1), added).mT, alpha=rates[WEIGHT])
        values[BIAS][:active].sub_(error.sum(1, keepdim=True), alpha=rates[BIAS])
        for name, move in moves.items():
            if rates[name]:
                add_to_rows(flat[name], rows[name], move.flatten(0, 1), -rates[name])
        return losses


def _start(
    parameters: Parameters, block: Block, client_params: Parameters, private: Sequence[str]
) -> dict[str, Tensor]:
    """The trained values of the clients, `[C, ...]` each: the private ones, and of the shared item
    embeddings the touched rows."""
    values = {
        name: client_params.get(
            name, parameters[name].expand(len(block), *parameters[name].shape)
        ).clone(memory_format=torch.contiguous_format)
        for name in private
    }
    return values | {ITEMS: rows_at(parameters[ITEMS], block.touched)}


def _trained(
    parameters: Parameters, block: Block, values: dict[str, Tensor], losses: Tensor | np.ndarray
) -> BlockUpdate:
    # sums are infinite or NaN if a number is, and faster than looking at each
    if not all(math.isfinite(float(value.sum())) for value in values.values()):
        raise ExperimentError(
            "FedRAP's parts of the item embeddings diverged",
            expected="finite numbers; the term that pushes both parts apart has no lower bound",
            fix="lower step.apart, step.personal-rate, step.shared-rate or step.learning-rate",
        )
    return BlockUpdate.from_values(parameters, block, values, (ITEMS,), losses)
