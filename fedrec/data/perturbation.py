# SPDX-License-Identifier: Apache-2.0
"""Interface of perturbations, which replace the training rows by perturbed ones.

A perturbation runs once, before the first round, and its result is the same in every round and on
every node: a new draw per round would publish a profile as often as its client is sampled. It does
not see held-out rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from fedrec.components import registry
from fedrec.components.sections import component_errors, component_of, refuse_wrong
from fedrec.config import Config
from fedrec.data.interactions import Interactions
from fedrec.data.splits.rules import Partition
from fedrec.experiment.schema import DataSettings


@dataclass(frozen=True, eq=False)
class TrainingData:
    """Input of a perturbation.

    Attributes:
        rows: the training rows alone, in the dataset's order; users and items keep their numbers.
        clients: `int64 [clients]`, ascending: training clients. The rows of other users serve
            on-device fine-tuning only.
        rated: whether ratings are used in training; otherwise the ratings of rows are ignored.
        tested: `int64 [users]`, ascending: users with held-out rows.
    """

    rows: Interactions
    clients: np.ndarray
    rated: bool
    tested: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class Perturbed:
    """Output of a perturbation, which replaces the training rows.

    Attributes:
        rows: the perturbed rows, of the same users and items; their number may differ from that of
            the training rows.
        origin: `int64 [rows]`, the training row that each row replaces; -1: none.
        figures: statistics for reports, printed by `fedrec perturb` and `fedrec synthesise`.
    """

    rows: Interactions
    origin: np.ndarray
    figures: Mapping[str, Any] = field(default_factory=dict)


class Perturbation(ABC):
    """Base class of perturbations of the clients' training rows.

    A built-in has a `name` and lives in `fedrec/perturb/`, its configuration class
    above it. Its result is a function of the data, its settings and the seed.

    Args:
        config: its settings.
        seed: of the experiment; random decisions come from
            `fedrec.rng.stream(seed, "perturb", ...)`.
    """

    Config: ClassVar[type[Config]] = Config

    def __init__(self, config: Config, seed: int) -> None:
        self.config = config
        self.seed = seed

    def depends_on(self, rated: bool) -> str:
        """Describe which other data affect the rows that a client trains on; empty: none. Private
        runs reject a perturbation that depends on other data, or does not declare its dependence
        (the default).

        Args:
            rated: whether ratings are used in training.
        """
        return "undeclared data: the perturbation does not implement depends_on()"

    @abstractmethod
    def perturb(self, data: TrainingData) -> Perturbed:
        """Return the rows to train on.

        Raises:
            FedrecError: data that the perturbation needs are missing.
        """

    @abstractmethod
    def words(self) -> list[str]:
        """Describe the guarantee and its limits, in sentences for the results of a run."""


def perturbation_of(settings: DataSettings) -> Perturbation | None:
    """Return the configured perturbation of the training rows, or None."""
    if settings.perturb is None:
        return None
    return component_of(registry.PERTURBATION, settings.perturb, settings.seed)


def apply_perturbation(
    settings: DataSettings, interactions: Interactions, partition: Partition
) -> Perturbed | None:
    """Return the perturbed training rows of a partition; None without a perturbation.

    Raises:
        ComponentError: the perturbation failed, or returned rows of other users or items.
    """
    perturbation = perturbation_of(settings)
    if perturbation is None:
        return None
    rated = settings.task == "rating" or settings.positive_above is not None
    held_out = np.concatenate([partition.validation_rows, partition.test_rows])
    data = TrainingData(
        interactions.with_rows(partition.train_rows),
        partition.training_clients,
        rated,
        np.unique(interactions.users[held_out]),
    )
    kind = registry.PERTURBATION.name
    with component_errors(kind, perturbation, "with these training rows"):
        perturbed = perturbation.perturb(data)
        expected, got = (
            f"{rows.num_users} users and {rows.num_items} items"
            for rows in (data.rows, perturbed.rows)
        )
    if got != expected:
        refuse_wrong(kind, perturbation, "from perturb()", expected=expected, got=got)
    return perturbed
