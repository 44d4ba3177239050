# SPDX-License-Identifier: Apache-2.0
"""DPPS-PNBM: one sample of the similarities from a scaled posterior, to the letter (PNBM, section
4, algorithm 2).

    S <- S - epsilon / 4B eta_t / 2 (|R| mean gradient of L ratings + lambda S / H) + z
    z ~ N(0, rho eta_t)

The validity of the stated epsilon is discussed in `fedrec/baselines/private/_posterior.py` and
returned by `stated`.

Where this differs from the paper:

- B = 16 tau holds only if predictions stay within the scale, so they are clipped inside the
  density; where they are clipped they have no gradient.
- H of section 4.2 is 1 to five digits for every pair of items of MovieLens-100K, so that dividing
  the penalty by it corrects nothing.
- Start, number of steps and size of a batch are not in the paper; they are settings.
"""

import numpy as np
from pydantic import Field

from fedrec.baselines.neighbourhood.pnbm import LearnedSimilarities, SimilarityConfig
from fedrec.baselines.private._posterior import PosteriorConfig
from fedrec.neighbourhood.gradients import Bounds, Examples
from fedrec.neighbourhood.langevin import Gradient
from fedrec.neighbourhood.profiles import Profiles, item_means
from fedrec.neighbourhood.start import FROM_DATA, Start
from fedrec.privacy.stated import Stated

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
    stream = "baseline-dpps-pnbm"

    def kept(self, profiles: Profiles, random: np.random.Generator) -> Profiles:
        """At most `most-ratings` of each user."""
        return profiles.at_most(self.config.most_ratings, random.random(len(profiles.items)))

    def learned(
        self, start: np.ndarray, profiles: Profiles, random: np.random.Generator
    ) -> np.ndarray:
        """Run algorithm 2."""
        found = self.config.chain().sample(start, self.gradient(profiles), random)
        np.fill_diagonal(found, 0.0)
        return found

    def gradient(self, profiles: Profiles) -> Gradient:
        """Estimates of the gradient of the scaled energy, from batches."""
        config = self.config
        examples = Examples(profiles, item_means(profiles)[0])
        low, high = config.scale
        bounds = Bounds(prior=config.prior, low=low, high=high)
        penalty = config.regularisation / inclusion(profiles, config.batch)

        def estimated(similarity: np.ndarray, random: np.random.Generator) -> np.ndarray:
            drawn = random.integers(0, len(examples), config.batch)
            found, _ = examples.gradient(similarity, drawn, bounds)
            found *= len(examples) / config.batch
            found += penalty * similarity
            found *= config.factor
            return found

        return estimated

    def stated(self) -> Stated | None:
        """Its stated and exact privacy after fitting; None without an epsilon."""
        return self.config.stated(*(_START if self.config.start in FROM_DATA else ()))


def inclusion(profiles: Profiles, batch: int) -> np.ndarray:
    """H_ij as section 4.2 prints it, `float64 [items, items]`, for batches of so many ratings drawn
    with replacement."""
    shares = np.bincount(profiles.items, minlength=profiles.num_items) / max(len(profiles.items), 1)
    absent = shares * (1 - shares) ** (batch - 1)
    return 1 - np.outer(absent, absent)
