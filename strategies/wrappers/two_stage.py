# SPDX-License-Identifier: Apache-2.0
"""Two-stage federated training (PrivRec section 2.4).

Stage one trains only the item embedding, on sessions; the main stage then trains the whole
recommender, starting from these embeddings. Each stage is a separate strategy, so that one may add
noise and the other not.

    [strategy]
    name = "two-stage"
    main = { name = "reptile", server-lr = 1.0 }

    [strategy.stage-one]
    rounds = 40
    clients = "opted-in"
    share = 0.1
    step = { name = "contrastive", epochs = 5 }
    strategy = { name = "reptile", server-lr = 5.0 }

Where this differs from the paper: it says that privacy may be relaxed in stage one "when user
information is exclusive". The sequences of stage one still are users' own, and embeddings learned
from them without noise are not covered by the guarantee of the main stage. `clients` therefore
selects whose sequences are used: those of all clients, of a share who opted in, or of a share whose
data are public and who are excluded from the main stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from pydantic import Field, model_validator

from fedrec.components import registry
from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.experiment.phases import MAIN, Phase, step_table
from fedrec.experiment.sections import Section, component_settings
from strategies.base import Cohorts, CohortStrategy, Memory
from strategies.wrappers._by_round import ByRound

STAGE_ONE = "stage-one"


class StageOneConfig(Config):
    """Settings of stage one."""

    rounds: int = Field(ge=1)
    """Rounds of stage one; they are part of the experiment's `rounds`."""
    step: Annotated[Section, registry.STEP] = Section(name="contrastive")
    """Step of the clients in stage one."""
    strategy: Annotated[Section, registry.STRATEGY] = Section(name="reptile")
    """Strategy of stage one."""
    sampler: Annotated[Section | None, registry.SAMPLER] = None
    """Sampler of stage one; default: that of the main stage."""
    clients: Literal["all", "opted-in", "public"] = "all"
    """Participants: all training clients, a share of them, or a share that is excluded from the
    main stage."""
    share: float | None = Field(default=None, gt=0, lt=1)
    """Share of the training clients, in (0, 1), for `opted-in` and `public`; drawn once, from the
    seed."""

    @model_validator(mode="after")
    def _share_where_it_means_something(self) -> Self:
        if (self.clients == "all") != (self.share is None):
            raise ValueError("a share with clients = 'opted-in' or 'public', and none with 'all'")
        return self


class TwoStageConfig(Config):
    """Settings of two-stage training."""

    stage_one: StageOneConfig
    """Stage one."""
    main: Annotated[Section, registry.STRATEGY] = Section(name="reptile")
    """Strategy of the main stage; its clients run the experiment's step."""


class TwoStage(ByRound):
    """Runs one strategy for the rounds of stage one and another one after it.

    Attributes:
        stages: the strategy of each stage, `stage-one` and `main`.

    Raises:
        ExperimentError: one of the strategies is not one of fedrec's or has phases of its own, or a
            cohort is larger than its stage's clients.
    """

    name = "two-stage"
    Config = TwoStageConfig
    paper = "PrivRec (Wang et al. 2021), section 2.4"
    config: TwoStageConfig

    def __init__(self, config: TwoStageConfig, cohorts: Cohorts, step: dict[str, Any]) -> None:
        super().__init__(config, cohorts, step)
        first = config.stage_one
        inside, outside = _participants(first, cohorts)
        self.stages = {
            STAGE_ONE: _inner(
                first.strategy,
                cohorts.among(inside, first.sampler),
                step_table(first.step),
                "stage-one.strategy",
            ),
            MAIN: _inner(config.main, cohorts.among(outside), step, "main"),
        }

    @classmethod
    def schedule(cls, config: TwoStageConfig, step: Mapping[str, Any]) -> tuple[Phase, ...]:
        """The phases in order: `stage-one` for its rounds, from 1, and `main` for all later
        ones."""
        first = config.stage_one
        return Phase(
            STAGE_ONE, step_table(first.step), first.rounds, first.clients != "all", first.sampler
        ), Phase(MAIN, step)

    @property
    def by_phase(self) -> dict[str, CohortStrategy]:
        """The strategy of each stage, by phase."""
        return self.stages

    @property
    def volunteers(self) -> dict[str, str]:
        """The volunteers of stage one, in words; none if all clients take part in it."""
        count = len(self.stages[STAGE_ONE].cohorts.clients)
        words = {
            "opted-in": f"{count} clients who opted in",
            "public": f"{count} clients whose data are public, and who are in no other stage",
        }
        kind = self.config.stage_one.clients
        return {} if kind == "all" else {STAGE_ONE: words[kind]}

    def strategy_of(self, round_number: int) -> CohortStrategy:
        """The strategy of a round's stage."""
        return self.stages[self.phase(round_number)]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The aggregate of the stage's strategy; the metrics contain the `stage`, 1 or 2."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        stage = 1 if self.phase(server_round) == STAGE_ONE else 2
        return arrays, MetricRecord({"stage": stage, **(metrics or {})})

    @property
    def memories(self) -> Mapping[str, Memory]:
        """Both strategies, each under the name of its stage."""
        return {f"{stage}/": inner for stage, inner in self.stages.items()}


def _participants(config: StageOneConfig, cohorts: Cohorts) -> tuple[np.ndarray, np.ndarray]:
    """The clients of stage one and those of the main stage."""
    if config.share is None:
        return cohorts.clients, cohorts.clients
    drawn = cohorts.draw("stage-one", config.share)
    return drawn, np.setdiff1d(
        cohorts.clients, drawn
    ) if config.clients == "public" else cohorts.clients


def _inner(section: Section, cohorts: Cohorts, step: dict[str, Any], at: str) -> CohortStrategy:
    cls = registry.resolve(registry.STRATEGY, section.name)
    if not issubclass(cls, CohortStrategy):
        raise ExperimentError(
            f"strategy {section.name!r} cannot be a stage",
            expected="one of fedrec's own strategies",
            got=repr(section.name),
            fix=f"set strategy.{at}.name = 'reptile'",
        )
    settings = component_settings(registry.STRATEGY, section, at=f"strategy.{at}")
    if len(cls.schedule(settings, step)) > 1:
        raise ExperimentError(
            f"strategy {section.name!r} has phases of its own and cannot be a stage",
            expected="a strategy without phases",
            got=f"strategy.{at}.name = {section.name!r}",
            fix=(
                "put it around the two stages: strategy.name = 'popularity-start', strategy.main ="
                " { name = 'two-stage', ... }"
            ),
        )
    return cls(settings, cohorts, step)
