# SPDX-License-Identifier: Apache-2.0
"""Shared code of steps: examples and sessions, gradient descent in blocks or one by one, and the
contrastive step."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.step import Step, StepConfig
from fedrec.config import fits
from fedrec.data.client_data import ClientData
from fedrec.errors import ExperimentError
from fedrec.models.base import Model, Parameters
from fedrec.pretext import (
    PREFIX,
    SessionBatches,
    SessionBlock,
    SessionConfig,
    SessionObjective,
    SessionTask,
)
from fedrec.training.block import Batches, Block, OwnData, UserCodes
from fedrec.training.results import BlockUpdate, Dense
from fedrec.training.sgd import Objective, SgdSettings, descend

# Mini-batch gradient descent on an objective, of many clients at once.


class GradientConfig(StepConfig):
    """Settings of steps with gradient descent."""

    learning_rate: float = Field(default=0.1, gt=0)
    """Learning rate (alpha1 in PrivRec)."""
    proximal_mu: float = Field(default=0.0, ge=0)
    """Weight of FedProx's proximal term; a server may also send it as `proximal-mu`."""

    def sgd(self) -> SgdSettings:
        """The settings for training in blocks."""
        return SgdSettings(self.learning_rate, self.proximal_mu)


class DescentConfig(GradientConfig):
    """Settings of descent on batches of a client's examples."""

    batch_size: int = Field(default=32, ge=1)
    """Examples per gradient step; the last batch of an epoch may be smaller."""


