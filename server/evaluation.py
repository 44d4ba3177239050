# SPDX-License-Identifier: Apache-2.0
"""Evaluation of the global parameters on the clients, the same for every strategy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from flwr.app import ArrayRecord, Message, MessageType

from fedrec.components.registry import STEP, resolve
from fedrec.components.sections import Section
from fedrec.data.population import sample_clients
from fedrec.errors import ClientError, ExperimentError
from fedrec.evaluation.tables import Evaluated, Metrics
from fedrec.experiment.phases import step_table
from fedrec.experiment.schema import Experiment
from fedrec.protocol.messages import pack_order, unpack_table
from fedrec.protocol.orders import EvaluateOrder, HeldOutPart, Purpose
from fedrec.protocol.serialization import to_record, zero_copy_arrays
from server.deployed.validation import evaluated, of_usual_size
from server.exchange import request_items
from server.federation import Federation
from strategies.base import GeneratingStrategy

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
    """

    def __init__(
        self,
        experiment: Experiment,
        federation: Federation,
        generating: GeneratingStrategy | None = None,
    ) -> None:
        self.experiment = experiment
        self.federation = federation
        self.generating = generating
        self.metrics = Metrics(experiment.task, experiment.evaluation)

    def check_settings(self) -> None:
        """Check that the final evaluation can succeed.

        Raises:
            ExperimentError: no client has held-out rows, or the server generates parameters that
                would be fine-tuned, or does not know some clients.
        """
        evaluation = self.experiment.evaluation
        tuned = self.experiment.fine_tune_step()
        if getattr(resolve(STEP, tuned.name), "generated", False) and tuned.options["epochs"]:
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
            _check_known(self.sampled_clients(evaluation.final_users), roster.training)

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
        tuned = fine_tune and has_fine_tuning(self.experiment)
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


def has_fine_tuning(experiment: Experiment) -> bool:
    """True if held-out users fine-tune before they are tested."""
    return experiment.fine_tune_step().options["epochs"] > 0


def _check_known(clients: np.ndarray, training: np.ndarray) -> None:
    unknown = np.setdiff1d(clients, training)
    if len(unknown):
        raise ExperimentError(
            "the server has no parameters for some test users, as it generates them from the ids of"
            f" training users: {len(unknown)} of {len(clients)} do not train",
            fix="set split.name = 'ratio', 'leave-one-out' or 'kfold'",
        )
