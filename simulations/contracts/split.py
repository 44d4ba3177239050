# SPDX-License-Identifier: Apache-2.0
"""The contract of a split."""

from __future__ import annotations

import numpy as np

from fedrec.components.registry import SPLIT
from fedrec.data.population import read_interactions
from fedrec.data.split import Partition
from simulations.contracts.base import (
    RunContract,
    assert_seeded,
    assert_that,
    columns_of,
    unchanged,
)


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
