# SPDX-License-Identifier: Apache-2.0
"""Item popularity in the first round, by counts of likes; then another strategy.

    [strategy]
    name = "popularity-start"
    main = { name = "reptile", server-lr = 1.0 }

The items' biases become b_i = ln(max(share of the clients who like i, a floor)) (or the logarithm
of what the share is to be expected to be, given its noise: `estimate`), so that the
initial model ranks by popularity, and local adaptation only has to learn how a user differs from
it. Under differential privacy the counts are a release of their own, phase `popularity`, charged to
the same ledger; the logarithm is post-processing.

Where this differs from the paper: PrivRec learns popularity by gradient descent, which needs many
rounds under noise.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fedrec.components import registry
from fedrec.experiment.sections import Section
from fedrec.factors.chosen_items import BIAS
from fedrec.factors.residual import expected_counts
from strategies.base import Aggregate, CohortStrategy
from strategies.wrappers._first_round import FirstRound, FirstRoundConfig

POPULARITY = "popularity"


class PopularityStartConfig(FirstRoundConfig):
    """Settings of the popularity start."""

    step: Annotated[Section, registry.STEP] = Section(name="counts")
    """Step of the clients in the first round."""
    estimate: Literal["floor", "posterior-mean"] = "floor"
    """What a noisy share is taken for: itself, but at least a floor; or its expected value under an
    exponential prior, at least half a client, which tells rare items apart."""
    floor: float = Field(default=0.001, gt=0, lt=1)
    """Smallest assumed share of clients who like an item, in (0, 1), where `estimate = "floor"`."""
    noise_floor: float = Field(default=1.5, ge=0)
    """The same in standard deviations of the noise of a share; the larger of both applies."""


class _Counting(CohortStrategy):
    """Computes biases from the mean of the clients' counts."""

    config: PopularityStartConfig

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        counts = aggregate.total(theta)[BIAS]
        clients = aggregate.clients
        if self.config.estimate == "posterior-mean":
            std = 0.0 if self.privacy is None else self.privacy.plan.mean_noise_std * clients
            return {**theta, BIAS: np.log(expected_counts(counts, std) / clients)}
        return {**theta, BIAS: np.log(np.maximum(counts / clients, self._floor()))}

    def _floor(self) -> float:
        """Shares below it are mostly noise, which the logarithm would amplify."""
        noise = 0.0 if self.privacy is None else self.privacy.plan.mean_noise_std
        return max(self.config.floor, self.config.noise_floor * noise)

    def phase(self, round_number: int) -> str:
        return POPULARITY


class PopularityStart(FirstRound):
    """Counts likes in the first round, then runs another strategy, see `FirstRound`."""

    name = "popularity-start"
    Config = PopularityStartConfig
    first_phase = POPULARITY
    first_class = _Counting
