# SPDX-License-Identifier: Apache-2.0
"""The noise of one release as accountants see it: two distributions one sensitivity apart.

Q is the noise around 0, P the noise around 1, everything in units of the sensitivity. Accountants
know this interface only; each mechanism names the pair of its releases. A mechanism that knows what
its rounds cost, and no distributions, names a `fedrec.privacy.accounting.profile.Profile`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedrec.components.registry import MECHANISM, resolve
from fedrec.errors import ExperimentError

if TYPE_CHECKING:
    from fedrec.privacy.accounting.events import Release


class NoisePair(ABC):
    """P and Q of noise that is symmetric around its centre.

    Args:
        multiplier: noise scale / sensitivity.
        own: numbers of the mechanism's own (`Release.own`) on which they depend.
    """

    tight: ClassVar[bool] = True
    """Whether an attack reaches what they cost, or they are only known to dominate it."""

    def __init__(self, multiplier: float, *own: float) -> None:
        self.multiplier = multiplier
        self.own = own

    @abstractmethod
    def above(self, x: np.ndarray, centre: float) -> np.ndarray:
        """Mass above x `[n]` of the noise around a centre, `[n]`, exact to rounding in both
        tails."""

    @abstractmethod
    def place(self, log_ratio: np.ndarray) -> np.ndarray:
        """The x `[n]` at which ln(P/Q) has these values `[n]`; beyond its range -infinity or
        infinity."""

    @abstractmethod
    def log_ratio(self, x: float) -> float:
        """ln(P/Q) at x."""

    @abstractmethod
    def reach(self, mass: float) -> float:
        """Distance from its centre beyond which the noise has at most that mass, on either side."""

    @abstractmethod
    def moments(self) -> tuple[float, float]:
        """Rough mean and variance of the loss ln(P/Q) under P."""

    def between(self, lower: np.ndarray, upper: np.ndarray, centre: float) -> np.ndarray:
        """Mass in (lower, upper], `[n]` each; computed from the nearer tail, so that small masses
        are exact."""
        right = self.above(lower, centre) - self.above(upper, centre)
        left = self.above(2 * centre - upper, centre) - self.above(2 * centre - lower, centre)
        return np.maximum(np.where(lower >= centre, right, left), 0.0)

    @property
    def pure_epsilon(self) -> float:
        """Epsilon at delta 0, without sampling; infinite by default."""
        return float("inf")

    @property
    def mu(self) -> float | None:
        """Parameter of a Gaussian release (Dong, Roth and Su 2022), whose squares add up; None for
        other noise."""
        return None

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        """Rényi divergence of P from Q at some orders > 1, `[orders]`; not every noise has a
        formula.

        Raises:
            ExperimentError: there is none.
        """
        raise self._without("Rényi curve")

    def _without(self, what: str) -> ExperimentError:
        return ExperimentError(
            f"the noise of {type(self).__name__} has no {what}",
            expected="an accountant that needs none",
            got="accounting by Rényi differential privacy",
            fix="set privacy.backend = 'pld'",
        )


@lru_cache(maxsize=256)
def pair_of(release: Release) -> NoisePair:
    """The pair of a release without sampling."""
    return resolve(MECHANISM, release.mechanism).pair(release.noise_multiplier, *release.own)
