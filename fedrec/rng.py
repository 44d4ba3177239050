# SPDX-License-Identifier: Apache-2.0
"""Random numbers: named streams of one seed, and the two sources of noise.

`Reproducible` draws from the experiment's seed, a new stream per round, parameter and client:
simulations are reproducible, and anyone who knows the seed can remove the noise. `Secure` draws
from the operating system's generator and never repeats. Its Gaussian is half the sum of four and
its Laplace a sum of two products of Gaussians, so that the set of possible values does not reveal
the noise (Mironov 2012; Holohan and Braghin 2021).

They are float64: noise that is rounded before it is added
(`fedrec.privacy.mechanisms.add_noise`) would leave the low bits of a float64 sum unprotected.
"""

import functools
import hashlib
import os
import secrets
from collections.abc import Iterable
from typing import Literal, TypeAlias

import numpy as np

# One seed, many independent named streams.
#
# Every random decision of an experiment draws from a stream that is addressed by a name and
# integers, such as `stream(seed, "cohort", round)` or `stream(seed, "client", client, round)`. A
# stream is a function of its address alone: process, order and engine do not matter, so a resumed
# run equals an uninterrupted one, and the three engines agree. The addresses are hashed into
# numpy's `SeedSequence`, whose entropy mixing keeps streams independent (numpy NEP 19, SPEC 7).


def seed_sequence(seed: int, name: str, *address: int) -> np.random.SeedSequence:
    """Seed sequence of the stream `name[address]` under the experiment's `seed`.

    Raises:
        ValueError: `seed` or a part of the address is negative.
    """
    words = _entropy(seed, name, *address)
    # From an array of this type numpy makes the same sequence in a quarter of the time.
    return np.random.SeedSequence(words if max(words) >> 32 else np.array(words, dtype=np.uint32))


def _entropy(seed: int, name: str, *address: int) -> list[int]:
    """The words that `seed_sequence` hashes: four of the name, and then those of numbers."""
    for part in (seed, *address):
        if part < 0:
            raise ValueError(
                f"Expected seed and address parts >= 0, got {part!r} in stream {name!r}{address!r}."
            )
    # Each integer has its own 64-bit slot, so (1, 23) and (12, 3) cannot collide.
    slots = [word for part in (seed, *address) for word in (part & 0xFFFFFFFF, part >> 32)]
    return [*_words(name), len(address), *slots]


@functools.lru_cache  # a node opens a stream of the same name for every client
def _words(name: str) -> tuple[int, ...]:
    digest = hashlib.sha256(name.encode()).digest()
    return tuple(int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4))


def stream(seed: int, name: str, *address: int) -> np.random.Generator:
    """Numpy generator of the stream `name[address]`."""
    return np.random.Generator(np.random.PCG64(seed_sequence(seed, name, *address)))


def streams(seed: int, name: str, first: np.ndarray, *address: int) -> np.ndarray:
    """The states of the streams `name[f, *address]` for each number f of `first`, `int64 [C]`, as
    compiled code takes them, `uint64 [C, 6]` (`fedrec.kernel.draws`)."""
    from fedrec.kernel.draws import seeded  # imports Numba

    words = _entropy(seed, name, 0, *address)
    rest = 2 * (1 + len(address))  # words of the address, which are the last ones
    top = [word for part in words[:-rest] for word in _in_words(part)]
    every = np.array([*top, *words[-rest:]], dtype=np.uint32)
    return seeded(every, len(top), np.ascontiguousarray(first, dtype=np.int64))


def _in_words(number: int) -> list[int]:
    """A number as words of 32 bits, the lowest first, as numpy's `SeedSequence` takes it."""
    count = max(1, -(-number.bit_length() // 32))
    return [(number >> (32 * word)) & 0xFFFFFFFF for word in range(count)]


def torch_stream(seed: int, name: str, *address: int):
    """Torch CPU generator of the stream `name[address]` (parameters are drawn on the CPU on every
    device)."""
    import torch

    state = int(seed_sequence(seed, name, *address).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(state & 0x7FFF_FFFF_FFFF_FFFF)


def hashed(names: Iterable[object]) -> np.ndarray:
    """Hash each name as text, `uint64 [names]`; 5 and "5" have equal hashes."""
    digests = (hashlib.blake2b(str(name).encode(), digest_size=8).digest() for name in names)
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def mixed(values: np.ndarray) -> np.ndarray:
    """Scramble `uint64 [...]` one-to-one (the finaliser of SplitMix64), so that numbers that differ
    in one bit become unrelated."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Reproducible:
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
        """Uniform `float64 [size]` in [0, 1) of the stream `name[address]`: for random numbers of a
        single client's contribution, such as dropout."""
        return stream(self.seed, f"noise/{name}", *address).random(size)


class Secure:
    """Noise from the operating system's cryptographic generator, which ignores the address and
    never repeats."""

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


NoiseSource: TypeAlias = Reproducible | Secure
"""A source of noise."""


def source_of(mode: Literal["reproducible", "secure"], seed: int) -> NoiseSource:
    """Return the source of noise of a privacy mode."""
    return Secure() if mode == "secure" else Reproducible(seed)


def secure_fixed_size(clients: np.ndarray, cohort: int) -> np.ndarray:
    """Draw a cohort of fixed size from the operating system's generator, `int64 [clients]`,
    ascending."""
    positions = secrets.SystemRandom().sample(range(len(clients)), cohort)
    return np.sort(np.asarray(clients)[positions])


def secure_poisson(clients: np.ndarray, rate: float) -> np.ndarray:
    """Draw a Poisson cohort from the operating system's generator, `int64 [clients]`, in the order
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
