# SPDX-License-Identifier: Apache-2.0
"""The contract of a step: what one client does with its own data in one round."""

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
from fedrec.components.contract_check import speaks_for
from fedrec.config import Config
from fedrec.data.client_data import ClientData
from fedrec.models.base import Model
from fedrec.privacy.adjacency import Contributions


@dataclass(frozen=True, eq=False)
class Update:
    """What one client's local work gives.

    Attributes:
        delta: `theta_local - theta_global` per parameter, on the step's device.
        examples: number of examples the client learned from in one epoch (its rows and its
            negatives).
        loss: mean loss over the last epoch; NaN when the client had nothing to learn from.
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
        contributions: what its updates are, which says how much noise replacing a client costs.
            `non-negative` only where any two clients' updates have an inner product of at least 0
            by construction, whatever their data (`fedrec.privacy.adjacency`). A subclass with
            another `update` is `signed` again unless it says so itself.
    """

    Config: ClassVar[type[StepConfig]] = StepConfig
    paper: ClassVar[str] = ""
    contributions: ClassVar[Contributions] = "signed"

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if "update" in vars(cls) and "contributions" not in vars(cls):
            cls.contributions = "signed"

    def __init__(self, config: StepConfig, model: Model, device: torch.device) -> None:
        self.config, self.model, self.device = config, model, device

    @abstractmethod
    def update(
        self, parameters: Mapping[str, Tensor], data: ClientData, random: np.random.Generator
    ) -> Update:
        """Train on one client's data, starting from the global `parameters` (without cohort
        dimension, unchanged)."""

    def added_parameters(
        self, model: Mapping[str, Tensor], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Fresh parameters that this step trains beside those of the `model`; none by default."""
        return {}

    def assign(self, clients: np.ndarray) -> Iterator[tuple[Step, np.ndarray]]:
        """Which step trains which of a round's clients, `int64` each; this one trains all by
        default."""
        yield self, clients

    def in_round(self, round_number: int) -> Step:
        """The step for a training round, from 1; itself, unless settings change over the rounds."""
        return self

    @property
    def uploads(self) -> int | None:
        """In how many rounds a client may take part at most; its device refuses more. None: in any
        number."""
        return None

    def private_names(self, names: list[str]) -> list[str]:
        """The parameters among `names` that stay on the device between rounds and are never sent;
        none by default."""
        return []

    @property
    def private_patterns(self) -> tuple[str, ...]:
        """Patterns of parameter names of which each is meant to fit some private one; none by
        default."""
        return ()

    @property
    def keeps(self) -> bool:
        """Whether something stays on the device: some parameters (unless a subclass knows better,
        whether it says which), or the number of rounds that it took part in."""
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
        """Put clients together, see `Block.of`."""
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
            own: what the clients have kept of their private parameters, `[C, ...]` each, unchanged;
                they start from these instead. Never item tables. Given where `private_names` names
                some.
        """

    def kernel_refusal(self) -> str | None:
        """Why native code cannot take this step, in a few words; None: it can, and
        `train_in_kernel` does it."""
        return f"step {type(self).__name__} has no kernel"

    def train_in_kernel(
        self,
        parameters: Mapping[str, Tensor],
        block: Block,
        own: Mapping[str, Tensor] | None = None,
    ) -> Outcome:
        """The same as `train_block` in native code; asked for where `kernel_refusal` gives None."""
        raise NotImplementedError

    def declared_refusal(self) -> str | None:
        """What `kernel_refusal` says, unless a subclass changed what the kernel would do."""
        none = type(self).train_in_kernel is CohortStep.train_in_kernel
        if none or speaks_for(
            type(self), "train_in_kernel", ("update", "batches", "block", "train_block")
        ):
            return self.kernel_refusal()
        return f"step {type(self).__name__} changes what the kernel of its base class does"


class GeneratedStep(Step):
    """A step whose clients start from parameters that the server made for each of them, and answer
    with gradients, or with what local training changed under the opposite sign.

    Its `update` gets one client's generated parameters, item tables at full size, and gives minus
    the gradient of the client's mean loss: the reference that `gradients` is compared with.
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
        """Put clients together, see `Block.of`."""
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
            shapes, and these losses, `[C]`; NaN without examples. What is private is kept on the
            device minus its gradient.
        """

    def sent(self, names: list[str]) -> list[str]:
        """The generated parameters among `names` whose gradients are sent; all by default."""
        return names
