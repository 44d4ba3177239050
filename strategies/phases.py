# SPDX-License-Identifier: Apache-2.0
"""Strategies in phases: two stages, or a special first round."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from pydantic import Field

from fedrec.components import registry
from fedrec.components.registry import STRATEGY
from fedrec.components.sections import Section, component_settings
from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.experiment.phases import MAIN, Phase, phase_at, step_table
from fedrec.neighbourhood import Scale, means_of
from fedrec.sums.fold_in import expected_counts
from fedrec.sums.products import BIAS
from strategies.base import Aggregate, Cohorts, CohortStrategy, server_rate
from strategies.sums import FACTORS, Products, ProductsStrategy, with_factors

# Strategies that delegate each round to the strategy of its phase.


class _PhasesConfig(Config):
    """Settings of strategies with phases."""

    main: Annotated[Section, registry.STRATEGY] = Section(name="reptile")
    """Strategy of the last phase; its clients run the experiment's step."""

    def rate(self, round_number: int) -> float:
        """Server rate of the main strategy, which runs the later rounds."""
        return server_rate(component_settings(STRATEGY, self.main), round_number)


class _ByPhase(CohortStrategy):
    """Base of strategies that delegate each round to the strategy of its phase."""

    _round = 1

    def _strategy_of(self, round_number: int) -> CohortStrategy:
        """Strategy of a round."""
        return self.phases()[phase_at(self._schedule, round_number).name]

    @cached_property
    def _schedule(self) -> tuple[Phase, ...]:
        return self.schedule(self.config, self.step)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Make the messages of the round's strategy."""
        self._round = server_round
        return self._strategy_of(server_round).configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate by the round's strategy."""
        return self._strategy_of(server_round).aggregate_train(server_round, replies)

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """Apply an aggregate by the strategy of the last configured round."""
        return self._strategy_of(self._round).apply(theta, aggregate)


# Two-stage federated training (PrivRec section 2.4).
#
# Stage one trains only the item embedding, on sessions; the main stage then trains the whole
# recommender, starting from these embeddings. Each stage is a separate strategy, so that one may
# add noise and the other not.
#
#     [strategy]
#     name = "two-stage"
#     main = { name = "reptile", server-lr = 1.0 }
#
#     [strategy.stage-one]
#     rounds = 40
#     step = { name = "contrastive", epochs = 5 }
#     strategy = { name = "reptile", server-lr = 5.0 }
#
# Where this differs from the paper: it says that privacy may be relaxed in stage one "when user
# information is exclusive". The sequences of stage one are still users' data, and embeddings
# learned from them without noise would not be covered by the guarantee of the main stage. Under
# `[privacy]` both stages therefore have noise.

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


class TwoStageConfig(_PhasesConfig):
    """Settings of two-stage training."""

    stage_one: StageOneConfig
    """Stage one."""


class TwoStage(_ByPhase):
    """Two-stage training: one strategy for the rounds of stage one and another after it.

    Attributes:
        stages: the strategies of the stages `stage-one` and `main`.

    Raises:
        ExperimentError: a strategy is not one of fedrec's or has phases, or a cohort is larger than
            its stage's clients.
    """

    name = "two-stage"
    Config = TwoStageConfig
    paper = "PrivRec (Wang et al. 2021), section 2.4"
    config: TwoStageConfig

    def __init__(self, config: TwoStageConfig, cohorts: Cohorts, step: dict[str, Any]) -> None:
        super().__init__(config, cohorts, step)
        first = config.stage_one
        stage_one = cohorts.among(cohorts.clients, first.sampler)
        first_step = step_table(first.step)
        main = cohorts.among(cohorts.clients)
        self.stages = {
            STAGE_ONE: _stage(first.strategy, stage_one, first_step, "stage-one.strategy"),
            MAIN: _stage(config.main, main, step, "main"),
        }
        self.memories = {f"{stage}/": inner for stage, inner in self.stages.items()}

    @classmethod
    def schedule(cls, config: TwoStageConfig, step: Mapping[str, Any]) -> tuple[Phase, ...]:
        """Phases in order: `stage-one` for its rounds, from 1, and `main` for all later ones."""
        first = config.stage_one
        stage_one = Phase(STAGE_ONE, step_table(first.step), first.rounds, sampler=first.sampler)
        return stage_one, Phase(MAIN, step)

    def phases(self) -> dict[str, CohortStrategy]:
        """Strategy of each stage."""
        return self.stages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate by the stage's strategy; the metrics contain the `stage`, 1 or 2."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        stage = 1 if self._strategy_of(server_round) is self.stages[STAGE_ONE] else 2
        return arrays, MetricRecord({"stage": stage, **(metrics or {})})


def _stage(section: Section, cohorts: Cohorts, step: dict[str, Any], at: str) -> CohortStrategy:
    cls, settings = _inner(section, at)
    if len(cls.schedule(settings, step)) > 1:
        raise ExperimentError(
            f"strategy {section.name!r} has phases and cannot be a stage",
            fix="wrap the two stages in it, such as strategy.name = 'popularity-start' with"
            " strategy.main = { name = 'two-stage', ... }",
        )
    return cls(settings, cohorts, step)


