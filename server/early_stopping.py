# SPDX-License-Identifier: Apache-2.0
"""Training that ends when validation users gain no more; the run then has the parameters of its
best round (Prechelt 1998).

After every so many rounds a metric of validation users is measured, as in the last evaluation
(with on-device fine-tuning where the experiment has it). Test users are never looked at: their
metrics would no longer measure what was picked by them. The best parameters so far are in each
checkpoint, so a resumed run keeps and ends as an unbroken one would. Where the strategy has phases,
evaluations without improvement are counted in the last one only: what a first phase learns need not
show in recommendations yet.

Under differential privacy a round that is not run is not charged. Training users pay for nothing
else: the parameters of every round are releases that were charged, and to pick one of them by other
users' metrics is post-processing. The metrics have no noise and are not charged; the report says
whom that concerns.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from fedrec.config import did_you_mean
from fedrec.data.population import sample_clients
from fedrec.errors import ExperimentError
from fedrec.experiment.early_stopping import EarlyStoppingConfig
from fedrec.experiment.phases import rounds_before_last_phase
from fedrec.experiment.schema import Experiment
from fedrec.prefixes import under
from fedrec.protocol.zero_copy import zero_copy_arrays
from fedrec.report.table import lower_is_better
from server.checkpoint import State
from server.deployed.reply_validation import ROWS, metrics_of
from server.evaluation import Evaluator, means
from server.extension import RunExtension

NAME = "early-stopping"
_PARAMETERS = "parameters/"


class EarlyStopping(RunExtension):
    """Watches validation users, and remembers the best parameters.

    Args:
        experiment: the resolved experiment, with `[early-stopping]`.
        config: that table.
        evaluator: of the run.

    Raises:
        ExperimentError: there are no validation users, or nothing could be watched.
    """

    name = NAME

    def __init__(
        self, experiment: Experiment, config: EarlyStoppingConfig, evaluator: Evaluator
    ) -> None:
        self.experiment, self.config, self.evaluator = experiment, config, evaluator
        self.metric = _watched_metric(experiment, config)
        validated, training = evaluator.roster.validated, evaluator.roster.training
        self._of_training = int(np.isin(validated, training).sum())
        _refuse_what_does_not_fit(experiment, config, evaluator, self._of_training)
        self.clients = sample_clients(validated, config.users, experiment.seed)
        self._uncounted = rounds_before_last_phase(experiment)
        self._sign = -1.0 if lower_is_better(self.metric) else 1.0
        self._best, self._round, self._waited = math.nan, 0, 0
        self._parameters: dict[str, np.ndarray] = {}
        self._last: dict[str, float] = {}

    def after_training(self, round_number: int, arrays: ArrayRecord) -> None:
        """Evaluate, where an evaluation is due, and remember parameters that are better."""
        self._last = {}
        if round_number % self.config.every:
            return
        table = self.evaluator.evaluate(arrays, round_number, self.clients, held_out="validation")
        value = float(means(table)[self.metric])
        self._last = {f"validation-{self.metric}": value}
        if self._improves(value):
            self._best, self._round, self._waited = value, round_number, 0
            found = zero_copy_arrays(arrays).items()
            self._parameters = {name: np.array(array) for name, array in found}
        elif round_number > self._uncounted:
            self._waited += 1

    def why_stop(self, round_number: int) -> str:
        """Whether validation users have gained nothing for too long."""
        if self._waited < self.config.patience:
            return ""
        return (
            f"{self.metric} of validation users has not improved in {self._waited} evaluations"
            f" since round {self._round}: training ends"
        )

    def columns(self) -> dict[str, float]:
        """The metric that was watched, in rounds with an evaluation."""
        return self._last

    def memory(self) -> dict[str, np.ndarray]:
        """The best value, its round and parameters, and the evaluations since then."""
        numbers = np.array([self._best, self._round, self._waited], dtype=np.float64)
        best = {f"{_PARAMETERS}{name}": value for name, value in self._parameters.items()}
        return {"numbers": numbers, **best}

    def restore(self, memory: dict[str, np.ndarray]) -> None:
        """Take back what `memory` gave."""
        best, number, waited = memory["numbers"].tolist()
        self._best, self._round, self._waited = best, int(number), int(waited)
        self._parameters = under(_PARAMETERS, memory)

    def close(self, rounds: int) -> tuple[list[str], dict[str, Any]]:
        """Best round, its value, and what stopping early means for privacy."""
        said = self._words(rounds)
        return said, {
            "metric": self.metric,
            "best": self._best if math.isfinite(self._best) else None,
            "best-round": self._round or None,
            "rounds": rounds,
            "planned-rounds": self.experiment.rounds,
            "stopped": self._waited >= self.config.patience,
            "evaluations-since": self._waited,
            "validation-users": len(self.clients),
            "in words": said,
        }

    def _improves(self, value: float) -> bool:
        if math.isnan(value) or math.isnan(self._best):
            return not math.isnan(value)
        return self._sign * (value - self._best) > self.config.min_improvement

    def _words(self, rounds: int) -> list[str]:
        """What has to stand beside an epsilon; nothing without one."""
        privacy, planned = self.experiment.privacy, self.experiment.rounds
        if privacy is None:
            return []
        said = []
        if rounds < planned:
            said.append(
                f"Early stopping: {rounds} of {planned} rounds were run, and these alone are"
                f" charged. Noise was set for {planned} rounds, so what was promised for all of"
                " them holds."
            )
        whom = (
            f"{self._of_training} of them are training users too, so that the epsilon does not"
            " cover what these choices tell about them"
            if self._of_training
            else "no epsilon here is about them"
        )
        return [
            *said,
            "The kept round is one of the charged releases, and picking it costs training users"
            f" nothing. When training ended and which round was kept was decided by"
            f" {len(self.clients):,} validation users, without noise: that is not charged, and"
            f" {whom}.",
        ]


def early_stopping_of(experiment: Experiment, evaluator: Evaluator) -> EarlyStopping | None:
    """What ends the training of a run early; None without an `[early-stopping]` table.

    Raises:
        ExperimentError: see `EarlyStopping`.
    """
    config = experiment.early_stopping
    return None if config is None else EarlyStopping(experiment, config, evaluator)


def ending(state: State) -> tuple[int, dict[str, np.ndarray]]:
    """Round and parameters that a run ends with after a state: of its best round where validation
    users were watched, else of its last."""
    memory = under(f"{NAME}:", state.strategy)
    best = under(_PARAMETERS, memory)
    return (int(memory["numbers"][1]), best) if best else (state.round, state.parameters)


def _watched_metric(experiment: Experiment, config: EarlyStoppingConfig) -> str:
    known = [name for name in metrics_of(experiment) if name != ROWS]
    hits = [name for name in known if name.startswith("hits@")]
    usual = "rmse" if "rmse" in known else "hits@10" if "hits@10" in hits else hits[0]
    metric = config.metric or usual
    if metric not in known:
        raise ExperimentError(
            f"validation users have no metric {metric!r} that could be watched",
            expected="one of " + ", ".join(known),
            got=f"early-stopping.metric = {metric!r}",
            fix=did_you_mean(metric, known),
        )
    return metric


def _refuse_what_does_not_fit(
    experiment: Experiment, config: EarlyStoppingConfig, evaluator: Evaluator, of_training: int
) -> None:
    privacy = experiment.privacy
    secure = privacy is not None and privacy.mode == "secure"
    rules = [
        (
            evaluator.untrusted,
            "early stopping is not available on real clients",
            "an experiment without [early-stopping]",
            "users whose owners allow a few evaluations (most-evaluations)",
            "set rounds, chosen in a simulation",
        ),
        (
            not len(evaluator.roster.validated),
            "there are no validation users to end training by, and test users are never watched",
            "a split that holds out validation rows",
            f"split.name = {experiment.split.name!r} without any",
            "--set split.validation-users=0.1, or --set split.validation=0.1 with split 'ratio'",
        ),
        (
            config.every > experiment.rounds,
            "early stopping would never look",
            f"early-stopping.every of at most rounds = {experiment.rounds}",
            f"early-stopping.every = {config.every}",
            "look more often",
        ),
        (
            secure and of_training > 0,
            "a release cannot be chosen by its training users without noise",
            "validation users who do not train, with privacy.mode = 'secure'",
            f"{of_training} validation users who train",
            "set split.name = 'user-holdout' with validation-users, or leave [early-stopping] out",
        ),
    ]
    for broken, problem, expected, got, fix in rules:
        if broken:
            raise ExperimentError(problem, expected=expected, got=got, fix=fix)
