# SPDX-License-Identifier: Apache-2.0
"""Popularity first: one round counts how often each item is liked, then another strategy does the
rest.

    [strategy]
    name = "popularity-start"
    main = { name = "reptile", server-lr = 1.0 }

The items' biases become b_i = ln(max(share of the clients who like i, a floor)), so that a fresh
model ranks by popularity and its local adaptation only has to learn what is different about a user.
Under differential privacy the counts are a release of their own, phase `popularity`, charged to the
same ledger; the logarithm is post-processing.

Where this differs from the paper: PrivRec learns popularity by gradient descent like everything
else, which under noise costs more rounds than it is worth.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from fedrec.components import registry
from fedrec.experiment.sections import Section, component_settings
from strategies.base import Aggregate, CohortStrategy
from strategies.wrappers._first_round import FirstRound, FirstRoundConfig

POPULARITY = "popularity"


class PopularityStartConfig(FirstRoundConfig):
    """Settings of the popularity start."""

    step: Annotated[Section, registry.STEP] = Section(name="counts")
    """What a client does in the first round."""
    floor: float = Field(default=0.001, gt=0, lt=1)
    """Smallest share of clients that an item is taken to be liked by, in (0, 1)."""
    noise_floor: float = Field(default=1.5, ge=0)
    """The same in standard deviations of the noise of a share; the larger of the two counts."""


class _Counting(CohortStrategy):
    """Turns the mean of the clients' counts into biases."""

    config: PopularityStartConfig

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        name = str(component_settings(registry.STEP, self.config.step).parameter)
        shares = aggregate.total(theta)[name] / aggregate.clients
        return {**theta, name: np.log(np.maximum(shares, self._floor()))}

    def _floor(self) -> float:
        """Counts below it are mostly noise, and the logarithm would spread them far apart."""
        noise = 0.0 if self.privacy is None else self.privacy.plan.mean_noise_std
        return max(self.config.floor, self.config.noise_floor * noise)

    def phase(self, round_number: int) -> str:
        return POPULARITY


class PopularityStart(FirstRound):
    """Counts in the first round, then leaves the rounds to another strategy, see `FirstRound`."""

    Config = PopularityStartConfig
    first_phase = POPULARITY
    first_class = _Counting
