# SPDX-License-Identifier: Apache-2.0
"""Shared code of systems that release one sample of a scaled posterior: settings, scale, and the
actual guarantee.

With each user's half squared error l_u in [0, B / 2], one exact sample of exp(-c sum_u l_u)
p(parameters) changes, if one user is replaced by another, by a factor of at most exp(c B / 2) in
the density and by the same factor in its normalisation: it is c B-DP. The papers take c = epsilon /
4B, which is four times less than c = epsilon / B.
"""

from typing import Literal

from pydantic import Field

from fedrec.baselines.neighbourhood._neighbours import ScaleConfig
from fedrec.neighbourhood.langevin import Langevin
from fedrec.privacy.stated import Stated

CAVEATS = (
    (
        "The total is that of an exact sample, which no chain of this length gives: at such step"
        " sizes the prior alone takes some 10^10 steps to forget where the chain started. How far"
        " the chain is from the posterior (delta) is not known, so nothing is guaranteed."
    ),
    (
        "A temperature below 1 divides the noise: what is sampled is the posterior to the power of"
        " 1 / temperature, and epsilon grows by that factor. It is counted above."
    ),
    "Exact item means are used and published.",
    (
        "The epsilon is for a whole user. Divided by the number of its ratings it is no guarantee"
        " for one rating: that has the same epsilon as the user."
    ),
)


class PosteriorConfig(ScaleConfig):
    """Settings of one sample by stochastic gradient Langevin dynamics."""

    epsilon: float | None = Field(default=20.0, gt=0)
    """Epsilon per user, as the paper states it; null: the unscaled posterior."""
    most_ratings: int = Field(default=200, ge=1)
    """Tau, the largest number of ratings per user; of more, a random subset is kept."""
    bound: Literal["paper", "tight"] = "paper"
    """Scale of the posterior: epsilon / 4B, or epsilon / B, which gives the same guarantee."""
    steps: int = Field(default=200, ge=0)
    """Number of steps of the chain; not in the paper."""
    batch: int = Field(default=10_000, ge=1)
    """L, ratings in a step, drawn with replacement; not in the paper."""
    learning_rate: float = Field(default=8e-6, gt=0)
    """Eta_1; 8e-8 to 8e-6 in the paper."""
    decay: float = Field(default=0.3, ge=0, le=1)
    """Xi, of the step sizes; 0.3 in the paper."""
    temperature: float = Field(default=0.09, gt=0)
    """Rho, factor on the variance of the noise; 0.001 to 0.09 in the paper, 1 samples the
    posterior."""
    regularisation: float = Field(default=0.02, ge=0)
    """Lambda, precision of the prior / precision of ratings."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial values, the removed ratings, the batches and the noise."""

    @property
    def most_error(self) -> float:
        """B, the largest sum of squared errors of a user."""
        return (self.scale[1] - self.scale[0]) ** 2 * self.most_ratings

    @property
    def factor(self) -> float:
        """Factor on the log of the posterior."""
        if self.epsilon is None:
            return 1.0
        return self.epsilon / (self.most_error * (4 if self.bound == "paper" else 1))

    def chain(self) -> Langevin:
        """The Langevin chain of these settings."""
        return Langevin(self.steps, self.learning_rate, self.decay, self.temperature)

    def stated(self, *more: str) -> Stated | None:
        """Stated and exact privacy of a sample under these settings, with additional caveats."""
        if self.epsilon is None:
            return None
        exact = self.factor * self.most_error / self.temperature
        return Stated(self.epsilon, exact, "one user", (*more, *CAVEATS))
