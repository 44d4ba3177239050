# SPDX-License-Identifier: Apache-2.0
"""Popular profiles (Gunes et al. 2014): the targets among the most popular items, the same for all
malicious clients. Popularity is what the adversary knows of it (`adversary.public-share`)."""

from __future__ import annotations

import numpy as np

from fedrec.data.adversary.known import Known
from simulations.poisoning.base import ProfilePoisoning
from simulations.poisoning.profiles import ProfileConfig


class PopularProfiles(ProfilePoisoning):
    """Likes the targets and the most popular items."""

    name = "popular"
    Config = ProfileConfig
    paper = "Gunes et al. 2014; Rong et al. 2022"
    config: ProfileConfig

    def profile(self, known: Known, random: np.random.Generator) -> np.ndarray:
        """The targets and the most popular items, `int64 [n]`."""
        popular = known.popular(self.config.fillers(known))
        return np.concatenate([known.targets, popular])
