# SPDX-License-Identifier: Apache-2.0
"""Evaluation of the global parameters on the clients, the same for every strategy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
from flwr.app import ArrayRecord, Message, MessageType
from flwr.serverapp import Grid

from fedrec.data.population import sample_clients
from fedrec.errors import ClientError, ExperimentError
from fedrec.experiment.schema import Experiment
from fedrec.experiment.sections import Section
from fedrec.metrics.groups import group_means
from fedrec.protocol.messages import GROUP, pack_evaluate, unpack_table
from fedrec.protocol.orders import EvaluateOrder, HeldOutPart, Purpose
from fedrec.protocol.zero_copy import to_record, zero_copy_arrays
from server.cohorts.roster import Roster
from server.deployed.reply_validation import evaluated, metrics_of, of_usual_size
from server.exchange.dropped_replies import DroppedReplies
from server.exchange.item_requests import request_items
from server.exchange.replies import answers
from strategies.base import GeneratingStrategy

log = logging.getLogger("fedrec")
# Clients per node and message; more without fine-tuning, where a client costs little and clients
# with equal features are scored once.
FINE_TUNED_WAVE = 64
SHARED_WAVE = 4096


class Evaluator:
    """Evaluates parameters on clients through a grid.

    Args:
        experiment: the resolved experiment.
        roster: the clients.
        grid: the grid that reaches them.
        generating: the strategy, where it generates the parameters of each client.
        untrusted: whether nodes' replies are validated first.
        dropped: records replies that are left out.
    """

    def __init__(
        self,
        experiment: Experiment,
        roster: Roster,
        grid: Grid,
        generating: GeneratingStrategy | None = None,
        *,
        untrusted: bool = False,
        dropped: DroppedReplies | None = None,
    ) -> None:
        self.experiment = experiment
        self.roster = roster
        self.grid = grid
        self.generating = generating
        self.untrusted = untrusted
        self.dropped = dropped or DroppedReplies()

    def sampled_clients(self, count: int | None) -> np.ndarray:
        """A fixed sample of the clients with held-out rows, `int64 [clients]`, ascending; None:
        all."""
        return sample_clients(self.roster.evaluated, count, self.experiment.seed)

    def evaluate(
        self,
        arrays: ArrayRecord,
        round_number: int,
        clients: np.ndarray,
        *,
        fine_tune: bool = True,
        held_out: HeldOutPart | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> pd.DataFrame:
        """One row of metrics (and group columns) per client, indexed by client id, ascending.

        Args:
            arrays: the global parameters.
            round_number: the round after which this is.
            clients: `int64 [clients]`, the clients to evaluate.
            fine_tune: whether each client first fine-tunes on its own data.
            held_out: which held-out rows are ranked; None: those that the experiment evaluates.
            progress: called with (clients done, all clients) after every wave of messages.

        Raises:
            ClientError: more nodes failed than the experiment tolerates, or no client could be
                evaluated.
            ExperimentError: the server generates parameters and does not know some of the clients.
        """
        step = self._step(fine_tune)
        own = self.generating is not None
        if own:
            _refuse_unknown(clients, self.roster.training)
        size = (
            FINE_TUNED_WAVE
            if own or (fine_tune and has_fine_tuning(self.experiment))
            else SHARED_WAVE
        )
        groups = [(node, _waves(part, size)) for node, part in self.roster.by_node(clients)]
        tables: list[pd.DataFrame] = []
        for wave in range(max((len(waves) for _, waves in groups), default=0)):
            orders = [(node, waves[wave]) for node, waves in groups if wave < len(waves)]
            tables += self._ask(arrays, round_number, orders, step, held_out)
            if progress is not None:
                progress(sum(len(table) for table in tables), len(clients))
        if not tables and self.untrusted and len(clients):
            log.warning(
                "no metrics after round %d: no owner allows more evaluations, or no node answered",
                round_number,
            )
            return pd.DataFrame(index=pd.Index([], name="client", dtype=np.int64))
        if not tables:
            raise ClientError(
                "nothing was evaluated",
                expected="clients with held-out rows",
                got="none",
                fix="hold out a larger share (see [split]), or lower positive-above",
            )
        return _joined(tables)

    def _ask(
        self,
        arrays: ArrayRecord,
        round_number: int,
        orders: list[tuple[int, np.ndarray]],
        step: Section,
        held_out: HeldOutPart | None,
    ) -> list[pd.DataFrame]:
        table = {"name": step.name, **step.options}
        engine = self.experiment.engine
        each = self.generating is not None
        sent = (
            self._generated(arrays, round_number, dict(orders), table, held_out)
            if each
            else {n: arrays for n, _ in orders}
        )
        messages = [
            Message(
                pack_evaluate(
                    sent[node], EvaluateOrder(round_number, clients, table, each, held_out)
                ),
                node,
                MessageType.EVALUATE,
            )
            for node, clients in orders
            if node in sent
        ]
        replies = self.grid.send_and_receive(messages, timeout=engine.timeout)
        nodes = [message.metadata.dst_node_id for message in messages]
        good = answers(replies, sent=nodes, max_failures=engine.max_failures, dropped=self.dropped)
        if not self.untrusted:
            return [unpack_table(reply.content) for reply in good]
        tables = list(self._that_count(good, dict(orders)))
        return [of_usual_size(pd.concat(tables))] if tables else []

    def _that_count(
        self, replies: list[Message], asked: dict[int, np.ndarray]
    ) -> Iterator[pd.DataFrame]:
        columns = metrics_of(self.experiment)
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                table = unpack_table(reply.content)
                found = evaluated(table, asked.pop(node), columns)  # a second reply is ignored
                if len(found):  # empty if the owners of all clients allow no more evaluations
                    yield found
            except Exception as error:  # untrusted input may be anything
                log.warning("node %d: its metrics are left out: %s", node, error)
                self.dropped.dropped(node, f"its metrics: {error}")

    def _generated(
        self,
        arrays: ArrayRecord,
        round_number: int,
        groups: dict[int, np.ndarray],
        step: dict[str, Any],
        held_out: HeldOutPart | None,
    ) -> dict[int, ArrayRecord]:
        """Generated parameters for each node's clients, for their held-out rows or for the whole
        catalogue."""
        theta = zero_copy_arrays(arrays)
        requests = {}
        if self.experiment.task == "rating":
            purpose: Purpose = "validate" if held_out == "validation" else "evaluate"
            requests = request_items(
                self.grid, self.experiment.engine, groups, round_number, purpose, step
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
    """Whether held-out users fine-tune before they are tested."""
    return experiment.fine_tune_step().options["epochs"] > 0


def metric_columns(table: pd.DataFrame) -> pd.DataFrame:
    """The columns that hold metrics, without those that hold groups."""
    return pd.DataFrame(
        table, columns=[column for column in table.columns if not column.startswith(GROUP)]
    )


def means(table: pd.DataFrame) -> dict[str, float]:
    """Means over users; errors of ratings are pooled over all rated rows instead, as is usual for
    MAE and RMSE.

    Empty without users.
    """
    if "rows" not in table:
        return {
            name: float(np.nanmean(table[name].to_numpy()))
            for name in metric_columns(table).columns
        }
    rows = table["rows"].to_numpy()
    mae = np.average(table["mae"].to_numpy(), weights=rows)
    rmse = np.sqrt(np.average(np.square(table["rmse"].to_numpy()), weights=rows))
    return {"mae": float(mae), "rmse": float(rmse)}


def grouped(table: pd.DataFrame) -> pd.DataFrame:
    """Means over each group of users, one row per group, sorted by name, because nodes reply in any
    order and know different groups."""
    columns = sorted(column for column in table if column.startswith(GROUP))
    members: dict[str, Any] = {
        column.removeprefix(GROUP): table[column].to_numpy() > 0 for column in columns
    }
    return group_means(metric_columns(table), members)


def _joined(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """All nodes' tables as one, ascending by client; a node without a member of a group has no
    column for it."""
    table = pd.concat(tables).sort_index()
    groups = [column for column in table.columns if column.startswith(GROUP)]
    table[groups] = table[groups].fillna(0.0)
    return table


def _refuse_unknown(clients: np.ndarray, training: np.ndarray) -> None:
    unknown = np.setdiff1d(clients, training)
    if len(unknown):
        raise ExperimentError(
            "the server has no parameters for some of the test users",
            expected=(
                "held-out rows of training users only, as parameters are generated from user ids"
            ),
            got=f"{len(unknown)} of {len(clients)} users who never train",
            fix="set split.name = 'ratio', 'leave-one-out' or 'kfold'",
        )


def _waves(clients: np.ndarray, size: int) -> list[np.ndarray]:
    return [clients[start : start + size] for start in range(0, len(clients), size)]
