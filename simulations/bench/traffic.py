# SPDX-License-Identifier: Apache-2.0
"""Bytes that a device receives and sends in training.

A few rounds of the same experiment with one client each, on a grid that counts the arrays in the
messages to and from its node: the shared parameters down, and what is sent of an update up, of item
tables the changed rows alone. Times the rounds that a client of the whole run is in.

Messages that are not about training (who is there, evaluation) and the names and settings in a
message, some hundred bytes, do not count. Noise and clip do not change sizes, so the rounds are
without `[privacy]`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from flwr.app import Message, MessageType

from fedrec.data.cache import POPULATIONS
from fedrec.experiment.schema import Experiment
from fedrec.protocol.zero_copy import zero_copy_arrays
from fedrec.runs.folder import RunFolder
from fedrec.runs.result import Result
from server.run import execute
from simulations.engines.serial import SerialGrid, open_grid
from simulations.runner import settle

_ROUNDS = 3  # of one client each, from which the mean is taken
_COUNTED = (MessageType.TRAIN, f"{MessageType.QUERY}.items")


class Traffic(NamedTuple):
    """Mean over the clients of a run.

    Attributes:
        up: bytes that a client sends in all rounds.
        down: bytes that it receives.
    """

    up: float
    down: float


class CountingGrid(SerialGrid):
    """Adds up the bytes of arrays in messages about training."""

    up = 0
    down = 0

    def _submit(self, batch: list[Message]) -> None:
        counted = [one for one in batch if one.metadata.message_type in _COUNTED]
        self.down += sum(map(_bytes, counted))
        super()._submit(batch)
        self.up += sum(_bytes(self._replies[one.metadata.message_id]) for one in counted)


def traffic(result: Result, folder: Path) -> Traffic:
    """Bytes of a client of a finished run.

    Args:
        result: of the run.
        folder: for a few rounds more; removed afterwards.
    """
    small = _of_one_client(result.experiment)
    shutil.rmtree(folder, ignore_errors=True)
    run = RunFolder.create(settle(small), folder)
    with open_grid(run, CountingGrid) as grid:
        execute(run, grid)
    shutil.rmtree(folder)
    clients = float(result.rounds["num-clients"].to_numpy().sum())
    per_round = clients / _training_clients(result.experiment) / small.rounds
    return Traffic(round(grid.up * per_round), round(grid.down * per_round))


def _of_one_client(experiment: Experiment) -> Experiment:
    table = experiment.table()
    table.pop("privacy", None)
    table["sampler"] = {"name": "fixed-size", "cohort": 1}
    table["rounds"] = min(experiment.rounds, _ROUNDS)
    table["evaluation"] |= {"every": 0, "final-users": 1, "baselines": []}
    table["engine"] |= {"name": "serial", "nodes": 1}
    return Experiment.parse(table)


def _training_clients(experiment: Experiment) -> int:
    return len(POPULATIONS.population(experiment).training_clients)


def _bytes(message: Message) -> int:
    if not message.has_content():
        return 0
    records = message.content.array_records.values()
    return sum(one.nbytes for record in records for one in zero_copy_arrays(record).values())
