# SPDX-License-Identifier: Apache-2.0
"""Strategies with a special first round, followed by any other strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from fedrec.components import registry
from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.experiment.phases import Phase, step_table
from fedrec.experiment.sections import Section, component_settings
from strategies.base import Cohorts, CohortStrategy, Memory
from strategies.wrappers._by_round import ByRound


class FirstRoundConfig(Config):
    """Settings of strategies with a special first round; a subclass adds `step`, the clients' step
    in it."""

    sampler: Annotated[Section | None, registry.SAMPLER] = None
    """Sampler of the first round; default: that of the experiment."""
    main: Annotated[Section, registry.STRATEGY] = Section(name="reptile")
    """Strategy of all rounds after the first; its clients run the experiment's step."""


class FirstRound(ByRound):
    """One strategy in the first round, another in all that follow.

    Rounds keep their numbers, on which cohorts and noise depend: the main strategy starts with
    round 2.

    Attributes:
        first_phase: the first round's phase.
        first_class: its strategy.
        first: the same, made.
        main: the strategy of the other rounds.

    Raises:
        ExperimentError: the other strategy is not one of fedrec's, or has a special first round
            too.
    """

    first_phase: ClassVar[str]
    first_class: ClassVar[type[CohortStrategy]]

    def __init__(self, config: Any, cohorts: Cohorts, step: dict[str, Any]) -> None:
        super().__init__(config, cohorts, step)
        own = cohorts.among(cohorts.clients, config.sampler)
        self.first = self.first_class(config, own, step_table(config.step))
        cls, settings = _following(config)
        self.main: CohortStrategy = cls(settings, cohorts, step)

    @classmethod
    def schedule(cls, config: Any, step: Mapping[str, Any]) -> tuple[Phase, ...]:
        """The phases in order: one for round 1, then those of the main strategy."""
        following, settings = _following(config)
        first = Phase(cls.first_phase, step_table(config.step), 1, sampler=config.sampler)
        return first, *following.schedule(settings, step)

    @property
    def by_phase(self) -> dict[str, CohortStrategy]:
        """The strategy of the first round and those of the main strategy, by phase."""
        return {self.first_phase: self.first, **self.main.by_phase}

    @property
    def volunteers(self) -> dict[str, str]:
        """Phases without noise and their volunteers: those of the main strategy."""
        return self.main.volunteers

    def strategy_of(self, round_number: int) -> CohortStrategy:
        """The strategy of a round."""
        return self.first if round_number == 1 else self.main

    @property
    def memories(self) -> Mapping[str, Memory]:
        """The main strategy."""
        return {"": self.main}


def _following(config: Any) -> tuple[type[CohortStrategy], Any]:
    """The strategy of all rounds after the first, and its settings."""
    cls = registry.resolve(registry.STRATEGY, config.main.name)
    if not issubclass(cls, CohortStrategy):
        raise ExperimentError(
            f"strategy {config.main.name!r} cannot follow a special first round",
            expected="one of fedrec's own strategies",
            got=repr(config.main.name),
            fix="set strategy.main.name = 'reptile'",
        )
    if issubclass(cls, FirstRound):
        raise ExperimentError(
            f"strategy {config.main.name!r} would never run its first round, as round 1 is taken",
            expected="one strategy with a special first round",
            got=f"strategy.main.name = {config.main.name!r} inside another one",
            fix="leave one of the two out",
        )
    return cls, component_settings(registry.STRATEGY, config.main, at="strategy.main")
