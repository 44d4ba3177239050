# SPDX-License-Identifier: Apache-2.0
"""Banded matrix factorisation: Gaussian noise that later rounds partly cancel, so that prefix sums
are less noisy; cohorts need not be secret (Choquette-Choo et al. 2023, "(Amplified) Banded Matrix
Factorization").

Noise is C^-1 z, where C is lower triangular and Toeplitz with `bands` coefficients, those of the
square root of the workload of prefix sums, and z is independent Gaussian noise. The noise of a
round is z_t minus parts of the noise of the `bands - 1` rounds before, which is all that is
remembered.

With z in place of C^-1 z, all rounds together are one Gaussian release of C x, where x are the sums
of the rounds; `sensitivity` is what a client moves it by.

Where this differs from the paper: it optimises each entry of the band and normalises the columns;
C is Toeplitz here (McKenna 2024), with coefficients that need no number of rounds. So a run may
become longer, and noise of earlier rounds stays right.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.sampling import Full, Sampling, Scheduled, unknown_cost
from fedrec.privacy.mechanisms.base import Mechanism, Memory
from fedrec.rng import NoiseSource

if TYPE_CHECKING:
    from dp_accounting.dp_event import DpEvent

_LIMIT = 4000  # rounds after which no row of C^-1 grows
_MOST_ROUNDS = 1_000_000

# First columns of lower triangular Toeplitz matrices `[rounds, rounds]`: power series.


def square_root(bands: int) -> np.ndarray:
    """The first coefficients of the square root of prefix sums, `float64 [bands]` (Fichtenberger,
    Henzinger and Upadhyay 2023); positive and decreasing, from 1."""
    index = np.arange(1, bands)
    return np.cumprod(np.append(1.0, (2 * index - 1) / (2 * index)))


def inverse(column: np.ndarray, rounds: int) -> np.ndarray:
    """The first column of the inverse, `float64 [rounds]`; missing coefficients are 0."""
    from scipy.signal import lfilter  # slow to import, and unused by most mechanisms

    return np.asarray(lfilter([1.0], column[:rounds], np.eye(1, rounds)[0]))


def sensitivity(column: np.ndarray, rounds: int, schedule: Scheduled) -> float:
    """Largest norm by which a client moves C x, if it moves x by at most 1 in each of its rounds.

    It is that of a client of the first round that comes again as soon and as often as it may:
    shown by Choquette-Choo et al. 2023 (theorem 2) for bands that do not overlap, and by Kalinin
    and Lampert 2024 (theorem 2) for coefficients that do not increase, as those of `square_root`.

    Args:
        column: C's first coefficients, `[bands]`.
        rounds: number of rounds T.
        schedule: bound on a client's rounds.
    """
    moved = np.zeros(rounds)
    for first in np.arange(schedule.most(rounds)) * schedule.separation:
        visible = column[: rounds - first]
        moved[first : first + len(visible)] += visible
    return float(np.linalg.norm(moved))


class BandedConfig(Config):
    """Settings of banded noise."""

    bands: int = Field(default=16, ge=1, le=1000)
    """Number of bands b of C: the noise of a round partly cancels that of the b - 1 rounds before
    it; 1: independent noise. Best: the separation of a client's rounds."""


class Banded(Mechanism):
    """Noise that later rounds partly cancel, for clients whose rounds are at least b apart, or full
    participation."""

    name = "banded"
    Config = BandedConfig
    paper = "(Amplified) Banded Matrix Factorization (Choquette-Choo et al. 2023)"
    config: BandedConfig

    def __init__(self, config: BandedConfig, name: str) -> None:
        super().__init__(config, name)
        self.column = square_root(config.bands)

    @property
    def std(self) -> float:
        """Largest standard deviation of a value: the norm of the last row of C^-1, which grows with
        the rounds to a limit."""
        return _largest_row(self.config.bands)

    def mixing(self, rounds: int) -> np.ndarray:
        """First column of C^-1, `float64 [rounds]`: weights of the independent noise of the round
        and of earlier rounds in a round's noise, for audits."""
        return inverse(self.column, rounds)

    def dp_event(self, noise_multiplier: float, rounds: int, sampling: Sampling) -> DpEvent:
        """One Gaussian release.

        Raises:
            ExperimentError: there are more than a million rounds, or no bound on a client's rounds.
        """
        from dp_accounting import dp_event  # importing it is slow

        if rounds > _MOST_ROUNDS:
            raise ExperimentError(
                f"too many rounds for the correlated noise {self.name!r}",
                expected=f"at most {_MOST_ROUNDS:,} rounds, whose accounting takes seconds",
                got=f"{rounds:,}",
                fix="set fewer rounds, or another mechanism",
            )
        schedule = Scheduled(1.0) if isinstance(sampling, Full) else sampling
        if not isinstance(schedule, Scheduled):
            raise unknown_cost(
                "a sampler that separates a client's rounds, such as 'min-separation' with"
                f" separation = {self.config.bands}, or 'full'",
                sampling,
            )
        moved = sensitivity(self.column, rounds, schedule)
        return dp_event.GaussianDpEvent(noise_multiplier / moved)

    def draw(
        self, name: str, size: int, memory: Memory, source: NoiseSource, *address: int
    ) -> np.ndarray:
        """Draw a row of C^-1 z, `float64 [size]`; `memory` has the last b - 1 rows, in a ring
        buffer, and the number of rows so far."""
        drawn = source.gaussian(size, name, *address)
        cached = self.config.bands - 1
        if not cached:
            return drawn
        counter = f"{name} rows"
        rows = int(memory[counter]) if counter in memory else 0
        for back in range(1, min(rows, cached) + 1):
            drawn -= self.column[back] * memory[f"{name} {(rows - back) % cached}"]
        memory[f"{name} {rows % cached}"] = drawn
        memory[counter] = np.asarray(rows + 1)
        return drawn


@lru_cache(maxsize=64)
def _largest_row(bands: int) -> float:
    return float(np.linalg.norm(inverse(square_root(bands), _LIMIT)))
