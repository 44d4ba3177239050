# SPDX-License-Identifier: Apache-2.0
"""The private neighbourhood models of PNBM: DPSGD-PNBM and DPPS-PNBM.

DPSGD-PNBM: Laplace noise on the gradients of the similarities, to the letter (PNBM, section 3,
algorithm 1).

    S <- beta S0;  for t = 1..K, on L ratings drawn uniformly:
        e_t = 0.5 + (phi - 1) / (t + 1)
        errors e clamped to +-e_t, denominators at least C, |d_uj - sign(s_ij) f| at most phi
        G <- sum of gradients + Laplace(dF K gamma / epsilon),    dF = 2 e_t phi / C
        S <- S - eta (beta G + lambda S)

The stated epsilon is not valid; `stated` gives the exact total of the schedule and the reasons. A
private system is the federated `pnbm` (`fedrec/models/pnbm.py`).

Where this differs from the paper: the algorithm is printed as a picture without text; this reading
is the only one consistent with the surrounding text. The paper assumes the denominator's floor C;
here it is enforced. Initial similarities, L and K are settings, and `start = "uniform"` does not
depend on the ratings. The N_k neighbours are selected by the noisy S after training.
"""

from typing import Self

import numpy as np
from pydantic import Field, model_validator

from fedrec.baselines.pnbm import LearnedSimilarities, SimilarityConfig, descend
from fedrec.baselines.private.ratings import MOST_RATINGS, PosteriorConfig
from fedrec.errors import ExperimentError
from fedrec.neighbourhood.learned import FROM_DATA, Bounds, Examples, Gradient, Start
from fedrec.neighbourhood.similarity import Profiles, item_means
from fedrec.privacy.statement import Stated, schedule_total

_CAVEATS = (
    (
        "Amplification by sampling is taken to be linear, and it is not: the exact total above has"
        " the right formula."
    ),
    (
        "That total is right only for neighbours outside the sample left out; here, as in the"
        " paper, all of a user's ratings are neighbours of a sampled one, so that sampling"
        " amplifies nothing."
    ),
    (
        "The noise is scaled to one entry of the gradient. One rating of a user with n ratings"
        " changes up to n (n - 1) entries: at the floor C the sum changes about 1.5 n times as much"
        " as the noise is calibrated for."
    ),
    (
        "Exact item means are used and published, and users with too few ratings are left out based"
        " on the private data."
    ),
    "Tuning K, C and the step size for each epsilon on results is not accounted for.",
)
_START_CAVEAT = (
    "The similarities start from the ratings themselves, without noise: nothing is guaranteed."
)


class DpsgdPnbmConfig(SimilarityConfig):
    """Settings of algorithm 1."""

    start: Start = "uniform"
    """S0; `cosine` and `pearson` are computed from the ratings without noise."""
    epsilon: float | None = Field(default=1.0, gt=0)
    """Epsilon for one rating, as the paper states it; null: no noise."""
    iterations: int = Field(default=10, ge=1)
    """Number of steps K; 1 to 20 in the paper."""
    sample: float = Field(default=1.0, gt=0, le=1)
    """Gamma = L / |R|, the share of ratings in a step; not in the paper."""
    learning_rate: float = Field(default=0.4, gt=0)
    """Learning rate eta; 0.1 or 0.4 in the paper."""
    rescale: float = Field(default=10.0, gt=0)
    """Beta; 10 or 20 in the paper."""
    floor: float = Field(default=10.0, ge=0)
    """Smallest denominator C; 10 or 15 in the paper; 0 only without noise."""
    minimum_ratings: int = Field(default=20, ge=0)
    """Users with at most this number of ratings do not train."""

    @model_validator(mode="after")
    def _noise_needs_a_floor(self) -> Self:
        if self.epsilon is not None and not self.floor > 0:
            raise ValueError("floor > 0 with an epsilon: noise is scaled to the bounds")
        return self

    @property
    def spread(self) -> float:
        """Width Phi of the rating scale."""
        return self.scale[1] - self.scale[0]


