# SPDX-License-Identifier: Apache-2.0
"""The two sources of the random numbers of noise.

`Reproducible` draws from the experiment's seed, a new stream per round, parameter and client:
simulations are reproducible, and anyone who knows the seed can remove the noise. `Secure` draws
from the operating system's generator and never repeats. Its Gaussian is half the sum of four and
its Laplace a sum of two products of Gaussians, so that the set of possible values does not reveal
the noise (Mironov 2012; Holohan and Braghin 2021).

They are float64: noise that is rounded before it is added (`Mechanism.add_noise`) would leave the
low bits of a float64 sum unprotected.
"""

from __future__ import annotations

import os
import secrets
from abc import ABC, abstractmethod
from typing import Literal

import numpy as np

from fedrec.rng import stream


class NoiseSource(ABC):
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


class Reproducible(NoiseSource):
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


class Secure(NoiseSource):
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


def source_of(mode: Literal["reproducible", "secure"], seed: int) -> NoiseSource:
    """The source of noise of a mode."""
    return Secure() if mode == "secure" else Reproducible(seed)


def noisy_count(count: float, std: float, source: NoiseSource, *address: int) -> float:
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
