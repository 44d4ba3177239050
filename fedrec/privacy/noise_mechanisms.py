# SPDX-License-Identifier: Apache-2.0
"""Gaussian and Laplace noise on every coordinate of named arrays, from two kinds of sources.

`Reproducible` draws from the experiment's seed, a new stream per round, parameter and client:
simulations are reproducible, and anyone who knows the seed can remove the noise. `Secure` draws
from the operating system's generator and never repeats. Its Gaussian is half the sum of four and
its Laplace a sum of two products of Gaussians, so that the set of possible values does not reveal
the noise (Mironov 2012; Holohan and Braghin 2021).

Noise is drawn and added in float64 and only then rounded to float32: noise rounded before would
leave the low bits of a float64 sum unprotected. Noise is added to every coordinate, including those
that no client changed, because noise on changed rows only would reveal the items.
"""

from __future__ import annotations

import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal

import numpy as np

from fedrec.errors import ExperimentError
from fedrec.rng import stream


class Source(ABC):
    """A source of noise."""

    @abstractmethod
    def gaussian(self, size: int, name: str, *address: int) -> np.ndarray:
        """Standard normal `float64 [size]` of the stream `name[address]`."""

    @abstractmethod
    def laplace(self, size: int, name: str, *address: int) -> np.ndarray:
        """Laplace of scale 1, `float64 [size]`, of the stream `name[address]`."""

    @abstractmethod
    def uniform(self, size: int, name: str, *address: int) -> np.ndarray:
        """Uniform `float64 [size]` in [0, 1) of the stream `name[address]`: for chance within a
        client's contribution, such as dropout, which has to be of that client alone."""


class Reproducible(Source):
    """Noise as a function of the seed and the address: for simulations only.

    Args:
        seed: the experiment's seed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def gaussian(self, size: int, name: str, *address: int) -> np.ndarray:
        """Standard normal `float64 [size]` of the stream `name[address]`."""
        return stream(self.seed, f"noise/{name}", *address).standard_normal(size)

    def laplace(self, size: int, name: str, *address: int) -> np.ndarray:
        """Laplace of scale 1, `float64 [size]`, of the stream `name[address]`."""
        return stream(self.seed, f"noise/{name}", *address).laplace(size=size)

    def uniform(self, size: int, name: str, *address: int) -> np.ndarray:
        """Uniform `float64 [size]` in [0, 1) of the stream `name[address]`."""
        return stream(self.seed, f"noise/{name}", *address).random(size)


class Secure(Source):
    """Noise from the operating system's cryptographic generator; the address does not matter,
    nothing ever repeats."""

    def gaussian(self, size: int, name: str, *address: int) -> np.ndarray:
        """Standard normal `float64 [size]` of the stream `name[address]`."""
        return _normals(4, size).sum(axis=0) / 2

    def laplace(self, size: int, name: str, *address: int) -> np.ndarray:
        """Laplace of scale 1, `float64 [size]`, of the stream `name[address]`. The determinant of a
        2 x 2 matrix of normals is Laplace distributed."""
        first, second, third, fourth = _normals(4, size)
        return first * second + third * fourth

    def uniform(self, size: int, name: str, *address: int) -> np.ndarray:
        """Uniform `float64 [size]` in (0, 1) of the stream `name[address]`."""
        return _uniforms(size)


def source_of(mode: Literal["reproducible", "secure"], seed: int) -> Source:
    """The source of noise of a mode."""
    return Secure() if mode == "secure" else Reproducible(seed)


def add_noise(
    arrays: Mapping[str, np.ndarray],
    scale: float,
    source: Source,
    *address: int,
    mechanism: Literal["gaussian", "laplace"] = "gaussian",
) -> dict[str, np.ndarray]:
    """Arrays with independent noise on every coordinate.

    Args:
        arrays: named sums, or one client's update; taken as float64.
        scale: standard deviation of Gaussian, b of Laplace noise; 0 adds nothing.
        source: where the noise comes from.
        address: the round, and the client if clients add noise. An address must not be used twice.
        mechanism: distribution of the noise.

    Returns:
        The same names and shapes, `float32`.

    Raises:
        ExperimentError: the scale is negative or not finite, no address is given, or an array is
            not finite.
    """
    if not 0 <= scale < float("inf") or not address:
        raise ExperimentError(
            "invalid noise",
            expected="a finite scale >= 0, and the round it is for",
            got=f"scale {scale}, address {address}",
        )
    draw = source.laplace if mechanism == "laplace" else source.gaussian
    noisy = {}
    for name, array in arrays.items():
        exact = np.asarray(array, dtype=np.float64)
        if not np.isfinite(exact).all():
            raise ExperimentError(
                f"{name!r} contains NaN or infinity",
                expected="sums of clipped updates",
                fix="clip updates before they are added",
            )
        noise = scale * draw(exact.size, name, *address).reshape(exact.shape) if scale else 0.0
        noisy[name] = np.asarray(exact + noise, dtype=np.float32)
    return noisy


def noisy_count(count: float, std: float, source: Source, *address: int) -> float:
    """A count with Gaussian noise of the given standard deviation (adaptive clipping)."""
    return count + std * float(source.gaussian(1, "adaptive-clip/count", *address)[0])


def secure_fixed_size(clients: np.ndarray, cohort: int) -> np.ndarray:
    """A cohort of fixed size drawn from the operating system's generator, `int64 [clients]`,
    ascending."""
    places = secrets.SystemRandom().sample(range(len(clients)), cohort)
    return np.sort(np.asarray(clients)[places])


def secure_poisson(clients: np.ndarray, rate: float) -> np.ndarray:
    """A Poisson cohort drawn from the operating system's generator, `int64 [clients]`, in the order
    of `clients`."""
    return np.asarray(clients)[_uniforms(len(clients)) < rate]


def _uniforms(*shape: int) -> np.ndarray:
    """`float64` in (0, 1), 52 random bits each."""
    words = np.frombuffer(os.urandom(8 * int(np.prod(shape))), dtype=np.uint64).reshape(shape)
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _normals(*shape: int) -> np.ndarray:
    """Independent standard normals by Box and Muller; one of each pair, as the other repeats its
    bits."""
    return np.sqrt(-2.0 * np.log(_uniforms(*shape))) * np.cos(2.0 * np.pi * _uniforms(*shape))
