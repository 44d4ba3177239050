# SPDX-License-Identifier: Apache-2.0
"""A cohort of fixed size, drawn uniformly without replacement (PrivRec algorithm 1, line 3)."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedrec.config import Config
from server.samplers.base import Sampler


class FixedSizeConfig(Config):
    """Settings of fixed-size sampling."""

    cohort: int = Field(default=20, ge=1)
    """Clients per round (M in PrivRec)."""


class FixedSizeSampler(Sampler):
    """Uniform sampling without replacement.

    Raises:
        ExperimentError: the cohort is larger than the number of clients.
    """

    Config = FixedSizeConfig
    paper = "PrivRec (Wang et al. 2021), algorithm 1"
    config: FixedSizeConfig

    def __init__(self, config: FixedSizeConfig, clients: np.ndarray, seed: int) -> None:
        super().__init__(config, clients, seed)
        self.refuse_more_than_there_are(config.cohort)

    @property
    def expected_cohort(self) -> float:
        """Mean number of clients in a round."""
        return float(self.config.cohort)

    def draw(self, random: np.random.Generator) -> np.ndarray:
        """Draw distinct clients, `int64 [cohort]`."""
        return random.choice(self.clients, size=self.config.cohort, replace=False)
