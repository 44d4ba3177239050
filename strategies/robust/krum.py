# SPDX-License-Identifier: Apache-2.0
"""Krum and Multi-Krum (Blanchard et al. 2017): the mean of the updates that are closest to their
neighbours.

With `keep = 1` it is Krum, which takes the update of a single client, with more Multi-Krum.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from pydantic import Field

from fedrec.errors import ExperimentError
from strategies.robust._choice import ChoiceConfig, nearest
from strategies.robust._rule import ClientChanges, RobustRule, mean_of, squared_distances


class KrumConfig(ChoiceConfig):
    """Settings of Krum."""

    keep: int = Field(default=1, ge=1)
    """Number of updates that are averaged (m of Multi-Krum), at most the cohort."""


class Krum(RobustRule):
    """Moves the shared parameters by the update, or the mean of the updates, that are closest to
    others.

    Raises:
        ExperimentError: a round has fewer updates than are averaged.
    """

    name = "krum"
    Config = KrumConfig
    paper = "Blanchard, El Mhamdi, Guerraoui and Stainer 2017"
    config: KrumConfig

    def combined(
        self, changes: Mapping[str, ClientChanges], round_number: int
    ) -> dict[str, np.ndarray]:
        """The mean of the chosen updates, `float64 [R, ...]` by parameter."""
        distances = squared_distances(changes)
        if self.config.keep > len(distances):
            raise ExperimentError(
                f"Krum cannot choose {self.config.keep} of {len(distances)} updates",
                expected="at least as many updates in every round as strategy.keep says",
                got=str(len(distances)),
                fix="set a smaller strategy.keep, or a larger sampler.cohort",
            )
        malicious = self.config.expected(len(distances))
        return mean_of(changes, nearest(distances, malicious, self.config.keep))
