# SPDX-License-Identifier: Apache-2.0
"""A node of a deployment: its own users' data, and what it refuses whatever the server asks.

The server decides the experiment, and the node what of it it does: its data are the file that its owner named, never
the experiment's `[dataset]`; it trains its own users only, and each no more often than its owner allows; noise that it
adds comes from the operating system, as the server knows the experiment's seed; it runs components of fedrec and of
the packages that its owner named, and no others; and it tells nobody which groups its users belong to.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from clients.hosting import Node
from clients.memory import NodeMemory
from clients.own_data import OwnPopulation, own_population
from clients.state import PrivateState
from clients.steps.base import Step
from clients.uploads import UploadLedger
from clients.vault import Vault
from fedrec.errors import ClientError, ExperimentError
from fedrec.experiment import Experiment, Section
from fedrec.privacy.mechanisms import Source, source_of
from fedrec.privacy.protection import Protection
from fedrec.wire import TrainOrder


class OwnNode(Node):
    """A node with its own data.

    Args:
        experiment: the resolved experiment.
        run: what private state of this run is kept under.
        state: folder of what is kept; readable by its owner only.
        data: CSV file of the users.
        catalogue: the operator's catalogue.
        place: the node's place among the nodes; None for a random one of its own.
        numbers: whether the names in the file are the users' numbers; then they are not secret.
        most_rounds: rounds that a user may take part in, over all runs; None for any number.
        plugins: packages, beside fedrec's own, whose components may run here.
        least_nodes: nodes that a sum must have before its part of it leaves the node, by secure aggregation.
    """

    def __init__(
        self,
        experiment: Experiment,
        run: str,
        *,
        state: Path,
        data: Path,
        catalogue: Path,
        place: int | None = None,
        numbers: bool = False,
        most_rounds: int | None = None,
        plugins: tuple[str, ...] = (),
        least_nodes: int = 0,
    ) -> None:
        self.memory = NodeMemory(state / "node.sqlite")
        super().__init__(experiment, self.memory.place() if place is None else place, 1, None)
        self.run, self.data, self.catalogue = run, data, catalogue
        self.named_by_number, self.most_rounds, self.plugins = numbers, most_rounds, plugins
        self.least_nodes = least_nodes
        self.private = PrivateState(state / "private" / f"{run}.sqlite")
        self.uploads = UploadLedger(state / "private" / f"uploads-{run}.sqlite")
        self.vault = Vault(state / "private" / f"secure-{run}.sqlite")
        self._refuse_foreign(experiment)

    @cached_property
    def population(self) -> OwnPopulation:
        return own_population(self.experiment, self.data, self.catalogue, self._numbers)

    @cached_property
    def training(self) -> np.ndarray:
        return self.population.training_clients

    @cached_property
    def evaluated(self) -> np.ndarray:
        return self.population.evaluated_clients(self.experiment.evaluation.held_out)

    @property
    def work(self) -> np.ndarray | None:
        return None

    @property
    def paths(self) -> dict[str, str]:
        return {}

    @property
    def memory_mib(self) -> float:
        return 0.0

    @cached_property
    def noise(self) -> Source:
        return source_of("secure", self.experiment.seed)

    def step(self, section: Section) -> Step:
        self._refuse_plugin(section.name)
        return super().step(section)

    def accept(self, order: TrainOrder) -> TrainOrder:
        """The order with those of its clients who live here and may still take part; their part is written down."""
        asked = self.training if order.clients is None else order.clients[np.isin(order.clients, self.training)]
        rho = _rho(order.protection)
        return replace(order, clients=self.memory.spend(self.run, order.round, asked, rho, self.most_rounds))

    def refuse_generated(self) -> None:
        raise ExperimentError(
            "parameters that the server generates for each client are not available on real clients",
            expected="a strategy that sends all clients the same parameters",
            got="a question for the items that clients train on, or are tested on: those are their data",
            fix="run the experiment as a simulation",
        )

    def hosted(self, clients: np.ndarray) -> np.ndarray:
        return clients[self.population.hosts(clients)]

    def groups(self, clients: np.ndarray) -> dict[str, np.ndarray]:
        return {}

    def _numbers(self, names: list[str]) -> np.ndarray:
        if not self.named_by_number:
            return self.memory.numbers(names)
        if not all(name.isdigit() and int(name) < 2**62 for name in names):
            raise ClientError("a user's name is no number", expected="whole numbers", fix="leave out numbers = true")
        return np.array([int(name) for name in names], dtype=np.int64)

    def _refuse_foreign(self, experiment: Experiment) -> None:
        for section in (experiment.model, experiment.split, *experiment.steps()):
            self._refuse_plugin(section.name)
        if self.least_nodes and not experiment.secure_aggregation:
            raise ExperimentError(
                "this node gives no sum of its own",
                expected=f"secure-aggregation = true, with sums of at least {self.least_nodes} nodes",
                got="an experiment without secure aggregation",
                fix="ask the operator for it, or start the client without least-nodes",
            )
        if experiment.perturb is not None:
            raise ExperimentError(
                "perturbation of profiles is not available on real clients yet",
                expected="an experiment without [perturb]",
                fix="run it as a simulation",
            )

    def _refuse_plugin(self, name: str) -> None:
        package = name.partition(":")[0].partition(".")[0]
        if ":" in name and package not in (*self.plugins, "fedrec", "clients"):
            raise ExperimentError(
                f"this node does not run {name!r}",
                expected="a component of fedrec, or of a package that its owner allows",
                got=f"package {package!r}",
                fix=f"start the client with --set plugins={package}",
            )


def _rho(protection: Protection | None) -> float:
    """What a client's own Gaussian noise costs in a round, as zero-concentrated DP (Bun and Steinke 2016, 1.6)."""
    if protection is None or protection.noise_scale <= 0 or protection.mechanism != "gaussian":
        return 0.0
    return 0.5 * (protection.clip_norm / protection.noise_scale) ** 2


@lru_cache(maxsize=8)
def own_node(experiment: str, run: str, settings: tuple[tuple[str, object], ...]) -> OwnNode:
    """The node that a node configuration describes; made once per process."""
    table = dict(settings)
    most, place = table.get("most-rounds"), table.get("partition-id")
    return OwnNode(
        Experiment.model_validate_json(experiment),
        run,
        state=Path(str(table["private-dir"])),
        data=Path(str(table["data"])),
        catalogue=Path(str(table["catalogue"])),
        place=None if place is None else int(str(place)),
        numbers=bool(table.get("numbers", False)),
        most_rounds=None if most is None else int(str(most)),
        plugins=tuple(part for part in str(table.get("plugins", "")).split(",") if part),
        least_nodes=int(str(table.get("least-nodes", 0))),
    )
