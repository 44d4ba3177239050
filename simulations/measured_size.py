# SPDX-License-Identifier: Apache-2.0
"""Number of nodes on this machine and of threads of each, chosen by a measurement before a run.

A local Ray and its processes take seconds to start and memory, each node adds a message to a round,
and a round lasts until the client with the most rows is trained. So many nodes are not always
faster: a short run is over before they are there, and a small cohort keeps few of them busy.
Clients of the first cohort are trained in this process, as for the estimate of a run's time
(`server.forecast.estimate`), and the run has as few nodes as are at most a twentieth slower than
the best number. Where cores are left over, nodes have more threads if that trains a fourth faster.
All rounds are taken for rounds of the experiment's own step, and of evaluations the fine-tuning of
the last one alone counts.

Only sums of the clients' updates are the same for all numbers of nodes, up to their last digits. A
run that sets `engine.nodes` to what was chosen, as its run folder does, has the same digits too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from clients.hosting.node import Node
from clients.training.round import train_clients
from fedrec.components.registry import STRATEGY, ours, resolve
from fedrec.experiment.schema import Experiment
from fedrec.experiment.tables import EngineConfig
from server.cohorts.selection import SampledCohorts
from server.forecast.estimate import extrapolated, trial_order, trial_seconds
from server.forecast.training_paths import compile_ahead
from strategies.base import CohortStrategy

log = logging.getLogger("fedrec")
# seconds until a local Ray and its nodes are there; 1.9 to 4 where it was measured
_START = 2.5
_MESSAGE = 0.003  # seconds of the server for each further node in a round
_WORSE = 1.05  # times the least time that fewer nodes may take
_SEVERAL = 64  # clients that are trained to compare threads
_FASTER = 0.8  # share of the time of one thread that several must stay below


@dataclass(frozen=True)
class MeasuredSize:
    """Nodes of a run, and CPU threads of each.

    Attributes:
        nodes: number of nodes.
        threads: number of threads.
        seconds: what training is estimated to take with 1, 2, ... nodes, start of Ray included.
    """

    nodes: int
    threads: int
    seconds: tuple[float, ...]

    def __str__(self) -> str:
        least = self.seconds[self.nodes - 1]
        most = len(self.seconds)
        others = f", {self.seconds[-1]:.0f} s with {most}" if self.nodes < most else ""
        return f"engine: nodes = {self.nodes} (training takes about {least:.0f} s{others})"


def measured_size(
    experiment: Experiment, cores: int, tell: Callable[[str], None] = lambda text: None
) -> MeasuredSize | None:
    """The nodes and threads that train fastest on some cores of this machine.

    Args:
        experiment: the resolved experiment.
        cores: number of cores.
        tell: prints a line for the user before something is compiled.

    Returns:
        None if the number of nodes is not free: there is one core or a cluster, or results depend
        on the nodes, or clients belong to them; or if the trial failed, which the run reports.
    """
    if cores == 1 or not _is_free(experiment):
        return None
    try:
        with _trial_node(experiment) as node:
            compile_ahead(node.paths.items(), node.paths, tell)
            found = _measured(node, cores)
    except Exception:  # also of a plug-in; the run, which does the same work, reports it
        log.debug("the trial for the number of nodes failed", exc_info=True)
        return None
    if not len(found["seconds"]):
        return None
    nodes, threads = found["size"].tolist()
    return MeasuredSize(nodes, threads, tuple(found["seconds"].tolist()))


def _is_free(experiment: Experiment) -> bool:
    """Whether the number of nodes changes results in their last digits alone, and is ours."""
    engine = experiment.engine
    here = engine.name == "ray" and engine.ray_address is None and engine.nodes is None
    if not here or not experiment.federated or experiment.secure_aggregation:
        return False
    if experiment.hides_cohorts:  # times of clients are neither kept nor printed
        return False
    strategy = resolve(STRATEGY, experiment.strategy.name)
    return ours(STRATEGY, strategy) and issubclass(strategy, CohortStrategy)


@contextmanager
def _trial_node(experiment: Experiment) -> Iterator[Node]:
    """A node in this process that hosts all clients, with one thread; what it keeps is removed."""
    own = EngineConfig.parse({**experiment.engine.table(), "threads": 1}, at="engine")
    threads = torch.get_num_threads()
    try:
        with TemporaryDirectory() as folder:
            yield Node(experiment.model_copy(update={"engine": own}), 0, 1, Path(folder))
    finally:
        torch.set_num_threads(threads)


def _measured(node: Node, cores: int) -> dict[str, np.ndarray]:
    """Numbers of nodes and threads, and seconds of training with 1 to `cores` nodes; nothing if
    clients belong to nodes."""
    nothing = {"size": np.zeros(0, dtype=np.int64), "seconds": np.zeros(0)}
    if node.device.type != "cpu" or node.work is None:
        return nothing
    cohort = SampledCohorts.without_nodes(node.experiment, node.training).sample(1)
    work = node.population.learned_counts(cohort)
    if not work.sum():
        return nothing
    epoch = _epoch_of(node, cohort)
    trials = trial_seconds(work, epoch) or []
    seconds = _whole_seconds(node, trials, work, np.arange(1, cores + 1))
    nodes = int(np.flatnonzero(seconds <= _WORSE * seconds.min())[0]) + 1
    in_kernel = node.path(node.step(node.experiment.step)).name == "kernel"  # which has one thread
    threads = 1 if in_kernel else _faster(epoch, len(work), cores // nodes)
    return {"size": np.array([nodes, threads]), "seconds": seconds}


def _epoch_of(node: Node, cohort: np.ndarray) -> Callable[[np.ndarray], float]:
    """Trains clients at some places of the cohort for one epoch, and returns its seconds."""
    parameters = {name: value.numpy() for name, value in node.initial().items()}

    def run(places: np.ndarray) -> float:
        started = time.perf_counter()
        train_clients(node, parameters, trial_order(node.experiment, np.sort(cohort[places])))
        return time.perf_counter() - started

    return run


def _whole_seconds(
    node: Node, trials: list[tuple[float, float]], work: np.ndarray, nodes: np.ndarray
) -> np.ndarray:
    """Seconds of training in all rounds, and of fine-tuning for the evaluation at the end, with
    each number of nodes `int64 [n]`."""
    experiment = node.experiment
    epochs = experiment.step.options.get("epochs", 1)
    tuned = experiment.evaluation.fine_tune.get("epochs", 0)
    tested = float(node.population.learned_counts(node.evaluated).sum())
    found = []
    for number in nodes.tolist():
        slowest = float(max(work.sum() / number, work.max()))
        a_round = epochs * extrapolated(trials, slowest) + _MESSAGE * (number - 1)
        adapting = tuned * extrapolated(trials, tested / number) if tested else 0.0
        started = _START if number > 1 else 0.0
        found.append(experiment.rounds * a_round + adapting + started)
    return np.array(found)


def _faster(epoch: Callable[[np.ndarray], float], clients: int, threads: int) -> int:
    """So many threads if they train a fourth faster than one, else one."""
    if threads == 1:
        return 1
    places = np.arange(min(clients, _SEVERAL))
    one = epoch(places)
    torch.set_num_threads(threads)
    several = epoch(places)
    torch.set_num_threads(1)
    return threads if several < _FASTER * one else 1
