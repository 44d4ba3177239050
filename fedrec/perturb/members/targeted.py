# SPDX-License-Identifier: Apache-2.0
"""Targeted perturbation on the device (poster "targeted DP"); `fedrec.perturb.targeted` has its
parts."""

import numpy as np

from fedrec.data.perturbation import Perturbation, Perturbed, TrainingData
from fedrec.perturb.targeted.config import TargetedConfig
from fedrec.perturb.targeted.guarantee import words
from fedrec.perturb.targeted.mechanisms import RATING_SCALE
from fedrec.perturb.targeted.profiles import perturb_profiles
from fedrec.perturb.targeted.report import summary


class Targeted(Perturbation):
    """Randomises the most stereotypical interactions of each profile, or random ones, on the
    client's device."""

    name = "targeted"
    Config = TargetedConfig
    paper = 'poster "targeted DP", equations 1 to 3'
    config: TargetedConfig

    def depends_on(self, rated: bool) -> str:
        """The stereotypes, of which everybody's rows are counted, and the rating scale."""
        if self.config.select == "stereotypical":
            return "the stereotypes of everybody's rows (perturb.select = 'stereotypical')"
        return RATING_SCALE if rated else ""

    def perturb(self, data: TrainingData) -> Perturbed:
        found = perturb_profiles(data, self.config, self.seed)
        return Perturbed(found.learned, np.arange(len(data.rows)), summary(data.rows, found))

    def words(self) -> list[str]:
        """Nominal and true epsilons, in sentences."""
        return words(self.config)
