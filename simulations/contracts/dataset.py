# SPDX-License-Identifier: Apache-2.0
"""The contracts of dataset readers and of splits."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from fedrec.components.registry import DATASET, SPLIT
from fedrec.data.features import FeatureNames
from fedrec.data.interactions import Interactions
from fedrec.data.population import read_interactions, reader_of
from fedrec.data.splits.rules import Partition
from fedrec.errors import DataError
from fedrec.experiment.schema import Experiment
from simulations.contracts.base import (
    Contract,
    RunContract,
    assert_seeded,
    assert_that,
    columns_of,
    refused,
    unchanged,
)


class DatasetContract(Contract):
    """Subclass it and set `component` to a `Reader`, with the settings under which it finds its
    data.

    Attributes:
        has_files: whether it reads files; then a missing `path` must be refused.
    """

    kind = DATASET
    has_files: ClassVar[bool] = True

    def small(self, *overrides: str, **sections: Any) -> Experiment:
        """The small experiment with the component in it. Every row is positive, because a dataset
        need not have ratings."""
        experiment = super().small(*overrides, **sections)
        return experiment.model_copy(update={"positive_above": None})

    def read(self) -> Interactions:
        """The dataset."""
        return read_interactions(self.small())

    def test_it_has_users_items_and_rows(self) -> None:
        """Indices, ids and features are consistent (`Interactions` checks them), and there are rows
        to train on."""
        data = self.read()
        least = min(len(data), data.num_users, data.num_items)
        assert_that(least > 1, "it has less than two rows, users or items")
        assert_that(data.user_features.rows == data.num_users, "user features of other users")

    def test_feature_names_are_those_of_the_data(self) -> None:
        """If it states them."""
        stated = reader_of(self.small()).feature_names()
        data = self.read()
        names = FeatureNames.of(data.user_features, data.item_features)
        assert_that(stated in (None, names), f"it states {stated} and gives {names}")

    def test_reading_twice_gives_the_same(self) -> None:
        """The same rows in the same order, whatever the global random generators say."""
        np.random.seed(1)
        first = self.read()
        np.random.seed(2)
        again = self.read()
        assert_that(first.fingerprint() == again.fingerprint(), "two reads give other rows")
        same = np.array_equal(first.users, again.users) and np.array_equal(first.items, again.items)
        same = same and list(first.item_ids) == list(again.item_ids)
        assert_that(same, "two reads give rows in another order")

    def test_files_are_only_read(self) -> None:
        """The raw files are unchanged."""
        self._skip_without_files()
        path = self._path()
        before = _digests(path)
        self.read()
        assert_that(before == _digests(path), f"reading changes the files below {path}")

    def test_missing_files_are_named(self, tmp_path: Path) -> None:
        """The error for a missing path names the path."""
        self._skip_without_files()
        gone = tmp_path / "gone"
        with refused(DataError, str(gone), "a missing path"):
            self.cls(self.kind.name, self.config(path=str(gone))).read()

    def test_clients_can_be_trained_on_it(self, tmp_path: Path) -> None:
        """A round of training and an evaluation on a few of its users."""
        from simulations import runner

        changes = ("rounds=1", "evaluation.every=0", "evaluation.final-users=4")
        result = runner.run(self.small(*changes), output=tmp_path / "run")
        assert_that(bool(np.isfinite(result.metrics["hits@5"])), f"metrics {result.metrics}")

    def _skip_without_files(self) -> None:
        if not self.has_files:
            pytest.skip("has no files")

    def _path(self) -> Path:
        name = self.component if isinstance(self.component, str) else self.kind.name
        return self.cls(name, self.config()).folder()


def _digests(path: Path) -> dict[str, str]:
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return {
        str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()
    }


class SplitContract(RunContract):
    """Subclass it and set `component` to a `Split`."""

    kind = SPLIT

    def test_parts_are_rows_of_the_data_and_some_are_held_out(self) -> None:
        """Rows and clients in range, no row in two parts, held-out rows, and clients that train."""
        data = read_interactions(self.small())
        partition = self._split(0)
        parts = (partition.train_rows, partition.validation_rows, partition.test_rows)
        rows = np.concatenate(parts)
        inside = rows.min() >= 0 and rows.max() < len(data) and len(np.unique(rows)) == len(rows)
        assert_that(bool(inside), "rows beyond the data, or in two parts")
        clients = partition.training_clients
        known = len(clients) and clients.min() >= 0 and clients.max() < data.num_users
        distinct = len(np.unique(clients)) == len(clients)
        assert_that(bool(known) and distinct, f"training clients {clients[:10]}")
        both = len(partition.train_rows) > 0 and len(partition.test_rows) > 0
        assert_that(both, "no rows to train on, or none to test on")

    def test_it_is_a_function_of_the_seed(self) -> None:
        """The same seed gives the same parts, another seed others."""
        assert_seeded(self._split, _same, self.random)

    def test_no_client_decides_about_others_if_it_says_so(self) -> None:
        """A split whose `depends_on` is empty gives other clients the same training rows when one
        client has a row less; private runs rely on it."""
        data = read_interactions(self.small())
        split = self.cls(self.config(), 0)
        if split.depends_on("replace-one"):
            return
        client = int(data.users[0])
        fewer = np.delete(np.arange(len(data)), data.rows_of(client)[-1])
        before = split.split(data)
        after = split.split(data.with_rows(fewer))
        others = np.setdiff1d(before.training_clients, client)
        trained, trained_after = (
            rows[np.isin(data.users[rows], others)]
            for rows in (before.train_rows, fewer[after.train_rows])
        )
        same = np.array_equal(trained, trained_after)
        clients = np.array_equal(before.training_clients, after.training_clients)
        assert_that(same and clients, "parts of others that changed with one client's rows")

    def test_the_data_are_unchanged(self) -> None:
        """Splitting changes nothing in place."""
        data = read_interactions(self.small())
        with unchanged(columns_of(data)):
            self.cls(self.config(), 0).split(data)

    def _split(self, seed: int) -> Partition:
        return self.cls(self.config(), seed).split(read_interactions(self.small()))


def _same(one: Partition, other: Partition) -> bool:
    parts = ("training_clients", "train_rows", "validation_rows", "test_rows")
    return all(np.array_equal(getattr(one, part), getattr(other, part)) for part in parts)
