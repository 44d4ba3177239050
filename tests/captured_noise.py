# SPDX-License-Identifier: Apache-2.0
"""Captures the exact sums under every noise of a system, and can hold what is released fixed.

Sensitivity and post-processing are both about a given release: with the same release on two data
sets, the exact sums differ by at most the sensitivity that is charged, and everything else does not
differ at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest

from fedrec.privacy import mechanisms
from fedrec.privacy.accounting.events import NoisyRound


@dataclass(frozen=True)
class Captured:
    """One release.

    Attributes:
        exact: the sums without noise, by name.
        scale: scale of their noise.
        order: of the norm that the noise is for.
        address: of the noise.
        released: the sums with noise.
    """

    exact: Mapping[str, np.ndarray]
    scale: float
    order: int
    address: tuple[int, ...]
    released: Mapping[str, np.ndarray]

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[tuple[str, tuple[int, ...]], ...]]:
        """Its address, and the names and shapes of its sums."""
        return self.address, tuple((name, value.shape) for name, value in self.exact.items())

    def moved(self, other: Captured) -> float:
        """Distance of the exact sums, over all names together."""
        apart = [np.ravel(self.exact[name] - other.exact[name]) for name in self.exact]
        return float(np.linalg.norm(np.concatenate(apart), self.order))


@contextmanager
def captured(held: Sequence[Captured] | None = None) -> Iterator[list[Captured]]:
    """The releases of what runs within, in the order of their addresses.

    Args:
        held: releases of an earlier run; what they released is released again, whatever the sums.
    """
    seen: list[Captured] = []
    before = {release.key: release for release in held or ()}
    add_noise = mechanisms.add_noise

    def keep(exact, scale, order, address, draw):
        exact = {name: np.array(value, dtype=np.float64) for name, value in exact.items()}
        own = Captured(exact, scale, order, address, {})
        if held is not None:
            assert own.key in before, "what is released depends on more than the releases before"
            assert scale == before[own.key].scale, "noise depends on more than the releases before"
        released = draw() if held is None else before[own.key].released
        seen.append(replace(own, released=released))
        return {name: np.array(value) for name, value in released.items()}

    def noisy(mechanism, arrays, scale, source, *address, memory=None):
        def draw():
            return add_noise(mechanism, arrays, scale, source, *address, memory=memory)

        return keep(arrays, scale, mechanism.order, address, draw)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mechanisms, "add_noise", noisy)
        yield seen
    assert seen, "nothing was released"
    seen.sort(key=lambda release: release.key)
    assert held is None or len(seen) == len(held), "how often there is a release depends on data"


def sensitivities(release: Captured, event: object) -> float:
    """The sensitivity that a charge of this release claims: its noise over its multiplier."""
    assert isinstance(event, NoisyRound), event
    return release.scale / event.noise_multiplier
