# SPDX-License-Identifier: Apache-2.0
"""The contract of a membership attack that looks at one trained system;
`fedrec attack run NAME EXPERIMENT` runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedrec.config import Config
from fedrec.data.population import Population

Blocks = Callable[[np.ndarray], Iterator[tuple[np.ndarray, np.ndarray]]]


@dataclass(frozen=True, eq=False)
class Attacked:
    """What the attacker sees: a trained system, and the data of users of whom some trained it.

    Attributes:
        users: `int64`, ascending; about half of them trained the system.
        population: their data; the partition is that of the experiment before members were drawn,
            so it tells nothing.
        parameters: the system's global parameters, read-only.
        scores: gives blocks of some users and the system's scores of the catalogue for them,
            `float32 [n, items]`.
    """

    users: np.ndarray
    population: Population
    parameters: Mapping[str, np.ndarray]
    scores: Blocks


class Attack(ABC):
    """Tells users who trained a system from users who did not.

    A subclass lives in a file of its own in `fedrec/attacks/members/`, its configuration class
    above it. Its answer is a function of what it sees, its settings and the seed.

    Args:
        config: its settings.
        seed: of the experiment; random decisions come from `fedrec.rng.stream(seed, NAME)`.
    """

    Config: ClassVar[type[Config]] = Config
    paper: ClassVar[str] = ""

    def __init__(self, config: Config, seed: int) -> None:
        self.config, self.seed = config, seed

    @abstractmethod
    def suspicion(self, attacked: Attacked) -> np.ndarray:
        """`float64 [users]`, one number per user of `attacked.users`: the higher, the more likely
        it trained."""

    def threshold(self, suspicion: np.ndarray) -> float:
        """Above which a user is called a member; by default the median, as about half of the users
        are."""
        return float(np.median(suspicion))
