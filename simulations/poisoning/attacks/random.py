# SPDX-License-Identifier: Apache-2.0
"""Random profiles (Lam and Riedl 2004): the targets among items drawn at random."""

from __future__ import annotations

import numpy as np

from fedrec.data.adversary.known import Known
from simulations.poisoning.base import ProfilePoisoning
from simulations.poisoning.profiles import ProfileConfig, with_fillers


class RandomProfiles(ProfilePoisoning):
    """Likes the targets and random items."""

    name = "random"
    Config = ProfileConfig
    paper = "Lam and Riedl 2004"
    config: ProfileConfig

    def profile(self, known: Known, random: np.random.Generator) -> np.ndarray:
        """The targets and random items, `int64 [n]`."""
        none = np.empty(0, dtype=np.int64)
        return with_fillers(known, random, none, self.config.fillers(known))
