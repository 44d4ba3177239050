# SPDX-License-Identifier: Apache-2.0
"""Popularity first: one round counts how often each item is liked, then another strategy does the rest.

    [strategy]
    name = "popularity-start"
    main = { name = "reptile", server-lr = 1.0 }

The items' biases become b_i = ln(max(share of the clients who like i, a floor)), so that a fresh model ranks by
popularity and its local adaptation only has to learn what is different about a user. Under differential privacy the
counts are a release of their own, phase `popularity`, charged to the same ledger; the logarithm is post-processing.

Where this differs from the paper: PrivRec learns popularity by gradient descent like everything else, which under noise
costs more rounds than it is worth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from pydantic import Field

from fedrec import registry
from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.experiment import Section, component_settings
from fedrec.phases import Phase, step_table
from strategies.base import Aggregate, Cohorts, CohortStrategy

POPULARITY = "popularity"


class PopularityStartConfig(Config):
    """Settings of the popularity start."""

    step: Annotated[Section, registry.STEP] = Section(name="counts")
    """What a client does in the first round."""
    sampler: Annotated[Section | None, registry.SAMPLER] = None
    """How the cohort of the first round is drawn; default: as in the others."""
    floor: float = Field(default=0.001, gt=0, lt=1)
    """Smallest share of clients that an item is taken to be liked by, in (0, 1)."""
    noise_floor: float = Field(default=1.5, ge=0)
    """The same in standard deviations of the noise of a share; the larger of the two counts."""
    main: Annotated[Section, registry.STRATEGY] = Section(name="reptile")
    """The strategy of all rounds after the first; its clients run the experiment's step."""


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


class PopularityStart(CohortStrategy):
    """Counts in the first round, then leaves the rounds to another strategy.

    Rounds keep their numbers, which cohorts and noise are drawn by: the other strategy's first round is round 2.

    Attributes:
        stages: the strategy of each phase, `popularity` and those of the other strategy.

    Raises:
        ExperimentError: the other strategy is none of fedrec's own.
    """

    Config = PopularityStartConfig
    config: PopularityStartConfig

    def __init__(self, config: PopularityStartConfig, cohorts: Cohorts, step: dict[str, Any]) -> None:
        super().__init__(config, cohorts, step)
        self._round = 1
        counted = cohorts.among(cohorts.clients, config.sampler)
        self.counting = _Counting(config, counted, step_table(config.step))
        cls, settings = _following(config)
        self.main: CohortStrategy = cls(settings, cohorts, step)

    @classmethod
    def schedule(cls, config: PopularityStartConfig, step: Mapping[str, Any]) -> tuple[Phase, ...]:
        """See `CohortStrategy.schedule`: `popularity` for round 1, then the other strategy's phases."""
        following, settings = _following(config)
        return Phase(POPULARITY, step_table(config.step), 1), *following.schedule(settings, step)

    @property
    def parts(self) -> dict[str, CohortStrategy]:
        """See `CohortStrategy.parts`."""
        return {POPULARITY: self.counting, **self.main.parts}

    @property
    def volunteers(self) -> dict[str, str]:
        """See `CohortStrategy.volunteers`: the other strategy's."""
        return self.main.volunteers

    def strategy_of(self, round_number: int) -> CohortStrategy:
        """The strategy of a round."""
        return self.counting if round_number == 1 else self.main

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of the round's strategy."""
        self._round = server_round
        return self.strategy_of(server_round).configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """What the round's strategy makes of the replies."""
        return self.strategy_of(server_round).aggregate_train(server_round, replies)

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """What the strategy of the last configured round makes of an aggregate."""
        return self.strategy_of(self._round).apply(theta, aggregate)

    def state(self) -> dict[str, np.ndarray]:
        """What the other strategy remembers."""
        return self.main.state()

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """See `CohortStrategy.restore`."""
        self.main.restore(state)


def _following(config: PopularityStartConfig) -> tuple[type[CohortStrategy], Any]:
    """The strategy of all rounds after the first, and its settings."""
    cls = registry.resolve(registry.STRATEGY, config.main.name)
    if not issubclass(cls, CohortStrategy):
        raise ExperimentError(
            f"strategy {config.main.name!r} cannot follow the popularity start",
            expected="one of fedrec's own strategies",
            got=repr(config.main.name),
            fix="set strategy.main.name = 'reptile'",
        )
    return cls, component_settings(registry.STRATEGY, config.main, at="strategy.main")
