# SPDX-License-Identifier: Apache-2.0
"""What a run needs before its first round: nodes, cohorts, strategy, evaluator, extensions."""

from __future__ import annotations

from dataclasses import dataclass

from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedrec.runs.folder import RunFolder
from server.central import refuse_central
from server.checkpoint import RunExtension, make_strategy
from server.cohort import SampledCohorts
from server.deployed.federation import federation_of
from server.early_stopping import early_stopping_of
from server.evaluation import Evaluator
from server.federation import Federation
from server.privacy.guard import guard_of
from server.privacy.personal_budgets import accounts_of
from strategies.base import GeneratingStrategy, refuse_non_additive, refuse_to_wait


@dataclass(frozen=True, eq=False)
class Setup:
    """The objects of a run.

    Attributes:
        federation: the nodes.
        cohorts: the cohort of each round.
        strategy: creates the messages of a round and aggregates the replies.
        evaluator: evaluates parameters on the nodes.
        extensions: called in each round, in this order.
    """

    federation: Federation
    cohorts: SampledCohorts
    strategy: Strategy
    evaluator: Evaluator
    extensions: tuple[RunExtension, ...]

    @classmethod
    def of(cls, run: RunFolder, grid: Grid) -> Setup:
        """The objects of a run folder's experiment, on the nodes of a grid.

        Raises:
            ExperimentError: they do not fit together.
            ClientError: too few nodes answered.
        """
        experiment = run.experiment
        refuse_central(experiment)
        federation = federation_of(run, grid)
        cohorts = SampledCohorts(experiment, federation.members, grid=grid)
        strategy = make_strategy(experiment, cohorts)
        if federation.secure is not None:
            refuse_non_additive(strategy)
        guards = (guard_of(run, strategy), accounts_of(run, strategy, cohorts))
        refuse_to_wait(strategy, len(federation.roster.nodes))
        late = federation.late_devices(strategy)
        if late is not None:
            cohorts.follow(late)
        generating = strategy if isinstance(strategy, GeneratingStrategy) else None
        roster = federation.roster
        untrusted = federation.untrusted
        evaluator = Evaluator(
            experiment,
            roster,
            grid,
            generating,
            untrusted=untrusted,
            dropped=federation.dropped,
        )
        evaluator.refuse_misfits()
        parts = (early_stopping_of(experiment, evaluator), *guards, federation.dropped, late)
        extensions = tuple(part for part in parts if part is not None)
        return cls(federation, cohorts, strategy, evaluator, extensions)
