# SPDX-License-Identifier: Apache-2.0
"""The contract of a perturbation."""

from __future__ import annotations

import numpy as np

from fedrec.components.registry import PERTURBATION
from fedrec.data.perturbation import Perturbed, TrainingData
from fedrec.data.population import Population, read_interactions
from fedrec.data.splits.rules import partition_by
from simulations.contracts.base import (
    RunContract,
    assert_equal,
    assert_seeded,
    assert_that,
    columns_of,
    same_bits,
    unchanged,
)


class PerturbationContract(RunContract):
    """Subclass it and set `component` to a `Perturbation`."""

    kind = PERTURBATION

    def test_perturbed_rows_can_be_trained_on(self) -> None:
        """Rows of the same users and items, each with an origin among the training rows or none."""
        data = self._data()
        found = self._perturbed(0)
        assert_that(len(found.rows) > 0, "nothing is left to learn from")
        sizes = (found.rows.num_users, found.rows.num_items)
        assert_equal(sizes, (data.rows.num_users, data.rows.num_items), "users and items")
        origin = np.asarray(found.origin)
        assert_equal(len(origin), len(found.rows), "rows with an origin")
        inside = origin.min() >= -1 and origin.max() < len(data.rows)
        assert_that(bool(inside), "an origin that is no training row")

    def test_it_is_a_function_of_the_seed(self) -> None:
        """The same seed gives the same rows, another seed others."""
        assert_seeded(self._learned, same_bits, self.random)

    def test_the_data_are_unchanged(self) -> None:
        """Nothing is changed in place."""
        data = self._data()
        with unchanged(columns_of(data.rows)):
            self.cls(self.config(), 0).perturb(data)

    def test_it_states_its_guarantee(self) -> None:
        """At least one sentence is reported with the results of a run."""
        words = self.cls(self.config(), 0).words()
        texts = isinstance(words, list) and all(isinstance(line, str) and line for line in words)
        assert_that(texts and bool(words), f"words() gives {words!r}")

    def test_clients_train_on_it_and_are_tested_on_real_rows(self) -> None:
        """In an experiment, clients train on its result, and the held-out rows are the real
        ones."""
        population = Population.of(self.small())
        plain = Population.of(self.small().model_copy(update={"perturb": None}))
        clients = population.partition.training_clients
        counts = [len(data.items) for data in population.clients(clients)]
        users = self._perturbed(0).rows.users
        learned = np.bincount(users, minlength=population.interactions.num_users)
        assert_that(counts == learned[clients].tolist(), "clients learn from other rows")
        tested = plain.evaluated_clients("test")
        lists = [one.held_out(tested, "test").relevant for one in (population, plain)]
        assert_that(np.array_equal(lists[0], lists[1]), "the held-out rows are other ones")

    def _data(self) -> TrainingData:
        experiment = self.small()
        interactions = read_interactions(experiment)
        split = partition_by(experiment.split, 0, interactions)
        rated = experiment.task == "rating" or experiment.positive_above is not None
        return TrainingData(interactions.with_rows(split.train_rows), split.training_clients, rated)

    def _perturbed(self, seed: int) -> Perturbed:
        return self.cls(self.config(), seed).perturb(self._data())

    def _learned(self, seed: int) -> dict[str, np.ndarray]:
        return columns_of(self._perturbed(seed).rows)
