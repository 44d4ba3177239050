# SPDX-License-Identifier: Apache-2.0
"""Early stopping on validation users; the run ends with the parameters of its best round (Prechelt
1998).

A metric of the validation users is evaluated after every round, in the same way as in the final
evaluation (with on-device fine-tuning if the experiment has it). Test users are never used, because
their metrics would be biased by the selection. Each checkpoint contains the best parameters so far,
so a resumed run selects the same round as an uninterrupted one. If the strategy has phases,
evaluations without improvement are counted in the last phase only, because the first phases need
not improve recommendations yet.

Under differential privacy a round that is not run is not charged. The selection costs training
users nothing: the parameters of every round were charged, and selecting one of them by other users'
metrics is post-processing. The metrics have no noise and are not charged; the report states whose
data this concerns.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from fedrec.config import did_you_mean
from fedrec.data.population import sample_clients
from fedrec.errors import ExperimentError
from fedrec.evaluation.tables import main_metric
from fedrec.experiment.phases import rounds_before_last_phase
from fedrec.experiment.schema import EarlyStoppingConfig, Experiment
from fedrec.protocol.serialization import zero_copy_arrays
from fedrec.runtime.ragged import strip_prefix
from server.checkpoint import RunExtension, State
from server.evaluation import Evaluator

NAME = "early-stopping"
_PARAMETERS = "parameters/"
_USERS = 1000  # most validation users that are evaluated


class EarlyStopping(RunExtension):
    """Evaluates validation users after each round, and saves the best parameters.

    Args:
        experiment: the resolved experiment, with `[early-stopping]`.
        config: that table.
        evaluator: the run's evaluator.

    Raises:
        ExperimentError: there are no validation users, or the metric is never evaluated.
    """

    name = NAME

    def __init__(
        self, experiment: Experiment, config: EarlyStoppingConfig, evaluator: Evaluator
    ) -> None:
        self.experiment = experiment
        self.config = config
        self.evaluator = evaluator
        self.metric = _watched_metric(evaluator, config)
        validated = evaluator.federation.roster.validated
        training = evaluator.federation.roster.training
        self._of_training = int(np.isin(validated, training).sum())
        _check_settings(experiment, evaluator, self._of_training)
        self.clients = sample_clients(validated, _USERS, experiment.seed)
        self._uncounted = rounds_before_last_phase(experiment)
        self._sign = -1.0 if evaluator.metrics.columns[self.metric][0].lower_is_better else 1.0
        self._best = math.nan
        self._round = 0
        self._waited = 0
        self._parameters: dict[str, np.ndarray] = {}

    def after_round(self, round_number: int, arrays: ArrayRecord) -> dict[str, float]:
        """Evaluate, and save the parameters if they are better; returns the validation metric."""
        evaluator = self.evaluator
        evaluated = evaluator.evaluate(arrays, round_number, self.clients, held_out="validation")
        value = evaluated.means(evaluator.metrics)[self.metric]
        if self._improves(value):
            self._best = value
            self._round = round_number
            self._waited = 0
            shared = zero_copy_arrays(arrays).items()
            self._parameters = {name: np.array(array) for name, array in shared}
        elif round_number > self._uncounted:
            self._waited += 1
        return {f"validation-{self.metric}": value}

    def why_stop(self, round_number: int) -> str:
        """Return the reason to stop if the metric has not improved for too long; else empty."""
        if self._waited < self.config.patience:
            return ""
        return (
            f"{self.metric} of validation users has not improved in {self._waited} evaluations"
            f" since round {self._round}: training stops"
        )

    def memory(self) -> dict[str, np.ndarray]:
        """Return the best value, its round and parameters, and the evaluations since then."""
        numbers = np.array([self._best, self._round, self._waited], dtype=np.float64)
        best = {f"{_PARAMETERS}{name}": value for name, value in self._parameters.items()}
        return {"numbers": numbers, **best}

    def restore(self, memory: dict[str, np.ndarray]) -> None:
        """Restore what `memory` returned."""
        best, number, waited = memory["numbers"].tolist()
        self._best = best
        self._round = int(number)
        self._waited = int(waited)
        self._parameters = strip_prefix(_PARAMETERS, memory)

    def report(self, rounds: int) -> dict[str, Any]:
        """Report the best round, its value, and the consequences for privacy."""
        return {
            "metric": self.metric,
            "best": self._best if math.isfinite(self._best) else None,
            "best-round": self._round or None,
            "rounds": rounds,
            "planned-rounds": self.experiment.rounds,
            "stopped": self._waited >= self.config.patience,
            "evaluations-since": self._waited,
            "validation-users": len(self.clients),
            "in words": self._words(rounds),
        }

    def _improves(self, value: float) -> bool:
        if math.isnan(value) or math.isnan(self._best):
            return not math.isnan(value)
        return self._sign * (value - self._best) > self.config.min_improvement

    def _words(self, rounds: int) -> list[str]:
        """Notes to report with epsilon; none without privacy."""
        privacy = self.experiment.privacy
        planned = self.experiment.rounds
        if privacy is None:
            return []
        stopped = (
            f"Early stopping: {rounds} of {planned} rounds were run, and these alone are charged."
            f" Noise was calibrated to {planned} rounds, so the guarantee for all of them holds."
        )
        whom = (
            f"{self._of_training} of them are training users too, so that the epsilon does not"
            " cover what these choices tell about them"
            if self._of_training
            else "no epsilon here covers them"
        )
        return [
            *([stopped] if rounds < planned else []),
            "The selected round is a charged release, and selecting it costs training users"
            f" nothing. The end of training and the selected round were determined by"
            f" {len(self.clients):,} validation users, without noise: that is not charged, and"
            f" {whom}.",
        ]


def ending(state: State) -> tuple[int, dict[str, np.ndarray]]:
    """Final round and parameters of a run: the best round with early stopping, else the last."""
    memory = strip_prefix(f"{NAME}:", state.strategy)
    best = strip_prefix(_PARAMETERS, memory)
    return (int(memory["numbers"][1]), best) if best else (state.round, state.parameters)


def _watched_metric(evaluator: Evaluator, config: EarlyStoppingConfig) -> str:
    known = list(evaluator.metrics.columns)
    metric = config.metric or main_metric(known) or ""
    if metric not in known:
        raise ExperimentError(
            f"unknown early-stopping metric {metric!r}",
            expected="one of " + ", ".join(known),
            fix=did_you_mean(metric, known),
        )
    return metric


def _check_settings(experiment: Experiment, evaluator: Evaluator, of_training: int) -> None:
    if evaluator.federation.untrusted:
        raise ExperimentError(
            "early stopping is unavailable with real clients",
            expected="an experiment without [early-stopping]",
            got="clients whose owners allow only a few evaluations (most-evaluations)",
            fix="set the number of rounds, chosen in a simulation",
        )
    asked = any("validation" in key and value for key, value in experiment.split.options.items())
    if not len(evaluator.federation.roster.validated):
        raise ExperimentError(
            "early stopping needs validation users; test users are never used",
            expected="a split that holds out validation rows",
            got="no validation user with a positive held-out row; held out are rows of users with"
            " at least two different items"
            if asked
            else f"split.name = {experiment.split.name!r} without any",
            fix="a larger share of validation rows, split.validation-role = 'held-out', data with"
            " more items per user, or an experiment without [early-stopping]"
            if asked
            else "--set split.validation-users=0.1, or --set split.validation=0.1 with split"
            " 'ratio'",
        )
    if experiment.hides_cohorts and of_training > 0:
        raise ExperimentError(
            "a release cannot be selected by noiseless metrics of its training users",
            expected="validation users who do not train, with privacy.mode = 'secure'",
            got=f"{of_training} validation users who train",
            fix="set split.name = 'user-holdout' with validation-users, or leave [early-stopping]"
            " out",
        )
