# SPDX-License-Identifier: Apache-2.0
"""A node of a deployment: its own users' data, and its protection against the server.

The server chooses the experiment, and the node decides which orders it executes. Its data are the
file that its owner named, never the experiment's `[dataset]`. It trains its own users only, each no
more often than its owner allows. Its noise comes from the operating system, as the server knows the
experiment's seed. It does not report its users' groups. `clients.device.policy` decides which
experiments and orders it accepts.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import numpy as np
from flwr.app import Context

from clients.device.own_data import own_population
from clients.device.policy import FILES, Policy, client_noise, experiment_of, rho_of, run_key
from clients.node import Node
from clients.participation import Limits, Participation
from clients.storage import PrivateState, SessionSecrets
from fedrec.components.sections import Section
from fedrec.data.population import Population
from fedrec.errors import ClientError, RefusalError
from fedrec.experiment.phases import phase_at, step_table
from fedrec.experiment.schema import Experiment
from fedrec.protocol.messages import EvaluateOrder, ItemQuery, TrainOrder
from fedrec.rng import NoiseSource, source_of
from fedrec.secure.identity import CERTIFICATE, KEY, Identity

log = logging.getLogger("fedrec")
LARGEST_PARAMETER = 1e9
"""Largest absolute value of a number in parameters."""


def _check_parameters(
    arrays: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that received parameters match the experiment and are finite and bounded, before any
    client's data are read.

    NaN or missing rows of a table would make training fail only for clients that use these rows,
    and a server would learn from the failure which items a client has.

    Args:
        arrays: the received parameters.
        shapes: shape of each parameter of the experiment.

    Raises:
        RefusalError: a parameter is missing or unknown, has a wrong shape or is not `float32`, or
            contains a NaN, infinite or too large number.
    """
    wrong = sorted(set(arrays) ^ set(shapes)) or [
        name
        for name, value in arrays.items()
        if value.shape != shapes[name]
        or value.dtype != np.float32
        or not max(abs(value.min(initial=0)), abs(value.max(initial=0))) <= LARGEST_PARAMETER
    ]
    if wrong:
        raise RefusalError(
            "invalid parameters in an order",
            expected="the experiment's parameters and shapes, finite float32 numbers of at most"
            f" {LARGEST_PARAMETER:g}",
            got=", ".join(map(repr, wrong[:3])),
            fix="continue from an earlier checkpoint with a lower learning rate, if training"
            " diverged",
        )


