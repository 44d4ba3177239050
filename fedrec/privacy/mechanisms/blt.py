# SPDX-License-Identifier: Apache-2.0
"""Gaussian noise with a few buffers in place of bands: a buffered linear Toeplitz matrix
(Dvijotham, McMahan, Pillutla, Steinke and Thakurta 2024; McMahan, Xu and Zhang 2024 for several
rounds of a client).

C has the coefficients 1 and sum_j scale_j decay_j^(k - 1). So the noise of a round is z_t minus the
scaled buffers, and a buffer decays and takes that noise in: nothing else is kept, however many
rounds there are. For long runs on large models, where banded noise needs an array for each band.

Where this differs from the paper: decays and scales are found by L-BFGS from a geometric start, and
the mean error over the rounds is minimised, as for banded noise.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from pydantic import Field
from scipy.optimize import minimize
from scipy.special import expit

from fedrec.config import Config
from fedrec.privacy.accounting.sampling import Scheduled
from fedrec.privacy.factorisation.coefficients import prefix_sums
from fedrec.privacy.factorisation.cost import errors, sensitivity
from fedrec.privacy.mechanisms._toeplitz import ToeplitzMechanism
from fedrec.privacy.mechanisms.base import Memory
from fedrec.privacy.noise_source import NoiseSource

_SPANS = ((0.5, 0.1), (0.5, 1.0), (1.5, 0.3), (1.5, 3.0))


class BltConfig(Config):
    """Settings of noise with buffers."""

    buffers: int = Field(default=3, ge=1, le=5)
    """Number of buffers, each of the size of the trained parameters."""
    optimised_for: int = Field(default=100, ge=2, le=500)
    """Number of rounds for whose running sums decays and scales are best."""
    separation: int = Field(default=100, ge=1)
    """Distance of a client's rounds for which they are best; the cost is that of the sampler's
    schedule, whatever this is."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Momentum of the server, in [0, 1), for which they are chosen; any value is as private."""


class Blt(ToeplitzMechanism):
    """Noise of which later rounds take parts back, from a few buffers."""

    name = "blt"
    Config = BltConfig
    paper = "Buffered linear Toeplitz matrices (Dvijotham et al. 2024; McMahan et al. 2024)"
    config: BltConfig
    most_rounds = 100_000  # C has as many coefficients as there are rounds
    needs = (
        "known cohorts: the sampler 'min-separation' with draw = 'fixed-size', or 'full'; with"
        " coefficients that do not increase"
    )

    def __init__(self, config: BltConfig, name: str) -> None:
        super().__init__(config, name)
        own = config.buffers, config.optimised_for, config.separation, config.momentum
        self.decays, self.scales = map(np.array, optimal_buffers(*own))

    def column(self, rounds: int) -> np.ndarray:
        """All coefficients, `float64 [rounds]`."""
        return coefficients(self.decays, self.scales, rounds)

    @property
    def momentum(self) -> float:
        """The setting."""
        return self.config.momentum

    @property
    def kept(self) -> int:
        """The buffers."""
        return self.config.buffers

    def draw(
        self, name: str, size: int, memory: Memory, source: NoiseSource, *address: int
    ) -> np.ndarray:
        """A row of C^-1 z, `float64 [size]`; `memory` keeps the buffers."""
        drawn = source.gaussian(size, name, *address)
        places = [f"{name} {place}" for place in range(self.kept)]
        for place, scale in zip(places, self.scales, strict=True):
            if place in memory:
                drawn -= scale * memory[place]
        for place, decay in zip(places, self.decays, strict=True):
            memory[place] = drawn + decay * memory[place] if place in memory else drawn
        return drawn


def coefficients(decays: np.ndarray, scales: np.ndarray, rounds: int) -> np.ndarray:
    """1, and sum_j scale_j decay_j^(k - 1) for k from 1: `float64 [rounds]`."""
    powers = decays ** np.arange(max(0, rounds - 1))[:, None]
    return np.append(1.0, powers @ scales)


@lru_cache(maxsize=16)
def optimal_buffers(
    buffers: int, rounds: int, separation: int, momentum: float = 0.0
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Decays in (0, 1), ascending, and scales above 0, whose sum is at most 1."""
    workload = prefix_sums(rounds, momentum)
    schedule = Scheduled(1.0, min(separation, rounds))

    def parts(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        raw = np.exp(values[buffers : 2 * buffers])
        return expit(values[:buffers]), expit(values[-1]) * raw / raw.sum()

    def loss(values: np.ndarray) -> float:
        column = coefficients(*parts(values), rounds)
        noise = errors(column, workload).mean()
        return float(np.log(noise * sensitivity(column, rounds, schedule) ** 2))

    starts = []
    for least, most in _SPANS:  # of the rounds after which a buffer has decayed
        times = np.log(np.geomspace(least, max(most * rounds, 2 * least), buffers))
        starts.append(np.concatenate([times, -times / 2, [0.5]]))
    options = {"maxiter": 2000, "maxfun": 100_000, "ftol": 1e-13, "gtol": 1e-8}
    tries = [minimize(loss, start, method="L-BFGS-B", options=options) for start in starts]
    decays, scales = parts(min(tries, key=lambda one: one.fun).x)
    order = np.argsort(decays)
    return tuple(decays[order].tolist()), tuple(scales[order].tolist())