class DpsgdPnbm(LearnedSimilarities):
    """Similarities learned from gradients with Laplace noise."""

    name = "dpsgd-pnbm"
    Config = DpsgdPnbmConfig
    paper = "PNBM, algorithm 1"
    config: DpsgdPnbmConfig

    def selected(self, profiles: Profiles, random: np.random.Generator) -> Profiles:
        """Select the ratings of users with more than `minimum-ratings`.

        Raises:
            ExperimentError: no user has enough ratings.
        """
        selected = profiles.only((profiles.counts > self.config.minimum_ratings)[profiles.users])
        if not len(selected.values):
            raise ExperimentError(
                "no user has enough ratings",
                expected=f"more than {self.config.minimum_ratings} ratings (minimum-ratings)",
                got=f"at most {profiles.counts.max(initial=0)} ratings of a user",
                fix="lower minimum-ratings",
            )
        return selected

    def learned(
        self, start: np.ndarray, profiles: Profiles, random: np.random.Generator
    ) -> np.ndarray:
        """Run algorithm 1."""
        examples = Examples(profiles, self._means)
        similarity = self.config.rescale * start
        for step in range(1, self.config.iterations + 1):
            self._descend(similarity, step, examples, random)
        return similarity

    def stated(self) -> Stated | None:
        """Stated and exact privacy guarantee after fitting; None without an epsilon."""
        config = self.config
        if config.epsilon is None:
            return None
        if config.start in FROM_DATA:
            return Stated(config.epsilon, np.inf, "one rating", (_START_CAVEAT, *_CAVEATS))
        total = schedule_total(config.epsilon, config.iterations, config.sample)
        return Stated(config.epsilon, total, "one rating", _CAVEATS)

    def _descend(
        self, similarity: np.ndarray, step: int, examples: Examples, random: np.random.Generator
    ) -> None:
        """Run lines 3 to 7 of the algorithm, in place."""
        config = self.config
        bounds = Bounds(
            prior=config.prior,
            error=error_bound(step, config.spread),
            factor=config.spread,
            floor=config.floor,
        )
        size = max(1, round(config.sample * len(examples)))
        drawn = random.permutation(len(examples))[:size]
        gradient, _ = examples.gradient(similarity, drawn, bounds)
        if config.epsilon is not None:
            epsilon = config.epsilon / (config.iterations * config.sample)
            noise_scale = sensitivity(step, config.spread, config.floor) / epsilon
            gradient += random.laplace(0.0, noise_scale, gradient.shape)
            np.fill_diagonal(gradient, 0.0)
        gradient *= config.rescale
        descend(similarity, gradient, config.learning_rate, config.regularisation)


def error_bound(step: int, spread: float) -> float:
    """Largest error that counts in a step, from 1: `0.5 + (phi - 1) / (t + 1)`, with phi the width
    of the scale."""
    return 0.5 + (spread - 1) / (step + 1)


def sensitivity(step: int, spread: float, floor: float) -> float:
    """Sensitivity Delta F of a step as in the paper: twice the bound on one gradient entry."""
    return 2 * error_bound(step, spread) * spread / floor


# DPPS-PNBM: one sample of the similarities from a scaled posterior, to the letter (PNBM, section 4,
# algorithm 2).
#
#     S <- S - epsilon / 4B eta_t / 2 (|R| mean gradient of L ratings + lambda S / H) + z
#     z ~ N(0, rho eta_t)
#
# The validity of the stated epsilon is discussed in `fedrec/baselines/private/ratings.py` and
# returned by `stated`.
#
# Where this differs from the paper:
#
# - B = 16 tau holds only if predictions stay within the scale, so they are clipped inside the
#   density; where they are clipped they have no gradient.
# - H of section 4.2 is 1 to five digits for every pair of items of MovieLens-100K, so that dividing
#   the penalty by it corrects nothing.
# - Start, number of steps and size of a batch are not in the paper; they are settings.

_START = (
    (
        "The similarities start from the ratings themselves, and the chain hardly leaves its start:"
        " the release is the data."
    ),
)


class DppsPnbmConfig(PosteriorConfig, SimilarityConfig):
    """Settings of algorithm 2."""

    start: Start = "uniform"
    """S before the first step; `cosine` and `pearson` are computed from the ratings."""
    regularisation: float = Field(default=0.02, ge=0)
    """Lambda; 0.02 or 0.002 in the paper."""


class DppsPnbm(LearnedSimilarities):
    """One posterior sample of the similarities."""

    name = "dpps-pnbm"
    Config = DppsPnbmConfig
    paper = "PNBM, algorithm 2"
    config: DppsPnbmConfig

    def selected(self, profiles: Profiles, random: np.random.Generator) -> Profiles:
        """Select at most 200 ratings of each user."""
        return profiles.at_most(MOST_RATINGS, random.random(len(profiles.items)))

    def learned(
        self, start: np.ndarray, profiles: Profiles, random: np.random.Generator
    ) -> np.ndarray:
        """Run algorithm 2."""
        similarity = self.config.sampled(start, self.gradient(profiles), random)
        np.fill_diagonal(similarity, 0.0)
        return similarity

    def gradient(self, profiles: Profiles) -> Gradient:
        """Estimates of the gradient of the scaled energy, from batches."""
        config = self.config
        examples = Examples(profiles, item_means(profiles))
        low, high = config.scale
        bounds = Bounds(prior=config.prior, low=low, high=high)
        penalty = config.regularisation / inclusion(profiles, config.batch)

        def estimated(similarity: np.ndarray, random: np.random.Generator) -> np.ndarray:
            drawn = random.integers(0, len(examples), config.batch)
            gradient, _ = examples.gradient(similarity, drawn, bounds)
            gradient *= len(examples) / config.batch
            gradient += penalty * similarity
            gradient *= config.factor
            return gradient

        return estimated

    def stated(self) -> Stated | None:
        """Stated and exact privacy guarantee after fitting; None without an epsilon."""
        return self.config.stated(*(_START if self.config.start in FROM_DATA else ()))


def inclusion(profiles: Profiles, batch: int) -> np.ndarray:
    """Inclusion probabilities H_ij of section 4.2, `float64 [items, items]`, for batches of ratings
    drawn with replacement."""
    shares = np.bincount(profiles.items, minlength=profiles.num_items) / max(len(profiles.items), 1)
    absent = shares * (1 - shares) ** (batch - 1)
    return 1 - np.outer(absent, absent)
