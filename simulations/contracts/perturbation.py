# SPDX-License-Identifier: Apache-2.0
"""The contract of a perturbation."""

from __future__ import annotations

import numpy as np

from fedrec.components.errors import Unchanged
from fedrec.components.registry import PERTURBATION
from fedrec.data.interactions import Interactions
from fedrec.data.perturbation import Perturbed, TrainingData
from fedrec.data.population import Population, read_interactions
from fedrec.data.split import partition_by
from simulations.contracts.base import RunContract, assert_that


class PerturbationContract(RunContract):
    """Subclass it and set `component` to a `Perturbation`."""

    kind = PERTURBATION

    def test_perturbed_rows_can_be_trained_on(self) -> None:
        """Rows of the same users and items, each with an origin among the training rows or none."""
        data = self._data()
        found = self._perturbed(0)
        assert_that(len(found.rows) > 0, "nothing is left to learn from")
        sizes = (found.rows.num_users, found.rows.num_items)
        assert_that(sizes == (data.rows.num_users, data.rows.num_items), f"{sizes} users and items")
        origin = np.asarray(found.origin)
        inside = (
            len(origin) == len(found.rows) and origin.min() >= -1 and origin.max() < len(data.rows)
        )
        assert_that(bool(inside), "an origin that is no training row, or a row without one")

    def test_it_is_a_function_of_the_seed(self) -> None:
        """The same seed gives the same rows, another seed others."""
        first = self._perturbed(0)
        again = self._perturbed(0)
        other = self._perturbed(1)
        assert_that(_same(first.rows, again.rows), "one seed gives two results")
        assert_that(
            not self.random or not _same(first.rows, other.rows), "the seed makes no difference"
        )

    def test_the_data_are_unchanged(self) -> None:
        """Nothing is changed in place."""
        data = self._data()
        untouched = Unchanged(_columns(data.rows), np.copy)
        self.cls(self.config(), 0).perturb(data)
        assert_that(not untouched.changed(), f"changed in place: {untouched.changed()}")

    def test_it_states_its_guarantee(self) -> None:
        """At least one sentence is reported with the results of a run."""
        words = self.cls(self.config(), 0).words()
        right = (
            isinstance(words, list)
            and bool(words)
            and all(isinstance(line, str) and line for line in words)
        )
        assert_that(right, f"words() gives {words!r}")

    def test_clients_train_on_it_and_are_tested_on_real_rows(self) -> None:
        """In an experiment, clients train on its result, and the held-out rows are the real
        ones."""
        population = Population.of(self.small())
        plain = Population.of(self.small().model_copy(update={"perturb": None}))
        clients = population.partition.training_clients
        counts = [len(data.items) for data in population.clients(clients)]
        learned = np.bincount(
            self._perturbed(0).rows.users, minlength=population.interactions.num_users
        )
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


def _columns(rows: Interactions) -> dict[str, np.ndarray]:
    columns = {
        "users": rows.users,
        "items": rows.items,
        "ratings": rows.ratings,
        "times": rows.times,
    }
    return {name: values for name, values in columns.items() if values is not None}


def _same(one: Interactions, other: Interactions) -> bool:
    mine = _columns(one)
    theirs = _columns(other)
    return set(mine) == set(theirs) and all(
        np.array_equal(mine[name], theirs[name]) for name in mine
    )