class DeviceNode(Node):
    """A node with its own data.

    Args:
        experiment: the resolved experiment.
        run: key of this run's private state.
        settings: the owner's policy and `FILES`, by key; without `join` there is no secure
            aggregation.

    Raises:
        RefusalError: the node does not take part in the experiment.
    """

    real = True

    def __init__(self, experiment: Experiment, run: str, settings: Mapping[str, object]) -> None:
        self.policy = Policy.of(settings)
        files = {key: Path(str(settings[key])) for key in FILES if key in settings}
        state = files["private-dir"]
        self.phases = self.policy.accepted(experiment)
        self.memory = Participation(state / "node.sqlite")
        if not self.memory.accept(run, experiment.digest()):
            raise RefusalError(
                "this run began with another experiment",
                expected="the experiment of the run's first order",
                got=f"a different experiment for run {run}",
                fix="start a new run",
            )
        super().__init__(experiment, 0, 1, None)
        self.run = run
        self.data = files["data"]
        self.catalogue = files["catalogue"]
        self.private = PrivateState(state / "private" / f"{run}.sqlite")
        self.uploads = Participation(state / "private" / "uploads.sqlite")
        self.session_secrets = SessionSecrets(state / "private" / f"secure-{run}.sqlite")
        self.least_nodes = self.policy.least_nodes
        if experiment.secure_aggregation:
            self.identity = _identity(files.get("join"))

    @property
    def named_steps(self) -> dict[str, Section]:
        """Steps of the experiment and of its phases; the server's strategy is not imported."""
        step = step_table(self.experiment.step)
        others = {
            f"phase {phase.name}": Section.model_validate(phase.step)
            for phase in self.phases
            if not phase.has_step(step)
        }
        return {"step": self.experiment.step, **others}

    @cached_property
    def population(self) -> Population:
        return own_population(self.experiment, self.data, self.catalogue, self._numbers)

    @cached_property
    def training(self) -> np.ndarray:
        return self.population.training_clients

    @cached_property
    def evaluated(self) -> np.ndarray:
        return self.population.evaluated_clients(self.experiment.evaluation.held_out)

    @cached_property
    def noise(self) -> NoiseSource:
        return source_of("secure", self.experiment.seed)

    def check(
        self,
        order: TrainOrder | EvaluateOrder | ItemQuery,
        arrays: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> None:
        if isinstance(order, ItemQuery):
            raise RefusalError(
                "parameters that the server generates for each client are not available on real"
                " clients",
                expected="a strategy that sends all clients the same parameters",
                got="a request for the items of clients, which are private",
                fix="run the experiment as a simulation",
            )
        self.policy.check_order(self.experiment, self.phases, order, arrays)
        _check_parameters(arrays, {name: tuple(v.shape) for name, v in self.fresh.items()})

    def accept(self, order: TrainOrder) -> TrainOrder:
        """Restrict an order to the clients that this node hosts and that may still take part, and
        record their participation. No client takes part twice in an order.

        Where clients add noise themselves, they upload no more often than the experiment has
        rounds, over all runs unless the owner sets `most-rounds`, and at no larger cost than
        `most-epsilon`: noise is fresh each time, and a server that repeats a round or a run could
        average it out. Losses and numbers of examples, which have no noise, then stay on the
        device.
        """
        asked = (
            self.training if order.clients is None else np.intersect1d(order.clients, self.training)
        )
        protection = order.protection
        noise = client_noise(phase_at(self.phases, order.round))
        noisy = noise is not None or (protection is not None and protection.noise_scale > 0)
        rounds = self.experiment.rounds if noisy else None
        limits = Limits(
            self.policy.most_rounds,
            in_run=rounds,
            noisy=rounds if self.policy.most_rounds is None else None,
            rho=self.policy.largest_rho if noisy else None,
        )
        cost = rho_of(protection, noise) if noisy else 0.0
        if protection is not None and noisy:
            protection = replace(protection, silent=True)
        clients = self.memory.spend(self.run, order.round, asked, cost, limits)
        refused = len(asked) - len(clients)
        if refused:
            log.warning(
                "round %d: %d clients reached the limit of rounds or of epsilon",
                order.round,
                refused,
            )
        return replace(order, clients=clients, protection=protection)

    def hosted(self, clients: np.ndarray | None) -> np.ndarray:
        asked = self.evaluated if clients is None else np.intersect1d(clients, self.evaluated)
        return self.memory.evaluate(asked, self.policy.most_evaluations)

    def groups(self, clients: np.ndarray) -> dict[str, np.ndarray]:
        return {}

    def _numbers(self, names: list[str]) -> np.ndarray:
        if not self.policy.numbers:
            return self.memory.numbers(names)
        if not all(name.isdecimal() and len(name) < 20 and int(name) < 2**62 for name in names):
            raise ClientError(
                "a user name is not a number",
                expected="whole numbers",
                fix="leave out numbers = true",
            )
        return np.array([int(name) for name in names], dtype=np.int64)


def _identity(join: Path | None) -> Identity:
    identity = None if join is None else Identity.read(join)
    if identity is None:
        raise RefusalError(
            f"this node has no {KEY} and {CERTIFICATE} in its folder, for secure aggregation",
            fix="ask the operator for this node's folder",
        )
    return identity


def device_node_of(context: Context) -> DeviceNode:
    """The node that the context of a real node describes.

    Raises:
        RefusalError: it has no data, or does not take part in the run.
    """
    if "data" not in context.node_config:
        raise RefusalError(
            "this node has no data",
            expected="the data file of its owner",
            fix="start the client with --data FILE",
        )
    run = context.run_config
    return DeviceNode(experiment_of(run), run_key(run), context.node_config)


@contextmanager
def at_multiples_of(interval: float) -> Iterator[None]:
    """Delay the end of a block to a multiple of `interval` seconds after its start, also after an
    error; 0: no delay. The time of a reply then does not reveal how many rows the node's clients
    have."""
    began = time.monotonic()
    try:
        yield
    finally:
        if interval:
            time.sleep((began - time.monotonic()) % interval)
