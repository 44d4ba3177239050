# SPDX-License-Identifier: Apache-2.0
"""A node of a deployment: its own users' data, and its protection against the server.

The server chooses the experiment, and the node decides which orders it executes. Its data are the
file that its owner named, never the experiment's `[dataset]`. It trains its own users only, each no
more often than its owner allows. Its noise comes from the operating system, as the server knows the
experiment's seed. It does not report its users' groups. `clients.device.policy` decides which
experiments and orders it accepts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType

import numpy as np
from flwr.app import Context

from clients.device.policy import FILES, Policy, client_noise, experiment_of, rho_of, run_key
from clients.node import Node
from clients.participation import Limits, Participation
from clients.storage import PrivateState, SessionSecrets
from fedrec.components.sections import Section
from fedrec.data.interactions import Feature, FeatureTable, Interactions, known_labels
from fedrec.data.population import Population
from fedrec.data.reader import Catalogue
from fedrec.data.splits.rules import Partition, partition_by
from fedrec.data.tables import Columns, TableLayout, read_table, table_start
from fedrec.errors import ClientError, DataError, RefusalError
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
        name for name, value in arrays.items() if not _is_sound(value, shapes[name])
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


def _is_sound(value: np.ndarray, shape: tuple[int, ...]) -> bool:
    if value.shape != shape or value.dtype != np.float32:
        return False
    largest = max(-float(value.min()), float(value.max())) if value.size else 0.0
    return largest <= LARGEST_PARAMETER  # false for NaN


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
        partition = self.policy.partition_id
        super().__init__(
            experiment, self.memory.place() if partition is None else partition, 1, None
        )
        self.run = run
        self._join = files.get("join")
        self.data = files["data"]
        self.catalogue = files["catalogue"]
        self.private = PrivateState(state / "private" / f"{run}.sqlite")
        self.uploads = Participation(state / "private" / "uploads.sqlite")
        self.session_secrets = SessionSecrets(state / "private" / f"secure-{run}.sqlite")
        self.least_nodes = self.policy.least_nodes
        if experiment.secure_aggregation:
            self.identity = _identity(self._join)

    @property
    def name(self) -> str:
        """Name of the node's folder, such as `node-2`."""
        return super().name if self._join is None else self._join.name

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
        return _own_population(self.experiment, self.data, self.catalogue, self._numbers)

    @cached_property
    def training(self) -> np.ndarray:
        return self.population.training_clients

    @cached_property
    def evaluated(self) -> np.ndarray:
        return self.population.evaluated_clients(self.experiment.evaluation.held_out)

    @property
    def validated(self) -> np.ndarray | None:
        return None

    @property
    def work(self) -> np.ndarray | None:
        return None

    @property
    def paths(self) -> dict[str, str]:
        return {}

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


@lru_cache(maxsize=8)
def _own_node(experiment: str, run: str, settings: tuple[tuple[str, object], ...]) -> DeviceNode:
    """The node that a node configuration describes; made once per process."""
    return DeviceNode(Experiment.model_validate_json(experiment), run, dict(settings))


def device_node_of(context: Context) -> DeviceNode:
    """The node that the context of a real node describes.

    Raises:
        RefusalError: it has no data, or does not take part in the run.
    """
    config = dict(context.node_config)
    if "data" not in config:
        raise RefusalError(
            "this node has no data",
            expected="the data file of its owner",
            fix="start the client with --data FILE",
        )
    experiment = experiment_of(context.run_config).model_dump_json()
    return _own_node(experiment, run_key(context.run_config), tuple(sorted(config.items())))


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


# A node's own data: a CSV file of one or more users, as clients with random ids.
#
# Columns: `user`, `item`; `rating` and `time` where the catalogue has them; one column per user
# feature (several values separated by `|`), or none; and, if the data are already split, `part`:
# `train`, `tune` (rows with which a test user's device fine-tunes), `validation` or `test`. Without
# it the experiment's split divides the node's own rows.
#
# Interactions with items outside the catalogue are ignored. These data are never sent.

_PARTS = ("train", "tune", "validation", "test")


def _own_population(
    experiment: Experiment,
    data: Path,
    catalogue: Path,
    numbers_of_users: Callable[[list[str]], np.ndarray],
) -> Population:
    """Read a node's data as the population of an experiment; the experiment's `[dataset]` is
    ignored.

    Args:
        experiment: the experiment.
        data: the CSV file.
        catalogue: the operator's catalogue.
        numbers_of_users: returns a fixed `int64` number for each user name.

    Raises:
        DataError: a file is missing or malformed, or no user has a training row.
    """
    interactions, names, part = read_own(data, catalogue)
    numbers = numbers_of_users(names)
    order = np.argsort(numbers)  # clients are trained in the order of their numbers
    interactions = _reordered(interactions, order)
    partition = (
        partition_by(experiment.split, experiment.seed_of_split, interactions)
        if part is None
        else _partition(interactions, part)
    )
    return Population.of_parts(experiment, interactions, partition, numbers=numbers[order])


