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

Both hold for any P, Q that dominate the noise, which `fedrec.privacy.accounting.noise_pair`
describes.

Sources: Balle, Barthe and Gaboardi 2018; Zhu, Dong and Wang 2022; Lebeda et al. 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedrec.privacy.accounting.events import Release
from fedrec.privacy.accounting.noise_pair import NoisePair, pair_of


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
