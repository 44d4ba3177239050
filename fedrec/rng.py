# SPDX-License-Identifier: Apache-2.0
"""One seed, many independent named streams.

Every random decision of an experiment draws from a stream that is addressed by a name and integers,
such as `stream(seed, "cohort", round)` or `stream(seed, "client", client, round)`. A stream is a
function of its address alone: process, order and engine do not matter, so a resumed run equals an
uninterrupted one, and the three engines agree. The addresses are hashed into numpy's
`SeedSequence`, whose entropy mixing keeps streams independent (numpy NEP 19, SPEC 7).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable

import numpy as np


def seed_sequence(seed: int, name: str, *address: int) -> np.random.SeedSequence:
    """Seed sequence of the stream `name[address]` under the experiment's `seed`.

    Raises:
        ValueError: `seed` or a part of the address is negative.
    """
    for part in (seed, *address):
        if part < 0:
            raise ValueError(
                f"Expected seed and address parts >= 0, got {part!r} in stream {name!r}{address!r}."
            )
    # Each integer has its own 64-bit slot, so (1, 23) and (12, 3) cannot collide.
    slots = [word for part in (seed, *address) for word in (part & 0xFFFFFFFF, part >> 32)]
    words = [*_words(name), len(address), *slots]
    # From an array of this type numpy makes the same sequence in a quarter of the time.
    return np.random.SeedSequence(words if max(words) >> 32 else np.array(words, dtype=np.uint32))


@functools.lru_cache  # a node opens a stream of the same name for every client
def _words(name: str) -> tuple[int, ...]:
    digest = hashlib.sha256(name.encode()).digest()
    return tuple(int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4))


def stream(seed: int, name: str, *address: int) -> np.random.Generator:
    """Numpy generator of the stream `name[address]`."""
    return np.random.Generator(np.random.PCG64(seed_sequence(seed, name, *address)))


def torch_stream(seed: int, name: str, *address: int):
    """Torch CPU generator of the stream `name[address]` (parameters are drawn on the CPU on every
    device)."""
    import torch

    state = int(seed_sequence(seed, name, *address).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(state & 0x7FFF_FFFF_FFFF_FFFF)


def hashed(names: Iterable[object]) -> np.ndarray:
    """One hash of each name as text, `uint64 [names]`; 5 and "5" are one name."""
    digests = (hashlib.blake2b(str(name).encode(), digest_size=8).digest() for name in names)
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def mixed(values: np.ndarray) -> np.ndarray:
    """A one-to-one scrambling of `uint64 [...]` (the finaliser of SplitMix64): numbers that differ
    in one bit become unrelated."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
