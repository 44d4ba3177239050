# SPDX-License-Identifier: Apache-2.0
"""Captures the exact sums under every noise of a system, and can hold what is released fixed.

Sensitivity and post-processing are both about a given release: with the same release on two data
sets, the exact sums differ by at most the sensitivity that is charged, and everything else does not
differ at all.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from fedrec.privacy import noise_mechanisms
from fedrec.privacy.accounting.events import GaussianRound, LaplaceRound

ROOT = Path(noise_mechanisms.__file__).parents[2]


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


@functools.cache
def drawing_modules() -> list[ModuleType]:
    """All modules of the packages that draw noise by name, imported."""
    found = []
    for package in ("fedrec", "clients", "server", "strategies", "simulations"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            if "import" in text and ("add_noise" in text or "noisy_count" in text):
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                if name != noise_mechanisms.__name__:
                    found.append(importlib.import_module(name))
    return found


@contextmanager
def captured(held: Sequence[Captured] | None = None) -> Iterator[list[Captured]]:
    """The releases of what runs within, in the order of their addresses.

    Args:
        held: releases of an earlier run; what they released is released again, whatever the sums.
    """
    seen: list[Captured] = []
    before = {release.key: release for release in held or ()}
    add_noise, noisy_count = noise_mechanisms.add_noise, noise_mechanisms.noisy_count

    def keep(exact, scale, order, address, draw):
        exact = {name: np.array(value, dtype=np.float64) for name, value in exact.items()}
        own = Captured(exact, scale, order, address, {})
        if held is not None:
            assert own.key in before, "what is released depends on more than the releases before"
            assert scale == before[own.key].scale, "noise depends on more than the releases before"
        released = draw() if held is None else before[own.key].released
        seen.append(replace(own, released=released))
        return {name: np.array(value) for name, value in released.items()}

    def noisy(arrays, scale, source, *address, mechanism="gaussian"):
        order = 1 if mechanism == "laplace" else 2

        def draw():
            return add_noise(arrays, scale, source, *address, mechanism=mechanism)

        return keep(arrays, scale, order, address, draw)

    def counted(count, std, source, *address):
        def draw():
            return {"count": np.array(noisy_count(count, std, source, *address))}

        return float(keep({"count": np.array(count)}, std, 2, address, draw)["count"])

    replaced = {"add_noise": (add_noise, noisy), "noisy_count": (noisy_count, counted)}
    with pytest.MonkeyPatch.context() as patch:
        for module in drawing_modules():
            for name, (ours, ones_own) in replaced.items():
                if getattr(module, name, None) is ours:
                    patch.setattr(module, name, ones_own)
        yield seen
    assert seen, "nothing was released"
    seen.sort(key=lambda release: release.key)
    assert held is None or len(seen) == len(held), "how often there is a release depends on data"


def sensitivities(release: Captured, event: object) -> float:
    """The sensitivity that a charge of this release claims: its noise over its multiplier."""
    assert isinstance(event, GaussianRound | LaplaceRound), event
    multiplier = event.noise_multiplier
    if set(release.exact) == {"count"} and isinstance(event, GaussianRound):
        multiplier = event.count_multiplier or multiplier
    return release.scale / multiplier
