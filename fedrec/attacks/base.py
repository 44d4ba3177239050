# SPDX-License-Identifier: Apache-2.0
"""The interface of membership attacks on one trained system, run by `fedrec attack run NAME
EXPERIMENT`."""

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
        users: `int64 [users]`, ascending; about half of them trained the system.
        population: their data; the partition is that of the experiment before members were drawn,
            so it reveals no membership.
        parameters: the system's global parameters, read-only.
        scores: gives blocks of some users and the system's scores of the catalogue for them,
            `float32 [n, items]`.
    """

    users: np.ndarray
    population: Population
    parameters: Mapping[str, np.ndarray]
    scores: Blocks


class Attack(ABC):
    """Distinguishes members (training users of a system) from non-members.

    A subclass lives in a file of its own in `fedrec/attacks/members/`, its configuration class
    above it. Its result is a function of its inputs, settings and seed.

    Args:
        config: its settings.
        seed: of the experiment; random decisions come from `fedrec.rng.stream(seed, NAME)`.
    """

    Config: ClassVar[type[Config]] = Config
    paper: ClassVar[str] = ""

    def __init__(self, config: Config, seed: int) -> None:
        self.config = config
        self.seed = seed

    @abstractmethod
    def suspicion(self, attacked: Attacked) -> np.ndarray:
        """`float64 [users]`, one number per user of `attacked.users`: the higher, the more likely
        it trained."""

    def threshold(self, suspicion: np.ndarray) -> float:
        """Threshold of the scores `float64 [users]` above which a user counts as a member; by
        default the median, because about half of the users are members."""
        return float(np.median(suspicion))
