# SPDX-License-Identifier: Apache-2.0
"""Evaluation of the global parameters on the clients, the same for every strategy, and early
stopping on validation users."""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MessageType

from fedrec.components.registry import STEP, resolve
from fedrec.components.sections import Section
from fedrec.config import did_you_mean
from fedrec.data.population import sample_clients
from fedrec.errors import ClientError, ExperimentError
from fedrec.evaluation.tables import Evaluated, Metrics, main_metric
from fedrec.experiment.phases import rounds_before_last_phase, step_table
from fedrec.experiment.schema import EarlyStoppingConfig, Experiment
from fedrec.protocol.messages import EvaluateOrder, HeldOutPart, Purpose, pack_order, unpack_table
from fedrec.protocol.serialization import to_record, zero_copy_arrays
from fedrec.runtime.ragged import strip_prefix
from server.checkpoint import RunExtension, State
from server.deployed.validation import evaluated, of_usual_size
from server.federation import Federation
from server.nodes import request_items
from strategies.per_client import MetaMfStrategy

log = logging.getLogger("fedrec")
# Clients per node and message; more without fine-tuning, where a client costs little and clients
# with equal features are scored once.
FINE_TUNED_WAVE = 64
SHARED_WAVE = 4096


class Evaluator:
    """Evaluator of parameters on the clients of a federation.

    Args:
        experiment: the resolved experiment.
        federation: the nodes and their clients.
        generating: the strategy, if it generates the parameters of each client.

    Raises:
        ExperimentError: no client has held-out rows, or the server generates parameters that would
            be fine-tuned, or does not know some clients.
    """

    def __init__(
        self,
        experiment: Experiment,
        federation: Federation,
        generating: MetaMfStrategy | None = None,
    ) -> None:
        self.experiment = experiment
        self.federation = federation
        self.generating = generating
        self.metrics = Metrics(experiment.task, experiment.evaluation)
        self.fine_tunes = experiment.fine_tune_step().options["epochs"] > 0
        """True if held-out users fine-tune before they are tested."""
        self._check_settings()

    def _check_settings(self) -> None:
        """Check that the final evaluation can succeed."""
        evaluation = self.experiment.evaluation
        tuned = self.experiment.fine_tune_step()
        if getattr(resolve(STEP, tuned.name), "generated", False) and self.fine_tunes:
            raise ExperimentError(
                f"parameters that the server generates for step {tuned.name!r} cannot be fine-tuned"
                " on the device",
                expected="epochs = 0 in evaluation.fine-tune",
                fix="--set evaluation.fine-tune={epochs=0}",
            )
        roster = self.federation.roster
        if not len(roster.evaluated) and not self.federation.untrusted:
            raise ExperimentError(
                f"no client has rows of evaluation.held-out = {evaluation.held_out!r}",
                expected="clients with held-out rows",
                fix="hold out a larger share (see [split]), or lower positive-above",
            )
        if self.generating is not None:
            clients = self.sampled_clients(evaluation.final_users)
            unknown = np.setdiff1d(clients, roster.training)
            if len(unknown):
                raise ExperimentError(
                    "the server has no parameters for some test users, as it generates them from"
                    f" the ids of training users: {len(unknown)} of {len(clients)} do not train",
                    fix="set split.name = 'ratio', 'leave-one-out' or 'kfold'",
                )

    def sampled_clients(self, count: int | None) -> np.ndarray:
        """Draw a fixed sample of `count` clients with held-out rows, `int64 [clients]`, ascending;
        None: all."""
        return sample_clients(self.federation.roster.evaluated, count, self.experiment.seed)

    def evaluate(
        self,
        arrays: ArrayRecord,
        round_number: int,
        clients: np.ndarray,
        *,
        fine_tune: bool = True,
        held_out: HeldOutPart | None = None,
        sums: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Evaluated:
        """Evaluate clients; returns their metrics, ascending by client id.

        Args:
            arrays: the global parameters.
            round_number: the round after which this is.
            clients: `int64 [clients]`, the clients to evaluate.
            fine_tune: whether each client first fine-tunes on its own data.
            held_out: held-out rows to rank; None: those that the experiment evaluates.
            sums: whether to compute the list metrics, too; real clients send no sums.
            progress: called with (clients done, all clients) after every wave of messages.

        Raises:
            ClientError: more nodes failed than the experiment tolerates, or no client could be
                evaluated.
        """
        step = self._step(fine_tune)
        each = self.generating is not None
        untrusted = self.federation.untrusted
        order = EvaluateOrder(
            round_number, None, step_table(step), each, held_out, sums and not untrusted
        )
        tuned = fine_tune and self.fine_tunes
        size = FINE_TUNED_WAVE if each or tuned else SHARED_WAVE
        groups = list(self.federation.roster.by_node(clients))
        parts: list[Evaluated] = []
        for start in range(0, max((len(group) for _, group in groups), default=0), size):
            wave = {n: part[start : start + size] for n, part in groups if start < len(part)}
            parts += self._answers(arrays, order, wave)
            if progress is not None:
                progress(sum(map(len, parts)), len(clients))
        evaluated = Evaluated.joined(parts)
        if not len(evaluated) and untrusted and len(clients):
            log.warning(
                "no metrics after round %d: no owner allows more evaluations, or no node replied",
                round_number,
            )
        elif not len(evaluated):
            raise ClientError(
                "no client was evaluated",
                expected="clients with held-out rows",
                fix="hold out a larger share (see [split]), or lower positive-above",
            )
        return evaluated

    def _answers(
        self, arrays: ArrayRecord, order: EvaluateOrder, groups: dict[int, np.ndarray]
    ) -> list[Evaluated]:
        sent = (
            self._generated(arrays, order, groups) if order.each else dict.fromkeys(groups, arrays)
        )
        replies = self.federation.ask(
            [
                Message(
                    pack_order(replace(order, clients=groups[node]), parameters),
                    node,
                    MessageType.EVALUATE,
                )
                for node, parameters in sent.items()
            ]
        )
        if not self.federation.untrusted:
            # in a fixed order, because sums depend on it
            contents = [m.content for m in sorted(replies, key=lambda m: m.metadata.src_node_id)]
            return [Evaluated(*unpack_table(table)) for table in contents]
        tables = list(self._valid(replies, groups))
        if not tables:
            return []
        table = of_usual_size(Evaluated.joined(tables).table, self.metrics.ranges)
        return [Evaluated.of_table(table)]

    def _valid(self, replies: list[Message], groups: dict[int, np.ndarray]) -> Iterator[Evaluated]:
        ranges = self.metrics.ranges
        asked = dict(groups)
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                clients, columns, _ = unpack_table(reply.content)
                answer = Evaluated(clients, columns)
                evaluated(answer.table, asked.pop(node), ranges)  # a second reply is ignored
                if len(answer):  # empty if the owners of all clients allow no more evaluations
                    yield answer
            except Exception as error:  # untrusted input may be anything
                log.warning("node %d: its metrics are dropped: %s", node, error)
                self.federation.dropped.dropped(node, f"its metrics: {error}")

    def _generated(
        self, arrays: ArrayRecord, order: EvaluateOrder, groups: dict[int, np.ndarray]
    ) -> dict[int, ArrayRecord]:
        """Generate parameters for each node's clients, for their held-out rows or the whole
        catalogue."""
        theta = zero_copy_arrays(arrays)
        requests = {}
        if self.experiment.task == "rating":
            purpose: Purpose = "validate" if order.held_out == "validation" else "evaluate"
            requests = request_items(
                self.federation.grid,
                self.experiment.engine,
                groups,
                order.round,
                purpose,
                order.step or {},
            )
            groups = {node: groups[node] for node in requests}
        generate = self.generating.generate  # type: ignore[union-attr]
        return {
            node: to_record(generate(theta, clients, requests.get(node)).arrays())
            for node, clients in groups.items()
        }

    def _step(self, fine_tune: bool) -> Section:
        step = self.experiment.fine_tune_step()
        return (
            step
            if fine_tune
            else Section.model_validate({"name": step.name, **step.options, "epochs": 0})
        )


# Early stopping on validation users; the run ends with the parameters of its best round (Prechelt
# 1998).
#
# A metric of the validation users is evaluated after every round, in the same way as in the final
# evaluation (with on-device fine-tuning if the experiment has it). Test users are never used,
# because their metrics would be biased by the selection. Each checkpoint contains the best
# parameters so far, so a resumed run selects the same round as an uninterrupted one. If the
# strategy has phases, evaluations without improvement are counted in the last phase only, because
# the first phases need not improve recommendations yet.
#
# Under differential privacy a round that is not run is not charged. The selection costs training
# users nothing: the parameters of every round were charged, and selecting one of them by other
# users' metrics is post-processing. The metrics have no noise and are not charged; the report
# states whose data this concerns.

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
