# SPDX-License-Identifier: Apache-2.0
"""The contract of a privacy mechanism: noise on the sum of clipped updates, and its cost."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np

from fedrec.components.registry import MECHANISM, resolve
from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.events import Release
from fedrec.privacy.accounting.noise_pair import NoisePair
from fedrec.privacy.accounting.sampling import Adjacency, FixedSize, Full, Poisson, Sampling
from fedrec.rng import NoiseSource

Placement = Literal["central", "distributed", "local"]
Memory = dict[str, np.ndarray]
"""Arrays that earlier rounds of a phase left; in mode `secure` they are saved with each checkpoint,
in a file of their own that only its owner can read."""


class Mechanism(ABC):
    """Noise of a round, and what the rounds of a run cost together.

    A built-in has a `name` and lives in `fedrec/privacy/mechanisms/`, its configuration class
    above it. Updates are clipped to norm S in the norm of `order`; between neighbours their sum
    moves by at most `Clip.sensitivity` (S, 2S or sqrt(2) S).

    Args:
        config: its settings.
        name: its name in experiments, which the ledger states.
    """

    Config: ClassVar[type[Config]] = Config
    paper: ClassVar[str] = ""
    order: ClassVar[int] = 2
    """Norm in which updates are clipped: 1 or 2."""
    pair: ClassVar[type[NoisePair]]
    """Distributions of one release, from which accountants compute its cost, or a `Profile`: what
    the mechanism itself knows of the cost of a release, or of all rounds."""
    placements: ClassVar[tuple[Placement, ...]] = ("central",)
    """Where its noise may be added. `distributed`: n shares of 1 / sqrt(n) of the scale are as good
    as the whole; `local`: each client's noise is of its own. Clients have no memory."""
    samplings: ClassVar[tuple[type[Sampling], ...]] = (Full, FixedSize, Poisson)
    """Samplers for which its cost is known; `fits` may ask for more."""
    needs: str = "the sampler 'fixed-size', 'poisson' or 'full'"
    """The same in words, for errors."""
    counts: ClassVar[bool] = False
    """Whether a noisy count of the same cohort may be released beside the sum at the joint cost of
    one release (adaptive clipping)."""
    secure_sums: ClassVar[bool] = True
    """Whether the sum of all nodes is all it needs."""

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
            memory: what earlier rounds left; set new arrays, and change none in place.
            source: of all random numbers.
            address: the round, and the client if clients add the noise.
        """

    @property
    def correlated(self) -> bool:
        """Whether only all rounds of a phase together have a cost: whether it defines `releases`,
        as the noise of a round depends on that of earlier ones, or it composes rounds itself."""
        return type(self).releases is not Mechanism.releases

    @property
    def std(self) -> float:
        """Largest standard deviation of a value of `draw`, over all rounds."""
        return 1.0

    @property
    def momentum(self) -> float:
        """Momentum of the server, in [0, 1), for which `running_sums` are measured."""
        return 0.0

    @property
    def kept(self) -> int:
        """Largest number of arrays of a parameter's size that `memory` has, whatever the number of
        rounds."""
        return 0

    def running_sums(self, rounds: int) -> float:
        """Root mean square, over the rounds, of noise of scale 1 in what the server's rule makes of
        the rounds so far; of independent noise, in their sum."""
        return self.std * math.sqrt((rounds + 1) / 2)

    def mixing(self, rounds: int) -> np.ndarray:
        """What the noise of a round has of the independent noise of that round and of those before,
        `float64 [rounds]`, for audits; a correlated mechanism states it."""
        return self.std * np.eye(1, rounds)[0]

    def longest(self, scale: float, clients: int, values: int) -> float:
        """A norm (of `order`) that the noise of so many clients, of so many values each, exceeds
        with a probability of at most e^-72; for mechanisms with noise on clients.

        Raises:
            NotImplementedError: it has none.
        """
        raise NotImplementedError

    @property
    def own(self) -> tuple[float, ...]:
        """Numbers of its settings that `pair` gets beside the noise multiplier; they are in the
        ledger."""
        return ()

    def release(self, sampling: Sampling, adjacency: Adjacency, noise_multiplier: float) -> Release:
        """One round by itself."""
        return Release(self.name, sampling, adjacency, noise_multiplier, self.own)

    def releases(self, one: Release, rounds: int, sampling: Sampling) -> dict[Release, int]:
        """The releases that all rounds of a phase cost together, and how often; by default one in
        each round.

        Args:
            one: a round by itself; its noise multiplier is the noise scale / the sensitivity of one
                sum. A correlated mechanism puts the sensitivity of the whole run in its place.
            rounds: number of rounds of the phase.
            sampling: how its cohorts are drawn.
        """
        return {one: rounds}

    def fits(self, sampling: Sampling) -> bool:
        """Whether its cost is known for such cohorts."""
        return isinstance(sampling, self.samplings)

    def add_noise(
        self,
        arrays: Mapping[str, np.ndarray],
        scale: float,
        source: NoiseSource,
        *address: int,
        memory: Memory | None = None,
    ) -> dict[str, np.ndarray]:
        """Arrays with noise on every coordinate, including those that no client changed: noise on
        changed rows only would reveal the items. It is added in float64, and the result is rounded.

        Args:
            arrays: named sums, or one client's update; taken as float64.
            scale: factor of the noise; 0 adds nothing.
            source: where the noise comes from.
            address: the round, and the client if clients add noise. An address must not be used
                twice.
            memory: see `draw`; default: none.

        Returns:
            The same names and shapes, `float32`.

        Raises:
            ExperimentError: the scale is negative or not finite, no address is given, or an array
                is not finite.
        """
        if not 0 <= scale < float("inf") or not address:
            raise ExperimentError(
                "invalid noise",
                expected="a finite scale >= 0, and the round it is for",
                got=f"scale {scale}, address {address}",
                fix="give both; a scale of 0 adds no noise",
            )
        memory = {} if memory is None else memory
        noisy = {}
        for name, array in arrays.items():
            exact = np.asarray(array, dtype=np.float64)
            if not np.isfinite(exact).all():
                raise ExperimentError(
                    f"{name!r} contains NaN or infinity",
                    expected="sums of clipped updates",
                    fix="clip updates before they are added",
                )
            if scale:
                drawn = self.draw(name, exact.size, memory, source, *address)
                exact = exact + scale * drawn.reshape(exact.shape)
            noisy[name] = np.asarray(exact, dtype=np.float32)
        return noisy


def mechanism_of(chosen: str | Mapping[str, Any]) -> Mechanism:
    """The mechanism with a name, or of a table with its name and settings.

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
            expected="the name of a mechanism (fedrec list mechanism)",
            got=repr(name),
            fix="{ name = 'gaussian' }",
        )
    found = resolve(MECHANISM, name)
    return found(found.Config.parse(settings, at=MECHANISM.key), name)
