# SPDX-License-Identifier: Apache-2.0
"""The interface of steps: what a client does with its own data in one round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedrec.cohort.batches import Batches
from fedrec.cohort.block import Block
from fedrec.cohort.outcome import Outcome
from fedrec.components.contract_check import covers_overrides
from fedrec.config import Config
from fedrec.data.client_data import ClientData
from fedrec.models.base import Model
from fedrec.privacy.adjacency import Contributions


@dataclass(frozen=True, eq=False)
class Update:
    """The result of one client's local training.

    Attributes:
        delta: `theta_local - theta_global` per parameter, on the step's device.
        examples: number of examples in one epoch (rows and negatives).
        loss: mean loss over the last epoch; NaN without examples.
    """

    delta: dict[str, Tensor]
    examples: int
    loss: float


class StepConfig(Config):
    """Settings that every step has."""

    epochs: int = Field(default=5, ge=0)
    """Passes over the local data (E2 in PrivRec); 0 trains nothing, which is how the shared model
    is evaluated."""


class Step(ABC):
    """One local procedure.

    A subclass lives in a file of its own in `clients/steps/`, its configuration class above it. The
    result is a function of the parameters, the client's data and the random stream; a step holds no
    state between calls.

    Attributes:
        contributions: kind of its updates, which determines the sensitivity to replacing a client.
            `non-negative` only if any two clients' updates have an inner product of at least 0 by
            construction, for all data (`fedrec.privacy.adjacency`). A subclass with another
            `update` is `signed` unless it declares otherwise.
        simulations_only: whether it exists for attacks and audits; real nodes refuse it.
    """

    Config: ClassVar[type[StepConfig]] = StepConfig
    paper: ClassVar[str] = ""
    contributions: ClassVar[Contributions] = "signed"
    simulations_only: ClassVar[bool] = False

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if "update" in vars(cls) and "contributions" not in vars(cls):
            cls.contributions = "signed"

    def __init__(self, config: StepConfig, model: Model, device: torch.device) -> None:
        self.config = config
        self.model = model
        self.device = device

    @abstractmethod
    def update(
        self, parameters: Mapping[str, Tensor], data: ClientData, random: np.random.Generator
    ) -> Update:
        """Train on one client's data, starting from the global `parameters` (without cohort
        dimension, unchanged)."""

    def added_parameters(
        self, model: Mapping[str, Tensor], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Initial values of additional parameters that this step trains with those of the `model`;
        none by default."""
        return {}

    def assign(self, clients: np.ndarray) -> Iterator[tuple[Step, np.ndarray]]:
        """Steps and the clients of a round that each trains, `int64 [clients]`; by default this
        step trains all."""
        yield self, clients

    def in_round(self, round_number: int) -> Step:
        """The step for a training round, from 1; the step itself unless settings change over the
        rounds."""
        return self

    @property
    def uploads(self) -> int | None:
        """Largest number of rounds that a client may take part in, which its device enforces; None:
        any number."""
        return None

    def private_names(self, names: list[str]) -> list[str]:
        """The parameters among `names` that stay on the device between rounds and are never sent;
        none by default."""
        return []

    @property
    def private_patterns(self) -> tuple[str, ...]:
        """Patterns of private parameter names, each of which must match a parameter; none by
        default."""
        return ()

    @property
    def keeps(self) -> bool:
        """Whether state stays on the device: private parameters (by default, whether the class
        defines any), or the number of rounds that it took part in."""
        return type(self).private_names is not Step.private_names or self.uploads is not None


class CohortStep(Step):
    """A step that can also train many clients at once, with the same result as `update` client by
    client."""

    @abstractmethod
    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """All batches of one client's local work, from the same random draws as `update`."""

    def block(
        self,
        users: Sequence[tuple[np.ndarray, ...]],
        batches: Sequence[Batches],
        device: torch.device,
    ) -> Block:
        """Build a block from the data of some clients; `users` are each client's category codes per
        user feature, `int64 [width]` each."""
        return Block.of(users, batches, device)

    @abstractmethod
    def train_block(
        self,
        parameters: Mapping[str, Tensor],
        block: Block,
        own: Mapping[str, Tensor] | None = None,
    ) -> Outcome:
        """Train every client of a block.

        Args:
            parameters: the global ones, without cohort dimension, unchanged.
            block: the clients.
            own: the clients' saved private parameters, `[C, ...]` each, unchanged, from which they
                start instead of the global ones; never item tables. Passed if `private_names` is
                not empty.
        """

    def kernel_refusal(self) -> str | None:
        """The reason why native code cannot take this step; None: `train_in_kernel` does it."""
        return f"step {type(self).__name__} has no kernel"

    def train_in_kernel(
        self,
        parameters: Mapping[str, Tensor],
        block: Block,
        own: Mapping[str, Tensor] | None = None,
    ) -> Outcome:
        """The same as `train_block` in native code; called if `kernel_refusal` is None."""
        raise NotImplementedError

    def declared_refusal(self) -> str | None:
        """The result of `kernel_refusal`, unless a subclass overrides a method that the kernel
        replaces."""
        none = type(self).train_in_kernel is CohortStep.train_in_kernel
        if none or covers_overrides(
            type(self), "train_in_kernel", ("update", "batches", "block", "train_block")
        ):
            return self.kernel_refusal()
        return f"step {type(self).__name__} overrides what the kernel of its base class replaces"


class GeneratedStep(Step):
    """A step whose clients start from parameters that the server generated for each of them, and
    reply with gradients, or with the negative change of local training.

    Its `update` gets one client's generated parameters, item tables at full size, and gives minus
    the gradient of the client's mean loss: the reference for `gradients`.
    """

    @abstractmethod
    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """One client's examples, from the same random draws as `update`; they name the rows that it
        needs."""

    def block(
        self,
        users: Sequence[tuple[np.ndarray, ...]],
        batches: Sequence[Batches],
        device: torch.device,
    ) -> Block:
        """Build a block from the data of some clients; `users` are each client's category codes per
        user feature, `int64 [width]` each."""
        return Block.of(users, batches, device)

    @abstractmethod
    def gradients(
        self, parameters: Mapping[str, Tensor], block: Block
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Gradients of every client of a block.

        Args:
            parameters: `[C, ...]` each, of an item table that was generated the block's touched
                rows `[C, R, ...]`; the private parameters (`private_names`) whole among them.
            block: the clients.

        Returns:
            The gradient of each client's mean loss over all its batches together, in the same
            shapes, and these losses, `[C]`; NaN without examples. Private parameters are updated on
            the device by minus their gradient.
        """

    def sent(self, names: list[str]) -> list[str]:
        """The generated parameters among `names` whose gradients are sent; all by default."""
        return names