class DescentStep(Step):
    """Base of steps of gradient descent: on the model's own loss and on all parameters,
    unless a subclass says otherwise."""

    config: GradientConfig

    def objective(self) -> Objective | None:
        """The minimised loss; None: the model's own loss."""
        return None

    def trained(self, parameters: Parameters) -> Parameters:
        """The global parameters that are trained."""
        return parameters

    def settings(self, names: list[str]) -> SgdSettings:
        """Settings of the gradient steps for the parameters of these names."""
        return self.config.sgd()

    def prepare(self, parameters: Parameters, generator: torch.Generator) -> dict[str, Tensor]:
        """Check that each setting by parameter names fits one."""
        self.settings(list(self.trained(parameters)))
        return {}

    def train_block(
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> BlockUpdate:
        """Train every client of a block."""
        trained = self.trained(parameters)
        settings = self.settings(list(trained))
        moved = descend(self.model, trained, block, settings, self.objective(), client_params)
        return replace(moved, start=parameters)


# Steps that train on a client's own sessions, alone or beside labelled examples.


class SessionStepConfig(DescentConfig, SessionConfig):
    """Settings of descent on sessions."""


class SessionStep(DescentStep):
    """Base of steps whose batches are `SessionBatches`."""

    config: SessionStepConfig

    def __init__(self, config: SessionStepConfig, model: Model, device: torch.device) -> None:
        super().__init__(config, model, device)
        self.task = SessionTask(config, model)

    def objective(self) -> SessionObjective:
        """The loss on masked views of the client's sessions."""
        return SessionObjective(self.task)

    def block(self, users: UserCodes, batches: Sequence[Batches], device: torch.device) -> Block:
        return SessionBlock.of(users, batches, device)

    def prepare(self, parameters: Parameters, generator: torch.Generator) -> dict[str, Tensor]:
        """Fresh parameters of the encoders, which this step trains with those of the model."""
        added = self.task.initial(parameters, generator)
        super().prepare({**parameters, **added}, generator)
        return added


# Settings for parameters by patterns of their names, such as `layer*`.


def check_patterns(names: Iterable[str], patterns: Iterable[str], key: str) -> None:
    """Check that each pattern matches a name.

    Raises:
        ExperimentError: one does not; names the setting, `step.KEY`.
    """
    names = list(names)
    for pattern in patterns:
        if not any(fits(name, (pattern,)) for name in names):
            raise ExperimentError(
                f"no parameter fits step.{key}",
                expected=f"a pattern of {', '.join(names)}",
                got=repr(pattern),
                fix="correct the pattern, or leave it out",
            )


def rates_by_name(names: Iterable[str], rates: Mapping[str, float]) -> dict[str, float]:
    """Factor on the learning rate of each parameter; 1 if no pattern matches.

    Args:
        names: of the parameters.
        rates: factors by pattern of names.

    Raises:
        ExperimentError: a pattern fits no name, or a name several patterns, as tables have no
            order.
    """
    names = list(names)
    check_patterns(names, rates, "rates")
    factors = {}
    for name in names:
        fitting = [pattern for pattern in rates if fits(name, (pattern,))]
        if len(fitting) > 1:
            raise ExperimentError(
                f"parameter {name!r} matches more than one pattern in step.rates",
                expected="one of them",
                got=" and ".join(map(repr, fitting)),
                fix="narrow one, for example `layer[1-4].*`",
            )
        factors[name] = rates[fitting[0]] if fitting else 1.0
    return factors


# Training of a block's clients one after the other, for steps that draw their batches while they
# train.


@dataclass(frozen=True, eq=False)
class Update:
    """The result of one client's local training.

    Attributes:
        delta: `theta_local - theta_global` per parameter, on the step's device.
        examples: number of examples in one epoch (rows and negatives).
        loss: mean loss over the last epoch; NaN without examples.
    """

    delta: dict[str, Tensor]
    examples: int = 0
    loss: float = math.nan


def as_block(
    start: Mapping[str, Tensor],
    updates: Sequence[Update],
    block: Block | None = None,
    client_params: Mapping[str, Tensor] | None = None,
) -> BlockUpdate:
    """The updates of some clients as those of a block (default: one without batches); `start` are
    the global parameters, and `client_params` what they started from instead."""
    names = updates[0].delta if updates else {}
    changes = {name: Dense(torch.stack([u.delta[name] for u in updates])) for name in names}
    examples = tuple(update.examples for update in updates)
    counted = replace(block or Block.without_batches(examples), examples=examples)
    losses = [update.loss for update in updates]
    return BlockUpdate(start, counted, changes, losses, client_params or {})


def unchanged(
    start: Mapping[str, Tensor],
    block: Block,
    client_params: Mapping[str, Tensor],
    tables: Collection[str],
) -> BlockUpdate:
    """Clients that do not train: zero for everything that they start from."""
    still = {name: torch.zeros_like(value) for name, value in client_params.items()}
    losses = [math.nan] * len(block)
    return BlockUpdate.from_changes(start, block, still, tables, losses, client_params)


Train = Callable[[dict[str, Tensor], ClientData, np.random.Generator], Update]


def one_by_one(
    parameters: Mapping[str, Tensor],
    block: Block,
    client_params: Mapping[str, Tensor] | None,
    train: Train,
) -> BlockUpdate:
    """Train the clients of a block sequentially, as a step's `train_block` does.

    Args:
        parameters: the global ones, without cohort dimension, unchanged.
        block: the clients, with the batches of `Step.batches` by default: their data.
        client_params: the clients' saved private parameters, `[C, ...]` each.
        train: one client's training, from its parameters (without cohort dimension, not to be
            changed), its data and its random stream.

    Raises:
        TypeError: the clients' batches are others, or what `train` returns is no update.
    """
    updates = []
    for index, member in enumerate(block.members):
        if not isinstance(member, OwnData):
            raise TypeError(f"Expected the clients' data (OwnData), got {type(member).__name__}.")
        start = {
            **parameters,
            **{name: value[index] for name, value in (client_params or {}).items()},
        }
        update = train(start, member.data, member.random)
        if not isinstance(update, Update):
            raise TypeError(f"Expected an Update, got {type(update).__name__}.")
        updates.append(update)
    return as_block(parameters, updates, block, client_params)


# Self-supervised training of the item embedding on a client's own sessions (PrivRec section 2.4.2,
# equations 8 to 10).
#
# No label and no feature of the user is used: stage one of the two-stage training. Only the item
# embedding and the encoders of sessions and items (`session.*`) are trained; no other parameter
# changes.
#
# Where this differs from the paper: see `fedrec/pretext.py`. The paper does not give learning rate,
# batch size and epochs of stage one.


class ContrastiveConfig(SessionStepConfig):
    """Settings of self-supervised training; a batch is of pairs of views."""


class Contrastive(SessionStep):
    """Local SGD on masked views of the client's sessions."""

    name = "contrastive"
    Config = ContrastiveConfig
    paper = "PrivRec (Wang et al. 2021), eq. 8-10"
    config: ContrastiveConfig

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        # the views of each epoch, in the order of training
        epochs = [self.task.views(data, random) for _ in range(self.config.epochs)]
        return SessionBatches.deal(Batches.none(), epochs, self.config.batch_size, self.task.layout)

    def trained(self, parameters: Parameters) -> Parameters:
        """The item embedding and the encoders."""
        return {
            n: value
            for n, value in parameters.items()
            if n == self.task.table or n.startswith(PREFIX)
        }
