# SPDX-License-Identifier: Apache-2.0
"""The pair of distributions that dominates one round, from which the accountants compute epsilon.

With Q the noise around 0, P the noise around 1 (everything in units of the sensitivity) and mix =
(1 - q) Q + q P:

* Poisson sampling, add-remove: (mix, Q) for a client that leaves, (Q, mix) for one that joins; each
  composes.
* Fixed size without replacement, replace-one: the profile h(e^t) = H(mix || Q) for t >= 0 and H(Q
  || mix) for t < 0. Split neighbours by whether client i is drawn, M(D) = (1 - q) C + q A and M(D')
  = (1 - q) C + q A'; one replacement also turns A into C, so that advanced joint convexity bounds
  the hockey-stick divergence by that of (mix, Q). The profile is convex in e^t, hence it belongs to
  one pair: the positive losses of (mix, Q), the negative losses of (Q, mix), and the rest of the
  mass at loss 0. That pair composes; (mix, Q) alone is not a bound here, but is reached by a real
  attack (all others upload -S, the target S or -S).

Both hold for any P, Q that dominate the noise. In many dimensions these are one coordinate shifted
by the sensitivity: for Gaussian noise by symmetry, for Laplace noise because trade-off functions of
shifts form a group, so that shifts in several coordinates are not easier to distinguish than their
sum in one.

Sources: Balle, Barthe and Gaboardi 2018; Zhu, Dong and Wang 2022; Lebeda et al. 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from fedrec.privacy.accounting.events import Release


@dataclass(frozen=True)
class Noise:
    """The unsampled pair: Q around 0 and P around 1, with the release's noise.

    Attributes:
        release: mechanism and noise multiplier.
    """

    release: Release

    def above(self, x: np.ndarray, centre: float) -> np.ndarray:
        """Mass above x `[n]` of the noise around a centre, `[n]`, exact to rounding in both
        tails."""
        z = self.release.noise_multiplier
        if self.release.mechanism == "gaussian":
            return ndtr((centre - x) / z)
        far = np.exp(-np.abs(x - centre) / z) / 2
        return np.where(x >= centre, far, 1 - far)

    def between(self, lower: np.ndarray, upper: np.ndarray, centre: float) -> np.ndarray:
        """Mass in (lower, upper], `[n]` each; computed from the nearer tail, so that small masses
        are exact."""
        right = self.above(lower, centre) - self.above(upper, centre)
        left = self.above(2 * centre - upper, centre) - self.above(2 * centre - lower, centre)
        return np.maximum(np.where(lower >= centre, right, left), 0.0)

    def place(self, log_ratio: np.ndarray) -> np.ndarray:
        """The x `[n]` at which ln(P/Q) has these values `[n]`; beyond its range -infinity or
        infinity."""
        z = self.release.noise_multiplier
        if self.release.mechanism == "gaussian":
            return z * z * log_ratio + 0.5
        x = (z * log_ratio + 1) / 2
        return np.where(log_ratio >= 1 / z, np.inf, np.where(log_ratio < -1 / z, -np.inf, x))

    def log_ratio(self, x: float) -> float:
        """ln(P/Q) at x."""
        z = self.release.noise_multiplier
        if self.release.mechanism == "gaussian":
            return (2 * x - 1) / (2 * z * z)
        return (abs(x) - abs(x - 1)) / z

    def reach(self, mass: float) -> float:
        """Distance from its centre beyond which the noise has at most that mass, on either side."""
        z = self.release.noise_multiplier
        return z * (
            np.sqrt(-2 * np.log(mass)) if self.release.mechanism == "gaussian" else -np.log(mass)
        )


@dataclass(frozen=True)
class Pair:
    """(mix, Q) of a sampled release: masses of both in intervals of the loss ln(mix/Q).

    Attributes:
        release: what was released.
    """

    release: Release

    @property
    def noise(self) -> Noise:
        """The unsampled pair."""
        return Noise(self.release)

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
