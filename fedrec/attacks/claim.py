# SPDX-License-Identifier: Apache-2.0
"""The privacy claim of a run as an audit tests it, and the distribution of its canaries' scores
under this claim.

Adjacency is replace-one: canary j uploads +S u_j or -S u_j, and both are clipped to the norm S.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.stats import binom

from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.rdp import gdp_epsilon, smallest_epsilon


@dataclass(frozen=True)
class PrivacyClaim:
    """The claimed release of a round: a clipped sum over the cohort, divided by a fixed number,
    plus normal noise.

    Attributes:
        clip: S, largest L2 norm of one client's update, > 0; S / sqrt(2) where updates never point
            in opposite directions: half of how far two clients can be apart.
        denominator: M, what the sum is divided by, > 0.
        noise_std: standard deviation of the noise in each coordinate of the mean, >= 0; PrivRec:
            `z * 2 S / M`.
        sampling_rate: q, chance that a client takes part in a round, in (0, 1].
        rounds: T, number of releases.
        delta: delta of the claim, in (0, 1).
        mixing: `[T]`, what the noise of a round has of the independent noise of that round
            and of those before; then `noise_std` is that of the independent noise. None: noise is
            independent in every round.
        epsilon: the claim: an upper bound at `delta` for all rounds together, computed for the
            population that was trained, canaries included; infinite if nothing is claimed.

    Raises:
        ExperimentError: a value is out of range.
    """

    clip: float
    denominator: float
    noise_std: float
    sampling_rate: float
    rounds: int
    delta: float
    epsilon: float
    mixing: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        ranges = {
            "clip": self.clip > 0,
            "denominator": self.denominator > 0,
            "noise-std": self.noise_std >= 0,
            "sampling rate": 0 < self.sampling_rate <= 1,
            "rounds": self.rounds >= 1,
            "delta": 0 < self.delta < 1,
            "epsilon": self.epsilon >= 0,
        }
        wrong = [name for name, right in ranges.items() if not right]
        if wrong:
            raise ExperimentError(
                f"the mechanism to audit has a wrong {wrong[0]}",
                expected=(
                    "clip, denominator > 0; noise-std, epsilon >= 0; sampling rate in (0, 1]; delta"
                    " in (0, 1)"
                ),
                got=repr(self),
                fix=f"give {wrong[0]} a value in its range",
            )

    @property
    def signal(self) -> float:
        """`S / M`: how far one client moves the mean."""
        return self.clip / self.denominator

    @property
    def noise_multiplier(self) -> float:
        """z: noise over replace-one sensitivity, `noise_std M / (2 S)`."""
        return self.noise_std / (2 * self.signal)

    def known_epsilon(self, releases: float) -> float:
        """Epsilon at `delta` against an observer who knows in how many releases a client took part;
        of correlated noise, the squared norm of what it moved."""
        return gdp_epsilon(
            math.sqrt(releases) / self.noise_multiplier if self.noise_std else math.inf, self.delta
        )

    @cached_property
    def shown(self) -> float:
        """The attack's own epsilon: the largest that the sum of a canary's releases can show at
        `delta` if the claim holds.

        A canary's number of releases is binomial, so the two hypotheses are mixtures of normal
        distributions.
        """
        if not self.noise_std:
            return math.inf
        if self.mixing is not None:
            return self.epsilon
        times = np.arange(self.rounds + 1)
        weight = np.exp(binom.logpmf(times, self.rounds, self.sampling_rate))
        sd = self.noise_std * math.sqrt(self.rounds)
        reach = times[weight > 1e-18].max() * self.signal + 12 * sd
        points = np.linspace(-reach, reach, 20_001)
        keep = times[weight > 1e-18]
        density = np.zeros_like(points)
        for count in keep.tolist():
            density += weight[count] * np.exp(-np.square((points - count * self.signal) / sd) / 2)
        plus = density / density.sum()
        minus = density[::-1] / density.sum()

        def spent(epsilon: float) -> float:
            return float(np.maximum(plus - math.exp(epsilon) * minus, 0.0).sum())

        return smallest_epsilon(spent, self.delta, largest=500.0)
