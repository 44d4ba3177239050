# SPDX-License-Identifier: Apache-2.0
"""Sums of touched rows equal sums of whole tables."""

import numpy as np
import pytest

from fedrec.protocol.sparse_update import (
    SparseAccumulator,
    SparseUpdate,
    added,
    apply_changes,
    dense_change,
)

SHAPE = (50, 3)


@pytest.fixture
def table():
    return np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)


def change(seed, drift=0.0):
    random = np.random.default_rng(seed)
    rows = np.sort(random.choice(50, 9, replace=False))
    return SparseUpdate(SHAPE, rows, random.normal(size=(9, 3)), drift)


def by_hand(one, table):
    whole = one.drift * table.astype(np.float64)
    for row, value in zip(one.rows, one.values, strict=True):
        whole[row] += value
    return whole


@pytest.mark.parametrize("drift", [0.0, -0.25])
def test_dense_and_apply(table, drift):
    one = change(3, drift)
    np.testing.assert_allclose(one.dense(table), by_hand(one, table))
    moved = one.apply(table.copy(), 0.5)
    np.testing.assert_allclose(moved, table + 0.5 * by_hand(one, table), rtol=1e-6)
    assert moved.dtype == np.float32


@pytest.mark.parametrize("drift", [0.0, 0.1])
def test_sums_of_changes(table, drift):
    one, other = change(3, drift), change(4)
    expected = by_hand(one, table) + by_hand(other, table)
    assert isinstance(added(one, other, table), SparseUpdate)
    np.testing.assert_allclose(dense_change(added(one, other, table), table), expected)
    np.testing.assert_allclose(added(one, by_hand(other, table), table), expected)


def test_only_named_tables_are_changed_in_place(table):
    theta = {"item.id": table, "w": np.ones(2, np.float32)}
    before, weights = table.copy(), theta["w"]
    moved = apply_changes(theta, {"item.id": change(5), "w": np.array([1.0, -1.0])}, 0.5)
    assert moved["item.id"] is table
    assert weights.tolist() == [1, 1]
    assert moved["w"].tolist() == [1.5, 0.5]
    np.testing.assert_allclose(table, before + 0.5 * by_hand(change(5), before), rtol=1e-6)


def test_accumulator_adds_repeated_rows_and_grows():
    random, total = np.random.default_rng(2), np.zeros(SHAPE)
    sums = SparseAccumulator(SHAPE)
    for size in (0, 3, 40, 1, 200):
        rows, values = random.integers(0, 45, size), random.normal(size=(size, 3))
        np.add.at(total, rows, values)
        sums.add(rows, values)
    found = sums.total()
    assert (np.diff(found.rows) > 0).all() and found.rows.max() < 45
    np.testing.assert_allclose(found.dense(np.zeros(SHAPE)), total)


@pytest.mark.parametrize("drift", [0.0, -0.5])
@pytest.mark.parametrize("touched", [3, 4, 8])
def test_a_running_sum_becomes_rows_alone_while_fewer_than_half_of_them_changed(touched, drift):
    random = np.random.default_rng(touched)
    table, rows = random.normal(size=(8, 3)).astype(np.float32), random.permutation(8)[:touched]
    values = random.normal(size=(touched, 3))
    sums = SparseAccumulator(table.shape)
    sums.add(rows, values / 2, drift)
    sums.add(rows[::-1].copy(), values[::-1] / 2)
    expected = drift * table.astype(np.float64)
    expected[rows] += values
    found = sums.change(table)
    assert isinstance(found, SparseUpdate) == (touched < 4)
    assert (found.values if isinstance(found, SparseUpdate) else found).dtype == np.float32
    np.testing.assert_allclose(dense_change(found, table), expected, rtol=1e-6, atol=1e-7)
