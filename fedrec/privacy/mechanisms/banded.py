# SPDX-License-Identifier: Apache-2.0
"""Gaussian noise of a banded matrix factorisation, and the search for its matrix."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from functools import lru_cache
from typing import ClassVar

import numpy as np
from pydantic import Field
from scipy.optimize import minimize

from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.events import Release
from fedrec.privacy.accounting.sampling import Full, Poisson, Sampling, Scheduled
from fedrec.privacy.mechanisms.base import Mechanism, Memory
from fedrec.privacy.mechanisms.independent import GaussianPair
from fedrec.rng import NoiseSource

# First columns of lower triangular Toeplitz matrices `[rounds, rounds]`: power series.


def prefix_sums(rounds: int, momentum: float = 0.0) -> np.ndarray:
    """The workload of a server that adds up what rounds release, `float64 [rounds]`: 1 / ((1 - x)
    (1 - momentum x)), where the server adds a running sum with a momentum in [0, 1)."""
    return np.cumsum(momentum ** np.arange(rounds))


def square_root(bands: int, momentum: float = 0.0) -> np.ndarray:
    """The first coefficients of the square root of that workload, `float64 [bands]` (Fichtenberger,
    Henzinger and Upadhyay 2023; with momentum Kalinin and Lampert 2024, theorem 1); non-negative
    and non-increasing, from 1."""
    places = np.arange(1, bands)
    sums = np.cumprod(np.append(1.0, (2 * places - 1) / (2 * places)))
    return np.convolve(sums, sums * momentum ** np.arange(bands))[:bands]


def inverse(column: np.ndarray, rounds: int) -> np.ndarray:
    """The first column of the inverse, `float64 [rounds]`; missing coefficients are 0."""
    return quotient(np.eye(1, rounds)[0], column)


def quotient(series: np.ndarray, column: np.ndarray) -> np.ndarray:
    """A power series `[rounds]` divided by another, `[bands]`, to as many terms as the first has,
    `float64 [rounds]`."""
    from scipy.signal import lfilter  # importing it is slow, and most mechanisms do without

    return np.asarray(lfilter([1.0], column[: len(series)], series))


def is_decreasing(column: np.ndarray) -> bool:
    """Whether no coefficient of `[bands]` is negative or above the one before."""
    return bool((column >= 0).all() and (np.diff(column) <= 0).all())


# The banded Toeplitz matrix whose noise, at the same cost, is least on the workload.
#
# The mean over the rounds of `errors`, times the squared norm of C's first column, is minimised by
# L-BFGS with its exact gradient. The minimum is that of clients whose rounds are at least as far
# apart as C has bands, however often they take part (Choquette-Choo et al. 2023).
#
# Where this differs from the paper: it optimises all entries of the band, which pays for short runs
# only; a Toeplitz matrix has as many numbers as bands (McKenna 2024).


@lru_cache(maxsize=16)
def optimal_bands(bands: int, rounds: int, momentum: float = 0.0) -> tuple[float, ...]:
    """The first coefficients of C, from 1.

    Args:
        bands: their number.
        rounds: number of rounds T; bands beyond it are left out.
        momentum: of the workload.
    """
    bands = min(bands, rounds)
    workload = prefix_sums(rounds, momentum)
    start = square_root(bands, momentum)[1:]
    options = {"maxiter": 5000, "maxfun": 50_000, "ftol": 0.0, "gtol": 1e-12, "maxcor": 30}
    found = minimize(
        _loss_and_gradient, start, args=(workload,), jac=True, method="L-BFGS-B", options=options
    )
    return (1.0, *found.x.tolist())


def _loss_and_gradient(later: np.ndarray, workload: np.ndarray) -> tuple[float, np.ndarray]:
    """The logarithm of the loss, and its gradient by all coefficients but the first."""
    from scipy.signal import fftconvolve  # as in `quotient`

    column = np.append(1.0, later)
    rounds = len(workload)
    noise = quotient(workload, column)
    left = np.arange(rounds, 0, -1) / rounds
    error = float(left @ np.square(noise))
    square = float(column @ column)
    # B moves by -C^-1 (dC B): the adjoint filter takes the loss's slope back to C
    slope = quotient((2 * left * noise)[::-1], column)
    by_column = -fftconvolve(slope, noise)[rounds - len(column) : rounds][::-1]
    return float(np.log(error * square)), (by_column / error + 2 * column / square)[1:]


def schedule_of(sampling: Sampling) -> Scheduled | None:
    """The schedule of known cohorts; everybody in each round is one, too. None: there is none."""
    if isinstance(sampling, Full):
        return Scheduled(1.0)
    return sampling if isinstance(sampling, Scheduled) else None


def has_known_cost(column: np.ndarray, schedule: Scheduled) -> bool:
    """Whether `sensitivity` or `norms` of a column `[bands]` is exact for a schedule.

    Columns of C at least as far apart as C has bands have no row in common, so that they are
    orthogonal. Where they overlap, the coefficients must not increase, and cohorts must not be
    secret, because amplification is proven for separate rows only.
    """
    apart = schedule.separation >= len(column)
    return apart or (schedule.rate == 1 and is_decreasing(column))


def sensitivity(column: np.ndarray, rounds: int, schedule: Scheduled) -> float:
    """Largest norm by which a client moves C x, if it moves x by at most 1 in each of its rounds.

    It is that of a client of the first round that comes again as soon and as often as it may:
    shown by Choquette-Choo et al. 2023 (theorem 2) for bands that do not overlap, and by Kalinin
    and Lampert 2024 (theorem 2) for coefficients that do not increase.

    Args:
        column: C's first coefficients, `[bands]`.
        rounds: number of rounds T.
        schedule: what is known of a client's rounds, see `has_known_cost`.
    """
    moved = np.zeros(rounds)
    for first in _firsts(rounds, schedule):
        own = column[: rounds - first]
        moved[first : first + len(own)] += own
    return float(np.linalg.norm(moved))


def norms(column: np.ndarray, rounds: int, schedule: Scheduled) -> np.ndarray:
    """The norms of the columns of those rounds, `float64 [participations]`; the last are cut off by
    the end of the run. `schedule` as for separate bands."""
    left = np.minimum(rounds - _firsts(rounds, schedule), len(column))
    return np.sqrt(np.cumsum(np.square(column)))[left - 1]


def errors(column: np.ndarray, workload: np.ndarray) -> np.ndarray:
    """Variance of the noise on each row of the workload, `float64 [rounds]`, for z of variance
    1."""
    return np.cumsum(np.square(quotient(workload, column)))


def _firsts(rounds: int, schedule: Scheduled) -> np.ndarray:
    return np.arange(schedule.most(rounds)) * schedule.separation


# What mechanisms with noise C^-1 z have in common, where C is lower triangular and Toeplitz with
# the first coefficient 1, and z is independent Gaussian noise.
#
# With z in place of C^-1 z, all rounds together are one Gaussian release of C x, where x are the
# sums of the rounds; what a client moves it by is `fedrec.privacy.mechanisms.banded.sensitivity`.
# If the cohorts are secret and drawn by independent coin flips among the clients whose turn it is,
# each of a client's rounds is a sampled Gaussian release of its own (Choquette-Choo et al. 2023,
# theorem 4).

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


# Gaussian noise of a banded matrix factorisation: later rounds take back parts of the noise of
# earlier ones, so that running sums have less of it; no secret cohort is needed (Choquette-Choo et
# al. 2023, "(Amplified) Banded Matrix Factorization").
#
# Noise is C^-1 z, where C is lower triangular and Toeplitz with `bands` coefficients: those of the
# square root of the workload, or the best ones for a number of rounds. The noise of a round is z_t
# minus parts of the noise of the `bands - 1` rounds before, which is all that is kept.
#
# Where this differs from the paper: it optimises each entry of the band and normalises the columns;
# C is Toeplitz here (McKenna 2024). So the optimiser needs no constraints, a run may become longer,
# and noise of earlier rounds stays right.


class BandedConfig(Config):
    """Settings of banded noise."""

    bands: int = Field(default=16, ge=1, le=1000)
    """Number of bands b of C: the noise of a round takes back parts of that of the b - 1 rounds
    before it; 1 is independent noise. Best is the separation of a client's rounds."""
    optimised_for: int = Field(default=0, ge=0, le=10_000)
    """Number of rounds for whose running sums the coefficients are best; 0: those of the square
    root, which need no number of rounds."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Momentum of the server, in [0, 1), for which coefficients are chosen; any value is as
    private."""


