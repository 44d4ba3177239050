# SPDX-License-Identifier: Apache-2.0
"""Evaluation of the global parameters on the clients, the same for every strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from flwr.app import ArrayRecord, Message, MessageType
from flwr.serverapp import Grid

from fedrec import wire
from fedrec.data.population import sample_clients
from fedrec.errors import ClientError
from fedrec.experiment import Experiment, Section
from fedrec.metrics.groups import group_means
from fedrec.wire import GROUP
from server.replies import answers
from server.roster import Roster

FINE_TUNED_WAVE = 64  # clients per node and message, so that progress is seen and a message stays short
SHARED_WAVE = 4096  # without fine-tuning a client costs little, and clients with equal features are scored once


class Evaluator:
    """Evaluates parameters on clients through a grid.

    Args:
        experiment: the resolved experiment.
        roster: the clients.
        grid: the grid that reaches them.
    """

    def __init__(self, experiment: Experiment, roster: Roster, grid: Grid) -> None:
        self.experiment, self.roster, self.grid = experiment, roster, grid

    def sampled_clients(self, count: int | None) -> np.ndarray:
        """So many of the clients with held-out rows, the same ones each time, `int64`, ascending; None takes all."""
        return sample_clients(self.roster.evaluated, count, self.experiment.seed)

    def evaluate(
        self,
        arrays: ArrayRecord,
        round_number: int,
        clients: np.ndarray,
        *,
        fine_tune: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> pd.DataFrame:
        """One row of metrics (and group columns) per client, indexed by client id, ascending.

        Args:
            arrays: the global parameters.
            round_number: the round after which this is.
            clients: `int64`, the clients to evaluate.
            fine_tune: whether each client first fine-tunes on its own data.
            progress: told (clients done, clients in all) after every wave of messages.

        Raises:
            ClientError: more nodes failed than the experiment tolerates, or no client could be evaluated.
        """
        step = self._step(fine_tune)
        size = FINE_TUNED_WAVE if fine_tune and has_fine_tuning(self.experiment) else SHARED_WAVE
        groups = [(node, _waves(part, size)) for node, part in self.roster.by_node(clients)]
        tables: list[pd.DataFrame] = []
        for wave in range(max((len(waves) for _, waves in groups), default=0)):
            orders = [(node, waves[wave]) for node, waves in groups if wave < len(waves)]
            tables += self._ask(arrays, round_number, orders, step)
            if progress is not None:
                progress(sum(len(table) for table in tables), len(clients))
        if not tables:
            raise ClientError(
                "nothing was evaluated",
                expected="clients with held-out rows",
                got="none",
                fix="hold out a larger share (see [split]), or lower positive-above",
            )
        return _joined(tables)

    def _ask(
        self, arrays: ArrayRecord, round_number: int, orders: list[tuple[int, np.ndarray]], step: Section
    ) -> list[pd.DataFrame]:
        table = {"name": step.name, **step.options}
        messages = [
            Message(
                wire.pack_evaluate(arrays, wire.EvaluateOrder(round_number, clients, table)), node, MessageType.EVALUATE
            )
            for node, clients in orders
        ]
        engine = self.experiment.engine
        replies = self.grid.send_and_receive(messages, timeout=engine.timeout)
        good = answers(replies, sent=len(messages), max_failures=engine.max_failures)
        return [wire.unpack_table(reply.content) for reply in good]

    def _step(self, fine_tune: bool) -> Section:
        step = self.experiment.fine_tune_step()
        return step if fine_tune else Section.model_validate({"name": step.name, **step.options, "epochs": 0})


def has_fine_tuning(experiment: Experiment) -> bool:
    """Whether held-out users fine-tune before they are tested."""
    return experiment.fine_tune_step().options["epochs"] > 0


def metric_columns(table: pd.DataFrame) -> pd.DataFrame:
    """The columns that hold metrics, without those that hold groups."""
    return pd.DataFrame(table, columns=[column for column in table.columns if not column.startswith(GROUP)])


def means(table: pd.DataFrame) -> dict[str, float]:
    """Means over users; errors of ratings are pooled over all rated rows instead, as is usual for MAE and RMSE."""
    if "rows" not in table:
        return {name: float(np.nanmean(table[name].to_numpy())) for name in metric_columns(table).columns}
    rows = table["rows"].to_numpy()
    mae = np.average(table["mae"].to_numpy(), weights=rows)
    rmse = np.sqrt(np.average(np.square(table["rmse"].to_numpy()), weights=rows))
    return {"mae": float(mae), "rmse": float(rmse)}


def grouped(table: pd.DataFrame) -> pd.DataFrame:
    """Means over each group of users, one row per group, by name: nodes answer in any order and know other groups."""
    columns = sorted(column for column in table if column.startswith(GROUP))
    members: dict[str, Any] = {column.removeprefix(GROUP): table[column].to_numpy() > 0 for column in columns}
    return group_means(metric_columns(table), members)


def _joined(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """All nodes' tables as one, ascending by client; a node that has no member of a group does not name that group."""
    table = pd.concat(tables).sort_index()
    groups = [column for column in table.columns if column.startswith(GROUP)]
    table[groups] = table[groups].fillna(0.0)
    return table


def _waves(clients: np.ndarray, size: int) -> list[np.ndarray]:
    return [clients[start : start + size] for start in range(0, len(clients), size)]
