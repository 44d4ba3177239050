# SPDX-License-Identifier: Apache-2.0
"""The interface of poisoning attacks: the profile that a malicious client trains on, or the update
that it sends instead."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from pydantic import Field
from torch import Tensor

from clients.hosting.malicious import MaliciousBlock
from fedrec.config import Config
from fedrec.data.adversary.known import Known


class Poisoning(ABC):
    """What malicious clients do. Derive from `ProfilePoisoning` or `UpdatePoisoning`.

    A built-in has a `name` and lives in `simulations/poisoning/attacks/`, its configuration
    class above it. It holds no state between calls: what it returns is a function of its input.

    Args:
        config: its settings.

    Attributes:
        paper: where the attack is described.
        sends_updates: whether clients send made-up updates, and do not train.
    """

    Config: ClassVar[type[Config]] = Config
    paper: ClassVar[str] = ""
    sends_updates: ClassVar[bool] = False

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def profile(self, known: Known, random: np.random.Generator) -> np.ndarray:
        """The items of one malicious client's training rows, `int64 [n]`, distinct, in the order of
        time.

        Args:
            known: what the adversary knows.
            random: a stream of this client.
        """

    @abstractmethod
    def updates(self, block: MaliciousBlock) -> Mapping[str, Tensor]:
        """The updates of some malicious clients, `[C, ...]` by parameter; zero for parameters that
        are left out."""


class ProfilePoisoning(Poisoning):
    """Malicious clients make up a profile and train on it as honest clients do. Such an attack
    works against every system, centralised ones included."""

    def updates(self, block: MaliciousBlock) -> Mapping[str, Tensor]:
        """Not called.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError


class UpdatePoisoningConfig(Config):
    """Settings of attacks with made-up updates."""

    norm: float | None = Field(default=None, gt=0)
    """L2 norm of each malicious update, in units of that of an honest client with a profile of
    random items; default: as the attack computes it."""


class UpdatePoisoning(Poisoning):
    """Malicious clients send made-up updates; a subclass defines `crafted`.

    Their profiles are random items, of an honest client's usual number: an honest client's update
    is measured on these (`norm`), and centralised systems are fitted to them.
    """

    Config = UpdatePoisoningConfig
    config: UpdatePoisoningConfig
    sends_updates: ClassVar[bool] = True

    @abstractmethod
    def crafted(self, block: MaliciousBlock) -> Mapping[str, Tensor]:
        """The updates before they are scaled, `[C, ...]` by parameter."""

    def profile(self, known: Known, random: np.random.Generator) -> np.ndarray:
        """Random items without targets, `int64 [n]`."""
        others = np.setdiff1d(np.arange(known.items), known.targets)
        return random.choice(others, size=min(known.usual, len(others)), replace=False)

    def updates(self, block: MaliciousBlock) -> Mapping[str, Tensor]:
        """The crafted updates, scaled to the norm of the settings if there is one, `[C, ...]` by
        parameter."""
        found = self.crafted(block)
        if self.config.norm is None:
            return found
        squares = [value.double().flatten(1).square().sum(1) for value in found.values()]
        norms = sum(squares[1:], squares[0]).sqrt()
        wanted = self.config.norm * block.honest_norms.to(norms)
        factors = wanted / norms.clamp(min=1e-300)
        return {
            name: value * factors.view(-1, *[1] * (value.dim() - 1))
            for name, value in found.items()
        }
