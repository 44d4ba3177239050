# SPDX-License-Identifier: Apache-2.0
"""Stochastic gradient Langevin dynamics (Welling and Teh 2011), one sample from exp(-energy) (PNBM,
equations 7 and 11).

    x <- x - eta_t / 2 gradient(x) + z,    z ~ N(0, temperature eta_t),    eta_t = eta_1 t^-decay

With a temperature other than 1 the sampled distribution is exp(-energy / temperature), so the
epsilon of a guarantee for the sample is divided by the temperature.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Gradient = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""An unbiased estimate of the energy's gradient at a point, in the point's shape; a new array."""


@dataclass(frozen=True)
class Langevin:
    """Settings of a chain.

    Attributes:
        steps: number of steps.
        rate: eta_1.
        decay: xi, of the step sizes.
        temperature: factor on the variance of the noise.
    """

    steps: int
    rate: float
    decay: float = 0.3
    temperature: float = 1.0

    def sample(
        self, start: np.ndarray, gradient: Gradient, random: np.random.Generator
    ) -> np.ndarray:
        """The last point of the chain, a new array with the shape of the start, `float64 [...]`."""
        point = start.copy()
        for step in range(1, self.steps + 1):
            point = self.stepped(point, gradient, step, random)
        return point

    def stepped(
        self, point: np.ndarray, gradient: Gradient, step: int, random: np.random.Generator
    ) -> np.ndarray:
        """The point after a step (counted from 1), `float64 [...]` with the shape of `point`, which
        is changed in place."""
        rate = self.rate * step**-self.decay
        change = gradient(point, random)
        change *= rate / 2
        point -= change
        noise = random.standard_normal(point.shape)
        noise *= np.sqrt(self.temperature * rate)
        point += noise
        return point
