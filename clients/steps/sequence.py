# SPDX-License-Identifier: Apache-2.0
"""Gradient descent on the client's own sequence, and on recommendation and self-supervision
together.

In each epoch a client takes one step on the mean loss of all places of its last items
(`fedrec.models.sequential`), with new dropout and drawn items. With one epoch its update is a
gradient; weighted by examples, which are places, and with an adaptive server, that is training in
one place with the cohort as the batch. A client with fewer than two items trains nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.step import PrivateParameters
from clients.steps.descent import (
    DescentStep,
    GradientConfig,
    SessionStep,
    SessionStepConfig,
    rates_by_name,
)
from clients.steps.sgd import Sgd, SgdConfig
from fedrec.data.client_data import ClientData, draw_negatives
from fedrec.models.base import Parameters
from fedrec.models.sequential import SequenceModel, padded_width, sequence_loss
from fedrec.pretext import SessionBatches, SessionObjective
from fedrec.training.block import Batches, Block
from fedrec.training.sgd import Recommending, SgdSettings


class SequenceStepConfig(GradientConfig, PrivateParameters):
    """Settings of gradient descent on sequences."""

    epochs: int = Field(default=1, ge=0)
    """Gradient steps on the client's sequence; 0 trains nothing."""
    rates: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Factors on the learning rate by pattern of parameter names, such as `{"item.id" = 50.0}`; no
    parameter may fit two patterns."""


@dataclass(frozen=True, eq=False)
class _SequenceBatches(Batches):
    """One client's work. The items of a step are those drawn for it, and then the sequence.

    Attributes:
        drawn: number of drawn items of a step.
        seeds: `int64 [S]`, of dropout.
        catalogue: number of items whose rows each step needs; None: those of its own items.
    """

    drawn: int
    seeds: np.ndarray
    catalogue: int | None

    def references(self) -> tuple[np.ndarray, np.ndarray]:
        """The items whose rows each step needs, see `Batches.references`."""
        if self.catalogue is None:
            return super().references()
        needed = np.broadcast_to(np.arange(self.catalogue), (len(self.sizes), self.catalogue))
        return needed, np.ones(needed.shape, dtype=bool)


class SequenceStep(DescentStep):
    """Gradient steps on the loss of what comes next."""

    name = "sequence"
    Config = SequenceStepConfig
    trains = SequenceModel
    paper = "SASRec (Kang and McAuley 2018), GRU4Rec (Hidasi et al. 2016)"
    model: SequenceModel
    config: SequenceStepConfig

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """All batches of one client's local work; none without an item and a next one."""
        model = self.model
        longest = model.config.longest
        sequence = data.sequence()[-longest - 1 :]
        if len(sequence) < 2 or not self.config.epochs:
            return Batches.none()
        steps = self.config.epochs
        width = int(padded_width(np.array(len(sequence) - 1), longest))
        drawn = model.config.drawn(width)
        items = np.zeros((steps, drawn + width + 1), dtype=np.int64)
        if drawn:
            outside = data.never_negative, model.schema.num_items
            items[:, :drawn] = draw_negatives(*outside, steps * drawn, random).reshape(steps, drawn)
        items[:, drawn : drawn + len(sequence)] = sequence
        return _SequenceBatches(
            items=items,
            labels=np.zeros(items.shape, dtype=np.float32),
            sizes=np.full(steps, drawn + len(sequence)),
            examples=len(sequence) - 1,
            last_epoch=1,
            drawn=drawn,
            seeds=random.integers(2**62, size=steps),
            catalogue=None if drawn else model.schema.num_items,
        )

    def objective(self) -> _SequenceObjective:
        """The mean loss of a client's positions."""
        return _SequenceObjective(self.model)

    def settings(self, names: list[str]) -> SgdSettings:
        return replace(super().settings(names), rates=rates_by_name(names, self.config.rates))


class _SequenceObjective:
    """The mean loss of each client's positions.

    Args:
        model: the model of sequences.
    """

    capturable = False  # dropout is drawn on the processor

    def __init__(self, model: SequenceModel) -> None:
        self.model = model

    def __call__(
        self, parameters: Mapping[str, Tensor], block: Block, step: int, active: int
    ) -> Tensor:
        members = [
            member for member in block.members[:active] if isinstance(member, _SequenceBatches)
        ]
        if len(members) != active:
            raise TypeError("Expected batches of sequences.")
        drawn = members[0].drawn
        items = block.items[step, :active]
        counts = (block.sizes[step, :active] - drawn - 1)[:, None]
        generators = [torch.Generator().manual_seed(int(member.seeds[step])) for member in members]
        return sequence_loss(
            self.model,
            parameters,
            items[:, None],
            drawn,
            counts,
            generators,
            1 / counts,
            compact=members[0].catalogue is None,
        )


# Local SGD on recommendation and self-supervision together (PrivRec section 2.4.3, equation 11).
#
#     L = lambda_DSSM * L_DSSM + L_SSL,  L_SSL = lambda_IM * L_IM + lambda_SM * L_SM
#
# Where this differs from the paper: the paper does not define a batch. Here batches of labelled
# examples are those of local SGD, and the session views of an epoch are distributed evenly over its
# batches.


class JointConfig(SgdConfig, SessionStepConfig):
    """Settings of local SGD and of the self-supervised task."""


class Joint(SessionStep, Sgd):
    """Local SGD on the recommender's loss plus the loss on masked views of the client's
    sessions."""

    name = "joint"
    Config = JointConfig
    paper = "PrivRec (Wang et al. 2021), eq. 11"
    config: JointConfig

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        epochs = list(self._joint_epochs(data, random))
        plain = Batches.cut([examples for examples, _ in epochs], self.config.batch_size)
        return SessionBatches.deal(
            plain, [views for _, views in epochs], self.config.batch_size, self.task.layout
        )

    def objective(self) -> SessionObjective:
        """Both losses, of equal weight (lambda_DSSM = 1)."""
        return SessionObjective(self.task, Recommending(self.model))

    def trained(self, parameters: Parameters) -> Parameters:
        """All, the encoders too."""
        return parameters

    def _joint_epochs(
        self, data: ClientData, random: np.random.Generator
    ) -> Iterator[tuple[tuple[np.ndarray, np.ndarray], np.ndarray]]:
        """Examples (items, labels) and views of each epoch, in the order of training."""
        config = self.config
        if not config.epochs:
            return
        pool = self.draw().examples(data, self.model.schema, random)
        for _ in range(config.epochs):
            order = random.permutation(len(pool[0]))
            yield (pool[0][order], pool[1][order]), self.task.views(data, random)
