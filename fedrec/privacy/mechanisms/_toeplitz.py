# SPDX-License-Identifier: Apache-2.0
"""What mechanisms with noise C^-1 z have in common, where C is lower triangular and Toeplitz with
the first coefficient 1, and z is independent Gaussian noise.

With z in place of C^-1 z, all rounds together are one Gaussian release of C x, where x are the sums
of the rounds; what a client moves it by is `fedrec.privacy.factorisation.cost.sensitivity`. If the
cohorts are secret and drawn by independent coin flips among the clients whose turn it is, each of a
client's rounds is a sampled Gaussian release of its own (Choquette-Choo et al. 2023, theorem 4).
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from functools import lru_cache
from typing import ClassVar

import numpy as np

from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.events import Release
from fedrec.privacy.accounting.sampling import Full, Poisson, Sampling, Scheduled
from fedrec.privacy.factorisation.coefficients import inverse, prefix_sums
from fedrec.privacy.factorisation.cost import (
    errors,
    has_known_cost,
    norms,
    schedule_of,
    sensitivity,
)
from fedrec.privacy.mechanisms.base import Mechanism
from fedrec.privacy.mechanisms.gaussian import GaussianPair

_LIMIT = 4000  # rounds after which no row of C^-1 grows


class ToeplitzMechanism(Mechanism):
    """Noise C^-1 z; a subclass gives the coefficients of C, and draws."""

    pair = GaussianPair
    samplings = (Full, Scheduled)
    most_rounds: ClassVar[int] = 1_000_000
    """Largest number of rounds, all of which are filtered by the coefficients to find the noise on
    running sums; more would take minutes."""

    @abstractmethod
    def column(self, rounds: int) -> np.ndarray:
        """The first coefficients of C that are not 0, `float64 [bands]`, of at most so many
        rounds."""

    @property
    def std(self) -> float:
        """Largest standard deviation of a value: the norm of the last row of C^-1, which grows with
        the rounds to a limit."""
        return _largest_row(self)

    def running_sums(self, rounds: int) -> float:
        """Root mean square of B z."""
        workload = prefix_sums(rounds, self.momentum)
        return float(np.sqrt(errors(self.column(rounds), workload).mean()))

    def mixing(self, rounds: int) -> np.ndarray:
        """The first column of C^-1."""
        return inverse(self.column(rounds), rounds)

    def fits(self, sampling: Sampling) -> bool:
        """Whether the cost of its coefficients is known for a schedule."""
        schedule = schedule_of(sampling)
        return schedule is not None and has_known_cost(self.column(_LIMIT), schedule)

    def releases(self, one: Release, rounds: int, sampling: Sampling) -> dict[Release, int]:
        """One Gaussian release; of secret cohorts, one for each of a client's rounds.

        Raises:
            ExperimentError: there are more than `most_rounds`.
        """
        if rounds > self.most_rounds:
            raise ExperimentError(
                f"too many rounds for the correlated noise {self.name!r}",
                expected=f"at most {self.most_rounds:,} rounds, which it takes seconds to account",
                got=f"{rounds:,}",
                fix="set fewer rounds, or another mechanism",
            )
        schedule = schedule_of(sampling)
        if schedule is None:
            return super().releases(one, rounds, sampling)
        column = self.column(rounds)
        z = one.noise_multiplier
        if schedule.rate == 1:
            return {_gaussian(one, Full(), z / sensitivity(column, rounds, schedule)): 1}
        drawn = Poisson(schedule.rate)
        counted = Counter(norms(column, rounds, schedule).tolist())
        return {_gaussian(one, drawn, z / norm): count for norm, count in counted.items()}


def _gaussian(one: Release, sampling: Sampling, noise_multiplier: float) -> Release:
    return Release("gaussian", sampling, one.adjacency, noise_multiplier)


@lru_cache(maxsize=64)
def _largest_row(mechanism: ToeplitzMechanism) -> float:
    return float(np.linalg.norm(mechanism.mixing(_LIMIT)))
