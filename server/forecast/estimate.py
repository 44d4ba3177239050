# SPDX-License-Identifier: Apache-2.0
"""Estimate of a run's training time and memory, from a trial before it starts.

A node trains a few clients of the first cohort for one epoch, then more of them unless that takes
seconds, and the replies are discarded. The time of a round is that of the largest trial and, for
the rest of a node's share of the cohort, what the additional work took in the last two trials: a
message also costs a time that does not depend on the number of clients, such as that of a large
matrix. Evaluation and the server's own work are not included. There is no trial on nodes that do
not report their clients' work (real devices).
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, Message, MessageType
from flwr.serverapp import Grid

from fedrec.experiment.schema import Experiment
from fedrec.protocol.messages import pack_train
from fedrec.protocol.orders import TrainOrder
from fedrec.protocol.zero_copy import to_record
from server.cohorts.balance import balanced
from server.cohorts.roster import Roster

_TRIAL_CLIENTS = 8
_TOO_SHORT = 0.05  # seconds; of a shorter trial, messages take a large share
_LONG = 0.5  # seconds; a larger trial than that would delay the run
_MORE = 8  # times as many clients in the next trial


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of a run.

    Attributes:
        round_seconds: training of one round.
        seconds: training of all rounds.
        memory_gib: of the server and all nodes together.
    """

    round_seconds: float
    seconds: float
    memory_gib: float


def estimate(
    experiment: Experiment,
    roster: Roster,
    grid: Grid,
    parameters: Mapping[str, np.ndarray],
    cohort: np.ndarray,
) -> Estimate | None:
    """Run the trial.

    Args:
        experiment: the resolved experiment.
        roster: the clients.
        grid: reaches the nodes.
        parameters: the global parameters.
        cohort: `int64 [clients]`, the clients of a typical round.

    Returns:
        The estimate; None without clients or epochs, or if a node failed (the run itself then
        reports the error).
    """
    work = roster.work_of(cohort)
    epochs = experiment.step.options.get("epochs", 0)
    if work is None or not work.sum() or not epochs:
        return None
    record = to_record(parameters)
    trials = trial_seconds(
        work, lambda places: _trial(experiment, roster, grid, record, cohort[places])
    )
    if trials is None:
        return None
    slowest = max(work[share].sum() for share in balanced(work, len(roster.nodes)))
    a_round = epochs * extrapolated(trials, float(slowest))
    return Estimate(a_round, a_round * experiment.rounds, _memory(experiment, roster, parameters))


def trial_seconds(
    work: np.ndarray, run: Callable[[np.ndarray], float | None]
) -> list[tuple[float, float]] | None:
    """Work and seconds of trials with more and more clients of a cohort, the largest last.

    Args:
        work: `int64 [clients]`, each one's number of rows.
        run: seconds of one epoch of the clients at these places, `int64 [n]`; None: it failed.

    Returns:
        For `extrapolated`; None if a trial failed.
    """
    trials: list[tuple[float, float]] = []
    by_work = np.argsort(work, kind="stable")
    for trial, clients in enumerate(_sizes(len(work))):
        chosen = by_work[np.linspace(0, len(work) - 1, clients).astype(int)]
        seconds = run(chosen)
        if seconds is None:
            return None
        if trial == 0:  # it also imports modules and compiles
            continue
        trials.append((float(max(work[chosen].sum(), 1)), seconds))
        if seconds >= _LONG or seconds >= max(_TOO_SHORT, 2 * trials[0][1]):
            break
    return trials


def _sizes(cohort: int) -> Iterator[int]:
    """Numbers of clients of the trials, the first one twice; the last one is all."""
    clients = min(_TRIAL_CLIENTS, cohort)
    yield clients
    while clients < cohort:
        yield clients
        clients = min(_MORE * clients, cohort)
    yield clients


def extrapolated(trials: list[tuple[float, float]], work: float) -> float:
    """Seconds that an amount of work takes.

    Args:
        trials: work and seconds of each trial, the largest last.
        work: the amount, in the same unit.
    """
    largest, seconds = trials[-1]
    if work <= largest or len(trials) == 1 or trials[-2][0] >= largest:
        return seconds * work / largest
    before, shorter = trials[-2]
    rate = min(max(seconds - shorter, 0.0) / (largest - before), seconds / largest)
    return seconds + rate * (work - largest)


def trial_order(experiment: Experiment, clients: np.ndarray) -> TrainOrder:
    """The order of a trial: one epoch of the experiment's step, if it has epochs, of some clients
    `int64 [clients]`."""
    own = experiment.step
    once = {"epochs": 1} if "epochs" in own.options else {}
    return TrainOrder(0, clients, step={"name": own.name, **own.options, **once})


def _trial(
    experiment: Experiment,
    roster: Roster,
    grid: Grid,
    parameters: ArrayRecord,
    clients: np.ndarray,
) -> float | None:
    """Seconds that a node takes for one epoch of some clients, `int64 [clients]`; None: it
    failed."""
    content = pack_train(parameters, trial_order(experiment, clients))
    started = time.perf_counter()
    message = Message(content, roster.nodes[0], MessageType.TRAIN)
    replies = list(grid.send_and_receive([message], timeout=experiment.engine.timeout))
    if not replies or replies[0].has_error():
        return None
    return time.perf_counter() - started


def _memory(experiment: Experiment, roster: Roster, parameters: Mapping[str, np.ndarray]) -> float:
    """GiB: present memory of server and nodes, what the nodes may use for blocks, and the server
    for a checkpoint."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    nodes = sum(presence.memory_mib for presence in roster.presences) / 2**10
    if experiment.engine.name == "serial":
        nodes = 0.0  # the nodes are in this process
    return own + nodes + sum(value.nbytes for value in parameters.values()) / 2**30