def _inner(section: Section, at: str) -> tuple[type[CohortStrategy], Any]:
    """Class and settings of an inner strategy, named by the setting `at`."""
    cls = registry.resolve(registry.STRATEGY, section.name)
    if not issubclass(cls, CohortStrategy):
        raise ExperimentError(
            f"strategy {section.name!r} cannot run the rounds of a phase",
            expected="one of fedrec's own strategies",
            fix=f"set strategy.{at}.name = 'reptile'",
        )
    return cls, component_settings(registry.STRATEGY, section, at=f"strategy.{at}")


class _FirstRoundConfig(_PhasesConfig):
    """Settings of strategies with a special first round; a subclass adds `step`, the clients' step
    in it, as a setting or not."""

    sampler: Annotated[Section | None, registry.SAMPLER] = None
    """Sampler of the first round; default: that of the experiment."""


class _FirstRound(_ByPhase):
    """Base of strategies with a special first round and another strategy after it.

    Rounds keep their numbers, on which cohorts and noise depend: the main strategy starts with
    round 2.

    Attributes:
        first_phase: the first round's phase.
        first_class: its strategy.
        first: its instance.
        main: the strategy of the other rounds.

    Raises:
        ExperimentError: the other strategy is not one of fedrec's, or also has a special first
            round.
    """

    first_phase: ClassVar[str]
    first_class: ClassVar[type[CohortStrategy]]

    def __init__(self, config: Any, cohorts: Cohorts, step: dict[str, Any]) -> None:
        super().__init__(config, cohorts, step)
        first_cohorts = cohorts.among(cohorts.clients, config.sampler)
        self.first = self.first_class(config, first_cohorts, step_table(config.step))
        cls, settings = _following(config)
        self.main: CohortStrategy = cls(settings, cohorts, step)
        self.memories = {"": self.main}

    @classmethod
    def schedule(cls, config: Any, step: Mapping[str, Any]) -> tuple[Phase, ...]:
        """Phases in order: one for round 1, then those of the main strategy."""
        following, settings = _following(config)
        first = Phase(cls.first_phase, step_table(config.step), 1, sampler=config.sampler)
        return first, *following.schedule(settings, step)

    def phases(self) -> dict[str, CohortStrategy]:
        """Strategies of the first round and of the phases of the main strategy."""
        return {self.first_phase: self.first, **self.main.phases()}

    def _strategy_of(self, round_number: int) -> CohortStrategy:
        """Strategy of a round."""
        return self.first if round_number == 1 else self.main


def _following(config: Any) -> tuple[type[CohortStrategy], Any]:
    """Class and settings of the strategy of all rounds after the first."""
    cls, settings = _inner(config.main, "main")
    if issubclass(cls, _FirstRound):
        raise ExperimentError(
            f"strategy {config.main.name!r} would never run its own first round",
            fix="remove one of the two",
        )
    return cls, settings


# Item means in the first round, by sums and counts of ratings; then another strategy.
#
#     [strategy]
#     name = "means-start"
#     main = { name = "reptile", server-lr = 1.0 }
#
# The first round computes `item.mean` and `item.count` from the sums of the clients' ratings,
# mapped to [-1, 1], and of their indicators of rated items. Under differential privacy the sums are
# a release of their own, phase `means`, charged to the same ledger; computing quotients, and
# selecting the most rated items, is post-processing.
#
# Where this differs from the paper: PNBM uses exact item means, without accounting for them.

MEANS = "means"


class MeansStartConfig(_FirstRoundConfig):
    """Settings of the start from item means."""

    damping: float = Field(default=20.0, ge=0)
    """Smoothing: number of ratings equal to the overall mean that are added to each item."""
    scale: Scale = (1.0, 5.0)
    """Lowest and highest rating; public, and that of the model."""

    @property
    def step(self) -> Section:
        """Step of the clients in the first round."""
        return Section.model_validate({"name": "rating-sums", "scale": self.scale})


class _Averaging(CohortStrategy):
    """First round of `MeansStart`: computes means from the sums of the clients' ratings."""

    config: MeansStartConfig

    def check_parameters(self, theta: Mapping[str, np.ndarray]) -> None:
        if "item.mean" not in theta or "item.count" not in theta:
            raise ExperimentError(
                "the model has no item means",
                got=", ".join(theta),
                fix="set model.name = 'pnbm', or another strategy",
            )

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        scale = self.config.scale
        start = theta["item.mean"].mean()
        if abs(float(start) - sum(scale) / 2) > 1e-3:
            raise ExperimentError(
                "the rating scales differ",
                expected=f"strategy.scale and model.scale alike ({list(scale)})",
                got=f"a model whose means start at {start:g}",
                fix="set both to the lowest and highest rating",
            )
        total = aggregate.total()
        sums = np.concatenate([total["item.mean"], total["item.count"]], axis=1)
        means = means_of(sums, self.config.damping, scale)
        return {**theta, "item.mean": means[:, None], "item.count": total["item.count"]}


