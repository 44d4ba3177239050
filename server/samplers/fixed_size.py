# SPDX-License-Identifier: Apache-2.0
"""A cohort of fixed size, drawn uniformly without replacement (PrivRec algorithm 1, line 3)."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedrec.config import Config
from server.samplers.base import SizedSampler


class FixedSizeConfig(Config):
    """Settings of fixed-size sampling."""

    cohort: int = Field(default=20, ge=1)
    """Clients per round (M in PrivRec)."""


class FixedSizeSampler(SizedSampler):
    """Uniform sampling without replacement."""

    name = "fixed-size"
    Config = FixedSizeConfig
    paper = "PrivRec (Wang et al. 2021), algorithm 1"
    config: FixedSizeConfig

    def draw(self, random: np.random.Generator) -> np.ndarray:
        """Draw distinct clients, `int64 [cohort]`."""
        return random.choice(self.clients, size=self.config.cohort, replace=False)
