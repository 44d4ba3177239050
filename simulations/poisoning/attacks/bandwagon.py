# SPDX-License-Identifier: Apache-2.0
"""Bandwagon profiles (Kapoor et al. 2017): the targets among some popular and many random items.

A tenth of the profile is drawn from the tenth of the catalogue that is most popular, the rest from
all items, as in the comparison of FedRecAttack (Rong et al. 2022). Popularity is what the adversary
knows of it (`adversary.public-share`).
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedrec.data.adversary.known import Known
from simulations.poisoning.base import ProfilePoisoning
from simulations.poisoning.profiles import ProfileConfig, with_fillers


class BandwagonConfig(ProfileConfig):
    """Settings of bandwagon profiles."""

    popular_share: float = Field(default=0.1, ge=0, le=1)
    """Share of the profile that is drawn from the popular items, a tenth of the catalogue."""


class BandwagonProfiles(ProfilePoisoning):
    """Likes the targets, some popular items and random ones."""

    name = "bandwagon"
    Config = BandwagonConfig
    paper = "Kapoor et al. 2017; Rong et al. 2022"
    config: BandwagonConfig

    def profile(self, known: Known, random: np.random.Generator) -> np.ndarray:
        """The targets, popular and random items, `int64 [n]`."""
        count = self.config.fillers(known)
        popular = known.popular(max(1, known.items // 10))
        size = min(int(self.config.popular_share * count), len(popular))
        return with_fillers(known, random, random.choice(popular, size=size, replace=False), count)
