# SPDX-License-Identifier: Apache-2.0
"""Repeated ratings by loops, and their use in datasets."""

import numpy as np
import pytest

from fedrec.data.client_data import ClientData
from fedrec.data.time_weighting import time_weighted


def test_by_hand():
    # Item 4 twice: 5 at time 9 and 2 at time 3, so 2 * 1/3 + 5 * 2/3; item 1 three times: weights
    # 1/6, 2/6, 3/6.
    users, items = np.array([0, 0, 0, 0, 0, 1]), np.array([4, 4, 1, 1, 1, 4])
    ratings, times = np.array([5.0, 2, 3, 1, 4, 2]), np.array([9, 3, 5, 6, 7, 0])
    pairs = time_weighted(users, items, ratings, times)
    assert pairs[0].tolist() == [0, 0, 1] and pairs[1].tolist() == [1, 4, 4]
    np.testing.assert_allclose(pairs[2], [3 / 6 + 2 / 6 + 12 / 6, 2 / 3 + 10 / 3, 2], rtol=1e-6)


@pytest.mark.parametrize("with_times", [True, False])
def test_against_loops(with_times):
    random = np.random.default_rng(0)
    users, items = random.integers(0, 3, 60), random.integers(0, 5, 60)
    ratings, times = random.random(60), random.permutation(60) if with_times else None
    pairs = time_weighted(users, items, ratings, times)
    for user, item, value in zip(*pairs, strict=True):
        rows = np.flatnonzero((users == user) & (items == item))
        rows = rows if times is None else rows[np.argsort(times[rows])]
        m = len(rows)
        assert value == pytest.approx(
            sum(ratings[row] * 2 * (t + 1) / (m * (m + 1)) for t, row in enumerate(rows))
        )
    assert len(pairs[0]) == len({*zip(users.tolist(), items.tolist(), strict=True)})


def test_without_ratings_a_repeated_use_counts_one():
    assert time_weighted(np.zeros(4, int), np.array([1, 1, 1, 2]), None, None)[2] == pytest.approx(
        [1, 1]
    )
    assert len(time_weighted(np.zeros(0, int), np.zeros(0, int), None, None)[2]) == 0


def test_histories_and_devices_agree(world):
    population = world()
    assert population.histories(np.arange(4)).max() == 1
    rated = population.histories(np.arange(4), rated=True)
    for client in range(4):
        data = population.client(client)
        np.testing.assert_array_equal(rated[client, data.positives], data.amounts(rated=True))
        assert (data.amounts(rated=False) == 1).all()
        assert np.count_nonzero(rated[client]) == len(data.positives)
    # User 1 gave item 1 a 5 and then a 4; no times, so in the order of the rows.
    assert rated[1, 1] == pytest.approx(5 / 3 + 8 / 3) and rated[0, 0] == 5


@pytest.mark.parametrize("times", [None, np.array([1, 2, 3])])
def test_ratings_of_zero_or_less_have_an_amount(times):
    """In a rating task every rated item counts as positive, also one rated 0."""
    ratings = np.array([3.0, 0.0, -1.0], dtype=np.float32)
    data = ClientData(0, (), np.array([4, 2, 7]), ratings, np.array([2, 4, 7]), times, ratings)
    np.testing.assert_allclose(data.amounts(rated=True), [0.0, 3.0, -1.0])
