# SPDX-License-Identifier: Apache-2.0
"""The interface of steps: the work of a client on its own data in one round."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedrec.components.registry import MODEL, ours
from fedrec.components.sections import named
from fedrec.config import Config, fits
from fedrec.data.client_data import ClientData
from fedrec.errors import ExperimentError
from fedrec.models.base import Model, Parameters
from fedrec.privacy.accounting.sampling import Contributions
from fedrec.training.block import Batches, Block, OwnData, UserCodes
from fedrec.training.draws import ExampleDraw
from fedrec.training.results import BlockUpdate

Train: TypeAlias = Callable[..., BlockUpdate]
"""What trains a block, with the arguments of `Step.train_block`."""


class StepConfig(Config):
    """Settings that every step has."""

    epochs: int = Field(default=5, ge=0)
    """Passes over the local data (E2 in PrivRec); 0 trains nothing, which is how the shared model
    is evaluated."""

    def in_round(self, round_number: int) -> Self:
        """The settings of a training round, from 1; these unless they change over the rounds."""
        return self

    @property
    def uploads(self) -> int | None:
        """Largest number of rounds that a client may take part in, which its device enforces; None:
        any number."""
        return None


class PrivateParameters(StepConfig):
    """Settings of steps whose users choose which parameters are private."""

    private_parameters: tuple[str, ...] = ()
    """Patterns of parameters that stay on the device between rounds and are never sent, such as
    `user.*`."""
    private_std: float | None = Field(default=None, gt=0)
    """Standard deviation of the normal numbers, drawn once by each client, from which its private
    parameters start; default: all clients start from the same values, those of the model."""


class Replaced(str):
    """A pattern of private parameters whose former values training does not need. A round does not
    load them, nor does it save anything for a client without examples, which keeps what it has."""


class Step(ABC):
    """A local training procedure.

    Raises:
        ExperimentError: the model is not one that it trains.

    A built-in has a `name` and lives in `clients/steps/`, its configuration class above it. It
    defines `train_block`, and what is drawn for it: by `draw`, which is fast, or client by client
    by `batches`, unless it draws its batches while it trains. The result is
    a function of the parameters, the clients' data and their random streams; a step holds no state
    between calls.

    Attributes:
        contributions: kind of its updates, which determines the sensitivity to replacing a client.
            `non-negative` only if any two clients' updates have an inner product of at least 0 by
            construction, for all data (`fedrec.privacy.accounting.sampling`). A subclass with other
            batches or training is `signed` unless it declares otherwise.
        symmetric: names of the parameters that every client changes by a symmetric matrix, for all
            data, so that one half is sent. A subclass with other batches or training has none
            unless it declares otherwise.
        trains: class of the models that it trains.
        private: patterns of the parameters that stay on the device between rounds and are never
            sent, each of which must match one; an instance has those of the setting
            `private-parameters`, too.
        generated: whether its clients start from parameters that the server sends to each of them.
    """

    Config: ClassVar[type[StepConfig]] = StepConfig
    contributions: ClassVar[Contributions] = "signed"
    symmetric: ClassVar[tuple[str, ...]] = ()
    trains: ClassVar[type[Model]] = Model
    private: tuple[str, ...] = ()
    generated: ClassVar[bool] = False
    _training: ClassVar[frozenset[str]] = frozenset({"draw", "batches", "block", "train_block"})
    """Methods that `contributions` and `symmetric` are about."""

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if not cls._training.isdisjoint(vars(cls)):
            cls.contributions = vars(cls).get("contributions", "signed")
            cls.symmetric = vars(cls).get("symmetric", ())

    def __init__(self, config: StepConfig, model: Model, device: torch.device) -> None:
        self.config = config
        self.model = model
        self.device = device
        if isinstance(config, PrivateParameters):
            self.private = (*self.private, *config.private_parameters)
        if isinstance(model, self.trains):
            return
        name = f"{self.trains.__module__}:{self.trains.__name__}"
        if ours(MODEL, self.trains):  # `name` of a plug-in may mean something else
            name = vars(self.trains).get("name", name)
        raise ExperimentError(
            f"{named('step', type(self))} trains the model {name!r} only",
            expected=f"model.name = {name!r}",
            got=type(model).__name__,
            fix=f"set model.name = {name!r}, or step.name = 'sgd'",
        )

    def draw(self) -> ExampleDraw | None:
        """Description of a client's draws, so that all are drawn at once; None: `batches`
        draws for one client. It is not asked of a class with `batches` or `block` of its own."""
        return None

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """All batches of one client's local work; by default those of `draw`, or else its data and
        random stream, for steps that draw while they train (`clients.steps.descent`)."""
        draw = self.draw()
        if draw is None:
            return OwnData.of(data, random)
        return draw.batches(data, self.model.schema, random)

    def block(self, users: UserCodes, batches: Sequence[Batches], device: torch.device) -> Block:
        """Build a block from the data of some clients, see `Block.of`."""
        return Block.of(users, batches, device)

    @abstractmethod
    def train_block(
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> BlockUpdate:
        """Train every client of a block.

        Args:
            parameters: the global ones, without cohort dimension, unchanged.
            block: the clients.
            client_params: what the clients start from instead of the global parameters, `[C, ...]`
                each, unchanged: their saved private parameters, in a round without those that are
                `Replaced`, and what the server sent to each (`generated`). Of an item table the
                block's touched rows, `[C, R, ...]`.
        """

    def in_kernel(self) -> Train | str:
        """A function that does what `train_block` does in native code, or the reason why there is
        none."""
        return f"step {type(self).__name__} has no kernel"

    def prepare(self, parameters: Parameters, generator: torch.Generator) -> dict[str, Tensor]:
        """Check that the settings fit the parameters, and return the initial values of those that
        this step adds; by default they fit, and it adds none. It is called before the first round
        for every step of an experiment, and for fine-tuning, which adds none.

        Args:
            parameters: the initial global parameters: the model's, and those that steps before this
                one add.
            generator: of the initial values, on the CPU.

        Raises:
            ExperimentError: a setting does not fit; its key begins with `step.`.
        """
        return {}


def private_names(step: Step, names: Iterable[str]) -> list[str]:
    """The parameters among `names` that stay on the device between rounds and are never sent."""
    return [name for name in names if fits(name, tuple(step.private))]


def replaced_names(step: Step, names: Iterable[str]) -> list[str]:
    """The private parameters among `names` whose former values training does not need."""
    patterns = tuple(pattern for pattern in step.private if isinstance(pattern, Replaced))
    return [name for name in names if fits(name, patterns)]


def keeps_state(step: Step) -> bool:
    """True if state stays on the device: private parameters, or the number of rounds that it took
    part in."""
    return bool(step.private) or step.config.uploads is not None