def read_own(data: Path, catalogue: Path) -> tuple[Interactions, list[str], np.ndarray | None]:
    """Read the interactions of a node's users, the users' names, and the part of each row,
    `[rows]`, if the file has this column. Cached until one of the files changes.

    Raises:
        DataError: see `_own_population`.
    """
    return _read_own(data, catalogue, _version(data), _version(catalogue))


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None  # reading it raises the error
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


@lru_cache(maxsize=2)
def _read_own(
    data: Path, catalogue: Path, *_: object
) -> tuple[Interactions, list[str], np.ndarray | None]:
    import pandas as pd  # simulated nodes do without

    from fedrec.data.readers.table import ids_of, numbers_of, times_of

    known = Catalogue.read(catalogue)
    numeric = [name for name, has in (("rating", known.rated), ("time", known.timed)) if has]
    needed = {"user": str, "item": str, **dict.fromkeys(numeric)}
    present = table_start(data, TableLayout.own({})).names
    optional = [name for name in (*dict(known.user_features), "part") if name in present]
    settings = dict.fromkeys(needed, "--data")
    columns = needed | dict.fromkeys(optional, str)
    frame = read_table(data, TableLayout.own(columns, settings))
    items = pd.Index(known.item_ids).get_indexer(pd.Index(ids_of(frame["item"], data).astype(str)))
    listed = items >= 0
    if not listed.all():
        log.warning(
            "ignored %d interactions with items outside the catalogue", int((~listed).sum())
        )
    if not listed.any():
        raise DataError(
            f"no item in {data} is in the catalogue",
            expected="item names of the catalogue",
            got="only unknown items",
            fix="use this deployment's catalogue and its item names",
        )
    column = {name: values.loc[listed].reset_index(drop=True) for name, values in frame.items()}
    codes, names = pd.factorize(column["user"].astype(str), sort=True)
    interactions = Interactions(
        name="own data",
        users=codes,
        items=items[listed],
        user_ids=np.arange(len(names)),
        item_ids=known.item_ids.copy(),
        user_features=_user_features(known, column, codes, len(names)),
        item_features=known.item_features,
        ratings=numbers_of(column["rating"], data) if known.rated else None,
        times=times_of(column["time"], data) if known.timed else None,
    )
    return interactions, [str(name) for name in names], _parts(column, data)


def _parts(column: Columns, data: Path) -> np.ndarray | None:
    if "part" not in column:
        return None
    part = column["part"].astype(str).to_numpy()
    wrong = sorted(set(part.tolist()) - set(_PARTS))
    if wrong:
        raise DataError(
            f"{data}: unknown value in column part",
            expected=", ".join(_PARTS),
            got=repr(wrong[0]),
            fix="correct the column part, or leave it out",
        )
    return part


def _partition(interactions: Interactions, part: np.ndarray) -> Partition:
    return Partition(
        training_clients=np.unique(interactions.users[part == "train"]),
        train_rows=np.flatnonzero((part == "train") | (part == "tune")),
        validation_rows=np.flatnonzero(part == "validation"),
        test_rows=np.flatnonzero(part == "test"),
    )


def _user_features(
    known: Catalogue, column: Columns, codes: np.ndarray, users: int
) -> FeatureTable:
    first = np.unique(codes, return_index=True)[1]
    features = []
    for name, categories in known.user_features:
        texts = [""] * users
        if name in column:
            texts = column[name].fillna("").astype(str).to_numpy()[first].tolist()
        parsed = [known_labels(text, categories) for text in texts]
        unknown = [label for _, others in parsed for label in others]
        if unknown:
            log.warning(
                "ignored %d values of feature %r that are not categories of the catalogue, such"
                " as %r",
                len(unknown),
                name,
                unknown[0],
            )
        features.append(Feature.coded(name, categories, [labels for labels, _ in parsed]))
    return FeatureTable(users, tuple(features))


def _reordered(interactions: Interactions, order: np.ndarray) -> Interactions:
    """Interactions with the users reordered."""
    features = interactions.user_features.renumbered(order)
    users = np.argsort(order)[interactions.users]
    return replace(interactions, users=users, user_features=features)