class Banded(ToeplitzMechanism):
    """Noise of which later rounds take parts back, for clients whose rounds are b or more apart, or
    everybody in each round."""

    name = "banded"
    Config = BandedConfig
    paper = "(Amplified) Banded Matrix Factorization (Choquette-Choo et al. 2023)"
    config: BandedConfig

    def __init__(self, config: BandedConfig, name: str) -> None:
        super().__init__(config, name)
        bands = config.bands
        if config.optimised_for:
            self._column = np.array(optimal_bands(bands, config.optimised_for, config.momentum))
        else:
            self._column = square_root(bands, config.momentum)
        self.needs = (
            f"a sampler that separates a client's rounds by {bands}, such as 'min-separation' with"
            f" separation = {bands}; with coefficients that do not increase and known cohorts, any"
            " separation, or 'full'"
        )

    def column(self, rounds: int) -> np.ndarray:
        """The coefficients, `float64 [bands]`; fewer if there are fewer rounds."""
        return self._column[:rounds]

    @property
    def momentum(self) -> float:
        """The setting."""
        return self.config.momentum

    @property
    def kept(self) -> int:
        """Noise of the last b - 1 rounds."""
        return len(self._column) - 1

    def draw(
        self, name: str, size: int, memory: Memory, source: NoiseSource, *address: int
    ) -> np.ndarray:
        """A row of C^-1 z, `float64 [size]`; `memory` keeps the b - 1 last ones, each in the place
        of one that is no longer needed, and the number of rows so far."""
        drawn = source.gaussian(size, name, *address)
        if not self.kept:
            return drawn
        counter = f"{name} rows"
        rows = int(memory[counter]) if counter in memory else 0
        for back in range(1, min(rows, self.kept) + 1):
            drawn -= self._column[back] * memory[f"{name} {(rows - back) % self.kept}"]
        memory[f"{name} {rows % self.kept}"] = drawn
        memory[counter] = np.asarray(rows + 1)
        return drawn
