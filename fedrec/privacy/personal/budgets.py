# SPDX-License-Identifier: Apache-2.0
"""Budgets and costs of single users who each add their own Gaussian noise.

A user's device sends one clipped vector of norm at most S with noise of standard deviation sigma on
every coordinate, each time it takes part, and who takes part is known. Such releases compose
exactly: n of them are equivalent to one Gaussian release with mu = sqrt(n) * sensitivity / sigma
(`fedrec.privacy.accounting.gdp`). The sensitivity is S if neighbours differ by removing all of a
user's data, and 2S if these are replaced by any other data.

Where this differs from DP-VAE (Fang et al. 2022):

- Its epsilon_k is that of a single release with sigma = sqrt(2 ln(1.25 / delta)) S / epsilon;
  algorithm 3 does not depend on the number of rounds, and its theorem 4 quotes a bound for
  subsampled training that this sigma does not meet. Here all releases count.
- No amplification by sampling is claimed: the noise differs between users, so that the variance of
  a sum reveals who was drawn.
- Its neighbours differ in one sample of a user. Every example's gradient depends on all of the
  user's samples through the encoder, so that a mean over J examples moves by up to 2S, not S / J;
  here neighbours differ in all data of a user.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.gdp import gdp_parameter
from fedrec.privacy.adjacency import Adjacency
from fedrec.privacy.clipping import Clip
from fedrec.rng import stream


@dataclass(frozen=True)
class PersonalBudget:
    """The requested guarantee of a user.

    Attributes:
        epsilon: > 0.
        delta: in (0, 1).
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if not (0 < self.epsilon < math.inf and 0 < self.delta < 1):
            raise ExperimentError(
                "invalid budget",
                expected="a finite epsilon > 0, and delta in (0, 1)",
                got=f"epsilon {self.epsilon}, delta {self.delta}",
                fix="correct step.epsilon or step.delta",
            )

    @property
    def paper_multiplier(self) -> float:
        """Sigma / S of one release as DP-VAE sets it: sqrt(2 ln(1.25 / delta)) / epsilon."""
        return math.sqrt(2 * math.log(1.25 / self.delta)) / self.epsilon

    def multiplier(self, releases: int, adjacency: Adjacency = "replace-one") -> float:
        """The smallest sigma / S with which a number of releases together stay within the
        budget."""
        return (
            math.sqrt(releases)
            * Clip(1.0).sensitivity(adjacency)
            / gdp_parameter(self.epsilon, self.delta)
        )


def drawn_budget(seed: int, client: int, largest: float, delta: float) -> PersonalBudget:
    """A user's own epsilon, uniform in (0, largest] (DP-VAE, section 4.1.3); a function of seed and
    client."""
    return PersonalBudget(
        largest * (1 - float(stream(seed, "personal-budget", client).random())), delta
    )
