# SPDX-License-Identifier: Apache-2.0
"""Privacy mechanisms (noise on the sum of clipped updates, and its cost): base class, Gaussian,
Laplace and banded noise."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedrec.components.registry import MECHANISM, resolve
from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.events import Release
from fedrec.privacy.accounting.sampling import Adjacency, Full, Sampling, Scheduled, unknown_cost
from fedrec.rng import NoiseSource, Reproducible

if TYPE_CHECKING:
    from dp_accounting.dp_event import DpEvent

Placement = Literal["central", "distributed", "local"]
Memory = dict[str, np.ndarray]
"""Arrays from earlier rounds of a phase; in mode `secure` they are saved with each checkpoint, in a
separate file that only its owner can read."""


class Mechanism(ABC):
    """Noise of a round, and the privacy cost of all rounds of a run together.

    A built-in has a `name` and lives in `fedrec/privacy/mechanisms.py`, its configuration class
    above it. Updates are clipped to norm S in the norm of `order`; between neighbours their sum
    moves by at most `Clip.sensitivity` (S, 2S or sqrt(2) S).

    Args:
        config: its settings.
        name: its name in experiments, which the ledger states.
    """

    Config: ClassVar[type[Config]] = Config
    order: ClassVar[int] = 2
    """Norm in which updates are clipped: 1 or 2."""
    placements: ClassVar[tuple[Placement, ...]] = ("central",)
    """Allowed placements of the noise. `distributed`: n shares of 1 / sqrt(n) of the scale add up
    to the whole; `local`: each client adds all of its noise. Clients have no memory, and their
    noise is not longer than `longest_noise`."""

    def __init__(self, config: Config, name: str) -> None:
        self.config = config
        self.name = name

    @abstractmethod
    def draw(
        self, name: str, size: int, memory: Memory, source: NoiseSource, *address: int
    ) -> np.ndarray:
        """Noise of scale 1 for one parameter in one round, `float64 [size]`.

        Args:
            name: of the parameter.
            size: number of its values.
            memory: arrays of earlier rounds, from the first on if the noise of a round depends on
                them; set new arrays, and change none in place.
            source: of all random numbers.
            address: the round, and the client if clients add the noise.
        """

    @property
    def std(self) -> float:
        """Largest standard deviation of a value of `draw`, over all rounds."""
        return 1.0

    @abstractmethod
    def dp_event(self, noise_multiplier: float, rounds: int, sampling: Sampling) -> DpEvent:
        """Cost of all rounds of a phase together, as an event of dp-accounting: Gaussian and
        Laplace events, sampled or not, and compositions of them
        (`fedrec.privacy.accounting.losses`). Unless it is `rounds` times the cost of one round, all
        of it is charged with the first round, as for noise that is correlated between rounds.

        Args:
            noise_multiplier: noise scale / sensitivity of the sum of one round; those of the event
                are relative to the same sensitivity.
            rounds: number of rounds of the phase.
            sampling: how its cohorts are drawn.

        Raises:
            ExperimentError: the cost is not known for such cohorts.
        """


def add_noise(
    mechanism: Mechanism,
    arrays: Mapping[str, np.ndarray],
    scale: float,
    source: NoiseSource,
    *address: int,
    memory: Memory | None = None,
) -> dict[str, np.ndarray]:
    """Add noise to every coordinate, including those that no client changed: noise on changed
    rows only would reveal the items. It is added in float64, and the result is rounded.

    Args:
        mechanism: the noise.
        arrays: named sums, or one client's update; taken as float64.
        scale: factor of the noise; 0 adds nothing.
        source: source of the noise.
        address: the round, and the client if clients add noise. An address must not be used
            twice.
        memory: see `Mechanism.draw`; default: none.

    Returns:
        The same names and shapes, `float32`.

    Raises:
        ExperimentError: the scale is negative or not finite, no address is given, or an array
            is not finite.
    """
    if not 0 <= scale < float("inf") or not address:
        raise ExperimentError(
            f"invalid noise of scale {scale} with the address {address}",
            fix="give a finite scale >= 0, and the address of a round",
        )
    memory = {} if memory is None else memory
    noisy = {}
    for name, array in arrays.items():
        exact = np.asarray(array, dtype=np.float64)
        if not np.isfinite(exact).all():
            raise ExperimentError(
                f"{name!r} contains NaN or infinity", fix="clip updates before they are added"
            )
        if scale:
            drawn = mechanism.draw(name, exact.size, memory, source, *address)
            exact = exact + scale * drawn.reshape(exact.shape)
        noisy[name] = np.asarray(exact, dtype=np.float32)
    return noisy


@lru_cache(maxsize=64)
def has_memory(mechanism: Mechanism) -> bool:
    """True if the noise of a round depends on that of earlier rounds, which `draw` then remembers:
    found by two rounds of a single number."""
    memory: Memory = {}
    for number in (1, 2):
        mechanism.draw("", 1, memory, Reproducible(0), number)
    return bool(memory)


_TAIL = 72.0


def longest_noise(order: int, scale: float, clients: int, values: int) -> float:
    """Norm that the summed noise of `clients` clients exceeds with a probability of at most e^-72:
    Laplace noise in L1 (Gamma's distribution; Boucheron, Lugosi and Massart 2013, section 2.4),
    Gaussian noise in L2 (Laurent and Massart 2000, lemma 1)."""
    if order == 1:
        count = clients * values
        return scale * (count + math.sqrt(2 * count * _TAIL) + _TAIL)
    return scale * math.sqrt(clients) * (math.sqrt(values) + math.sqrt(2 * _TAIL))


@lru_cache(maxsize=64)
def cost_of(
    mechanism: Mechanism,
    noise_multiplier: float,
    rounds: int,
    sampling: Sampling,
    adjacency: Adjacency,
) -> Mapping[Release, int]:
    """Number of times of each release of all rounds together, from `dp_event`.

    Raises:
        ComponentError: the event cannot be accounted.
        ExperimentError: see `Mechanism.dp_event`.
    """
    from fedrec.privacy.accounting.losses import releases_of_event  # imports dp-accounting

    return releases_of_event(mechanism.dp_event(noise_multiplier, rounds, sampling), adjacency)


def mechanism_of(chosen: str | Mapping[str, Any]) -> Mechanism:
    """Return the mechanism with a name, or of a table with its name and settings.

    Raises:
        ExperimentError: it is unknown, or one of its settings is.
    """
    table = {"name": chosen} if isinstance(chosen, str) else dict(chosen)
    return _made(json.dumps(table, sort_keys=True))


@lru_cache(maxsize=64)  # equal settings give the same object
def _made(text: str) -> Mechanism:
    settings = json.loads(text)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise ExperimentError(
            f"missing key '{MECHANISM.key}.name'",
            got=repr(name),
            fix="{ name = 'gaussian' }, or another of `fedrec list mechanism`",
        )
    mechanism = resolve(MECHANISM, name)
    return mechanism(mechanism.Config.parse(settings, at=MECHANISM.key), name)


# Laplace and Gaussian noise, independent in every round.


class Laplace(Mechanism):
    """The Laplace mechanism, of scale b. Updates are clipped in the L1 norm, which costs far more
    noise in many dimensions."""

    name = "laplace"
    order = 1
    placements = ("central", "local")  # a sum of Laplace shares is not Laplace

    @property
    def std(self) -> float:
        """Standard deviation at scale 1, sqrt(2)."""
        return math.sqrt(2)

    def draw(
        self, name: str, size: int, memory: Memory, source: NoiseSource, *address: int
    ) -> np.ndarray:
        """Draw Laplace noise of scale 1, `float64 [size]`."""
        return source.laplace(size, name, *address)

    def dp_event(self, noise_multiplier: float, rounds: int, sampling: Sampling) -> DpEvent:
        """Independent Laplace releases."""
        from fedrec.privacy.accounting.losses import dp_event, of_rounds  # imports dp-accounting

        return of_rounds(dp_event.LaplaceDpEvent(noise_multiplier), rounds, sampling)


class Gaussian(Mechanism):
    """The Gaussian mechanism, whose scale is the standard deviation."""

    name = "gaussian"
    placements = ("central", "distributed", "local")

    def draw(
        self, name: str, size: int, memory: Memory, source: NoiseSource, *address: int
    ) -> np.ndarray:
        """Draw standard normal noise, `float64 [size]`."""
        return source.gaussian(size, name, *address)

    def dp_event(self, noise_multiplier: float, rounds: int, sampling: Sampling) -> DpEvent:
        """Independent Gaussian releases."""
        from fedrec.privacy.accounting.losses import dp_event, of_rounds  # imports dp-accounting

        return of_rounds(dp_event.GaussianDpEvent(noise_multiplier), rounds, sampling)


# Banded matrix factorisation: Gaussian noise that later rounds partly cancel, so that prefix sums
# are less noisy; cohorts need not be secret (Choquette-Choo et al. 2023, "(Amplified) Banded Matrix
# Factorization").
#
# Noise is C^-1 z, where C is lower triangular and Toeplitz with `bands` coefficients, those of the
# square root of the workload of prefix sums, and z is independent Gaussian noise. The noise of a
# round is z_t minus parts of the noise of the `bands - 1` rounds before, which is all that is
# remembered.
#
# With z in place of C^-1 z, all rounds together are one Gaussian release of C x, where x are the
# sums of the rounds; `_sensitivity` is what a client moves it by.
#
# Where this differs from the paper: it optimises each entry of the band and normalises the columns;
# C is Toeplitz here (McKenna 2024), with coefficients that need no number of rounds. So a run may
# become longer, and noise of earlier rounds stays right.

_LIMIT = 4000  # rounds after which no row of C^-1 grows
_MOST_ROUNDS = 1_000_000

# First columns of lower triangular Toeplitz matrices `[rounds, rounds]`: power series.


def _square_root(bands: int) -> np.ndarray:
    """The first coefficients of the square root of prefix sums, `float64 [bands]` (Fichtenberger,
    Henzinger and Upadhyay 2023); positive and decreasing, from 1."""
    index = np.arange(1, bands)
    return np.cumprod(np.append(1.0, (2 * index - 1) / (2 * index)))


def inverse(column: np.ndarray, rounds: int) -> np.ndarray:
    """The first column of the inverse, `float64 [rounds]`; missing coefficients are 0."""
    from scipy.signal import lfilter  # slow to import, and unused by most mechanisms

    return np.asarray(lfilter([1.0], column[:rounds], np.eye(1, rounds)[0]))


def _sensitivity(column: np.ndarray, rounds: int, schedule: Scheduled) -> float:
    """Largest norm by which a client moves C x, if it moves x by at most 1 in each of its rounds.

    It is that of a client of the first round that comes again as soon and as often as it may:
    shown by Choquette-Choo et al. 2023 (theorem 2) for bands that do not overlap, and by Kalinin
    and Lampert 2024 (theorem 2) for coefficients that do not increase, as those of `_square_root`.

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
        self.column = _square_root(config.bands)

    @property
    def std(self) -> float:
        """Largest standard deviation of a value: the norm of the last row of C^-1, which grows with
        the rounds to a limit."""
        return _largest_row(self.config.bands)

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
        moved = _sensitivity(self.column, rounds, schedule)
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
    return float(np.linalg.norm(inverse(_square_root(bands), _LIMIT)))
