# SPDX-License-Identifier: Apache-2.0
"""The cost of choosing settings by their results on private data: the best of a random number of
trials (Papernot and Steinke 2022, "Hyperparameter Tuning with Rényi Differential Privacy").

A trial draws a setting, trains with it and is given a score; every trial is a draw from one
mechanism. If their number K is random and only the best trial is published, the cost is that of one
trial and a little more, however many there were. With R the Rényi curve of a trial, that of the
choice at order a is at most

    R(a) + ln(E[K]) / (a - 1) + (1 + shape) min over b of [(1 - 1/b) R(b) - ln(gamma) / b]

for the truncated negative binomial distribution (theorem 2; shape 1 is geometric, 0 logarithmic),
and R(a) + E[K] d(a) + ln(E[K]) / (a - 1) for Poisson, where a trial is (ln(1 + 1 / (a - 1)),
d(a))-differentially private (theorem 6).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.rdp import INTEGER_ORDERS, epsilon_of

Law = Literal["geometric", "logarithmic", "poisson"]
_SHAPES: dict[str, float] = {"geometric": 1.0, "logarithmic": 0.0}
LAWS = (*_SHAPES, "poisson")
MOST_TRIALS = 1000


@dataclass(frozen=True)
class RandomTrials:
    """A random number of trials.

    Attributes:
        law: its distribution: geometric and logarithmic are at least 1; Poisson may be 0, and is
            the least spread.
        mean: its mean, from 1 (above 1 if logarithmic) to 1000.

    Raises:
        ExperimentError: the law is unknown, or the mean out of range.
    """

    law: Law
    mean: float

    def __post_init__(self) -> None:
        least = 1.001 if self.law == "logarithmic" else 1.0
        if self.law not in LAWS or not least <= self.mean <= MOST_TRIALS:
            raise ExperimentError(
                "no such random number of trials",
                expected=f"{', '.join(LAWS)}, with a mean from {least:g} to {MOST_TRIALS}",
                got=f"{self.law}, {self.mean:g}",
                fix="--private-choice geometric --trials 20",
            )

    def draw(self, random: np.random.Generator) -> int:
        """The number of trials K; it must not be published."""
        if self.law == "poisson":
            return int(random.poisson(self.mean))
        if self.law == "geometric":
            return int(random.geometric(1 / self.mean))
        return int(random.logseries(1 - self.gamma))

    @property
    def gamma(self) -> float:
        """Probability parameter of the truncated negative binomial distribution, in (0, 1]."""
        from scipy.optimize import brentq  # importing it is slow

        if self.law == "geometric":
            return 1 / self.mean
        found: Any = brentq(_above, 1e-9, 1 - 1e-9, args=(self.mean,), xtol=1e-15)
        return float(found)

    def curve(self, trial: np.ndarray) -> np.ndarray:
        """The Rényi curve of the best trial, `float64 [INTEGER_ORDERS]`, from that of one."""
        orders = INTEGER_ORDERS
        grown = trial + math.log(self.mean) / (orders - 1)
        if self.law == "poisson":
            return grown + self.mean * _deltas(trial, np.log1p(1 / (orders - 1)))
        best = ((1 - 1 / orders) * trial - math.log(self.gamma) / orders).min()
        # curves do not fall with the order, so that a later bound holds for earlier orders
        whole = grown + (1 + _SHAPES[self.law]) * best
        return np.minimum.accumulate(whole[::-1])[::-1]

    def epsilon(self, trial: np.ndarray, delta: float) -> float:
        """Epsilon at delta of the best trial, from the Rényi curve of one, `[INTEGER_ORDERS]`."""
        return float(epsilon_of(np.append(self.curve(trial), np.inf), delta)[0])


def _above(gamma: float, mean: float) -> float:
    """By how much the mean of the logarithmic distribution is above a number."""
    return (1 / gamma - 1) / -math.log(gamma) - mean


def _deltas(curve: np.ndarray, epsilons: np.ndarray) -> np.ndarray:
    """The delta at each epsilon, by proposition 12 of Canonne, Kamath and Steinke 2020."""
    orders = INTEGER_ORDERS
    logs = (orders - 1) * (curve - epsilons[:, None] + np.log1p(-1 / orders)) - np.log(orders)
    return np.minimum(np.exp(logs.min(axis=1)), 1.0)
