# SPDX-License-Identifier: Apache-2.0
"""The noise of a release as a pair of distributions, and the pair that dominates a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from fedrec.components.registry import MECHANISM, resolve
from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.events import Release

# The noise of one release as accountants see it: two distributions one sensitivity apart.
#
# Q is the noise around 0, P the noise around 1, everything in units of the sensitivity. Accountants
# know this interface only; each mechanism names the pair of its releases. A mechanism that knows
# what its rounds cost, and no distributions, names a `fedrec.privacy.accounting.profile.Profile`.


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


# The pair of distributions that dominates one round, from which the accountants compute epsilon.
#
# With Q the noise around 0, P the noise around 1 (everything in units of the sensitivity) and mix =
# (1 - q) Q + q P:
#
# * Poisson sampling, add-remove: (mix, Q) for a client that leaves, (Q, mix) for one that joins;
# each   composes. * Fixed size without replacement, replace-one: the profile h(e^t) = H(mix || Q)
# for t >= 0 and H(Q   || mix) for t < 0. Split neighbours by whether client i is drawn, M(D) = (1 -
# q) C + q A and M(D')   = (1 - q) C + q A'; one replacement also turns A into C, so that advanced
# joint convexity bounds   the hockey-stick divergence by that of (mix, Q). The profile is convex in
# e^t, hence it belongs to   one pair: the positive losses of (mix, Q), the negative losses of (Q,
# mix), and the rest of the   mass at loss 0. That pair composes; (mix, Q) alone is not a bound
# here, but is reached by a real   attack (all others upload -S, the target S or -S).
#
# Both hold for any P, Q that dominate the noise, which `fedrec.privacy.accounting.noise_pair`
# describes.
#
# Sources: Balle, Barthe and Gaboardi 2018; Zhu, Dong and Wang 2022; Lebeda et al. 2024.


@dataclass(frozen=True)
class Pair:
    """(mix, Q) of a sampled release: masses of both in intervals of the loss ln(mix/Q).

    Attributes:
        release: what was released.
    """

    release: Release

    @property
    def noise(self) -> NoisePair:
        """The unsampled pair."""
        return pair_of(self.release)

    def loss(self, x: float) -> float:
        """ln(mix/Q) at x."""
        rate = self.release.sampling.rate
        log_ratio = self.noise.log_ratio(x)
        return (
            float(np.logaddexp(np.log1p(-rate), np.log(rate) + log_ratio))
            if rate < 1
            else log_ratio
        )

    def place(self, losses: np.ndarray) -> np.ndarray:
        """The x `[n]` at which the loss has these values `[n]`; -infinity below its range."""
        rate = self.release.sampling.rate
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            # e^t - (1 - q) = expm1(t) + q, in logarithms for losses that would overflow.
            small = np.log((np.expm1(np.minimum(losses, 50.0)) + rate) / rate)
            log_ratio = np.where(losses > 50, losses - np.log(rate), small)
        return np.where(
            np.isnan(log_ratio),
            -np.inf,
            self.noise.place(np.nan_to_num(log_ratio, nan=0.0, neginf=-1e300)),
        )

    def masses(self, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Masses of mix and of Q in the intervals (edges[i], edges[i + 1]] of the loss
        ln(mix/Q)."""
        x = self.place(edges)
        rate = self.release.sampling.rate
        noise = self.noise
        of_q = noise.between(x[:-1], x[1:], 0.0)
        return (1 - rate) * of_q + rate * noise.between(x[:-1], x[1:], 1.0), of_q

    def range(self, mass: float) -> tuple[float, float]:
        """Smallest and largest loss, except for at most that mass of mix and of Q at either end."""
        reach = float(self.noise.reach(mass))
        return self.loss(-reach), self.loss(1 + reach)