class MeansStart(_FirstRound):
    """Start from item means: sums ratings in the first round."""

    name = "means-start"
    Config = MeansStartConfig
    first_phase = MEANS
    first_class = _Averaging


# Item popularity in the first round, by counts of likes; then another strategy.
#
#     [strategy]
#     name = "popularity-start"
#     main = { name = "reptile", server-lr = 1.0 }
#
# The items' biases become b_i = ln(max(share of the clients who like i, a floor)) (or the logarithm
# of what the share is to be expected to be, given its noise: `estimate`), so that the initial model
# ranks by popularity, and local adaptation only has to learn how a user differs from it. Under
# differential privacy the counts are a release of their own, phase `popularity`, charged to the
# same ledger; the logarithm is post-processing.
#
# Where this differs from the paper: PrivRec learns popularity by gradient descent, which needs many
# rounds under noise.

POPULARITY = "popularity"
_FLOOR = 0.001  # smallest assumed share of clients who like an item
_NOISE_FLOOR = 1.5  # the same in standard deviations of a share's noise


class PopularityStartConfig(_FirstRoundConfig):
    """Settings of the popularity start."""

    step: Annotated[Section, registry.STEP] = Section(name="counts")
    """Step of the clients in the first round."""
    estimate: Literal["floor", "posterior-mean"] = "floor"
    """Estimate of a share from a noisy one: itself, but at least 0.001 and 1.5 standard deviations
    of its noise; or its expected value under an exponential prior, at least half a client, which
    distinguishes rare items."""


class _Counting(CohortStrategy):
    """First round of `PopularityStart`: computes biases from the mean of the clients' counts."""

    config: PopularityStartConfig

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        counts = aggregate.total()[BIAS]
        clients = aggregate.clients
        noise = 0.0 if self.privacy is None else self.privacy.plan.mean_noise_std
        if self.config.estimate == "posterior-mean":
            return {**theta, BIAS: np.log(expected_counts(counts, noise * clients) / clients)}
        # smaller shares are mostly noise, which the logarithm would amplify
        floor = max(_FLOOR, _NOISE_FLOOR * noise)
        return {**theta, BIAS: np.log(np.maximum(counts / clients, floor))}


class PopularityStart(_FirstRound):
    """Start from popularity: counts likes in the first round."""

    name = "popularity-start"
    Config = PopularityStartConfig
    first_phase = POPULARITY
    first_class = _Counting


# Item factors from the sum of the clients' products in the first round; then another strategy.
#
#     [model]
#     name = "ials"
#     moments = true
#     products = true
#
#     [strategy]
#     name = "gram-start"
#     main = { name = "fed-als" }
#
# The Gram matrix G = X^T X of the interactions has the right singular vectors V and the squared
# singular values s^2 of X. With X = U s V^T, users' factors U sqrt(s) and items' factors V sqrt(s)
# are the best approximation of X of their width (PureSVD, Cremonesi et al. 2010), from which
# alternating least squares start instead of from random numbers, and need fewer rounds. Each client
# sends its products once (step `gram`), and the server needs their sum alone.
#
# Under differential privacy the sum is a release of its own, phase `products`, charged to the same
# ledger. Factors whose eigenvalue is below the noise edge start from random numbers as before.
#
# Where this differs from the papers: they start from random numbers, or solve centrally.

PRODUCTS = "products"


class GramStartConfig(_FirstRoundConfig):
    """Settings of the start from the sum of products."""

    step: ClassVar[Section] = Section(name="gram")
    main: Annotated[Section, registry.STRATEGY] = Section(name="fed-als")
    """Strategy of all rounds after the first; its clients run the experiment's step."""


class _Starting(ProductsStrategy):
    """First round of `GramStart`: computes item factors from the sum of the clients' products."""

    products = "item.products"
    model = "ials"

    def solved(self, theta: Mapping[str, np.ndarray], products: Products) -> dict[str, np.ndarray]:
        """Compute the items' factors, leading ones last, and their Gram matrix."""
        values, vectors = torch.linalg.eigh(products.gram)
        factors = np.array(theta[FACTORS], dtype=np.float64)
        count = min(int((values > products.edge).sum()), factors.shape[1])
        if count:
            start = vectors[:, -count:] * values[-count:] ** 0.25 / products.scale[:, None]
            factors[:, -count:] = start.numpy()
        return with_factors(dict(theta), factors)


class GramStart(_FirstRound):
    """Start from the Gram matrix: sums products in the first round."""

    name = "gram-start"
    Config = GramStartConfig
    paper = "PureSVD (Cremonesi et al. 2010) as the start of iALS (Hu et al. 2008)"
    first_phase = PRODUCTS
    first_class = _Starting
