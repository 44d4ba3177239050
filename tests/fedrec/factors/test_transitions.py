# SPDX-License-Identifier: Apache-2.0
"""Transitions of sequences by hand and by loops."""

import itertools

import numpy as np
import pytest
import torch

from fedrec.baselines.base import Histories
from fedrec.baselines.transitions import TransitionsBaseline
from fedrec.data.time_weighting import RecencyConfig, recent_weights
from fedrec.factors.transitions import SmoothingConfig, transition_weights, transitions


def counted(offsets, items, size, window, decay):
    """T by two loops."""
    total = np.zeros((size, size))
    for start, stop in itertools.pairwise(offsets):
        own = items[start:stop]
        for i, earlier in enumerate(own):
            for distance, later in enumerate(own[i + 1 : i + 1 + window]):
                if earlier != later:
                    total[earlier, later] += decay**distance
    return total


def sequences(seed, users=30, size=12):
    random = np.random.default_rng(seed)
    counts = random.integers(0, 15, users)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return offsets, random.integers(0, size, offsets[-1]), size


def test_by_hand():
    """One user with 0, 1, 2, 0 and a window of two; one with the item 3 alone."""
    found = transitions(
        np.array([0, 4, 5]), np.array([0, 1, 2, 0, 3]), 4, RecencyConfig(window=2, decay=0.5)
    )
    pairs = dict(zip(zip(found.first, found.second, strict=True), found.weights, strict=True))
    assert pairs == {(0, 1): 1, (0, 2): 0.5, (1, 2): 1, (1, 0): 0.5, (2, 0): 1}
    assert found.offsets.tolist() == [0, 5, 5]


@pytest.mark.parametrize(("window", "decay"), [(1, 1.0), (3, 0.5), (50, 0.9)])
def test_as_by_loops(window, decay):
    offsets, items, size = sequences(0)
    found = transitions(offsets, items, size, RecencyConfig(window=window, decay=decay))
    total = np.zeros((size, size))
    np.add.at(total, (found.first, found.second), found.weights)
    np.testing.assert_allclose(total, counted(offsets, items, size, window, decay), atol=1e-12)
    users = np.repeat(np.arange(len(offsets) - 1), np.diff(found.offsets))
    pairs = set(zip(users, found.first, found.second, strict=True))
    assert len(pairs) == len(found.first)  # each pair once per user


def test_last_items_count_by_their_distance_from_the_end():
    offsets = np.array([0, 4, 4, 5])
    table = recent_weights(
        offsets, np.array([2, 0, 1, 0, 3]), 4, RecencyConfig(window=3, decay=0.5)
    )
    assert table.tolist() == [[1, 0.5, 0, 0], [0] * 4, [0, 0, 0, 1]]


def test_weights_are_smoothed_and_noise_below_zero_is_left_out():
    total = torch.tensor([[0.0, 4.0], [-3.0, 0.0]], dtype=torch.float64)
    weights = transition_weights(total, SmoothingConfig(row_prior=4, column_prior=5, power=0.5))
    assert weights.tolist() == [[0.0, pytest.approx(4 / 8 / 3)], [0.0, 0.0]]


@pytest.mark.parametrize("shuffled", [False, True])
def test_the_baseline_scores_what_follows_in_time(shuffled):
    offsets, items, size = sequences(1)
    times = np.arange(len(items))
    histories = Histories(size, offsets, items)
    if shuffled:
        random = np.random.default_rng(5)
        order = np.concatenate(
            [random.permutation(np.arange(a, b)) for a, b in itertools.pairwise(offsets)]
        )
        histories = Histories(size, offsets, items[order], times=times[order])
    baseline = TransitionsBaseline(TransitionsBaseline.Config(window=4, decay=0.7))
    baseline.fit(histories)
    got = baseline.scores(histories)
    total = torch.from_numpy(counted(offsets, items, size, 4, 0.7))
    weights = transition_weights(total, SmoothingConfig())
    expected = np.zeros((len(offsets) - 1, size))
    for user, (start, stop) in enumerate(itertools.pairwise(offsets)):
        last = {}
        for distance, item in enumerate(items[start:stop][::-1][:4]):
            last.setdefault(item, 0.7**distance)
        for item, weight in last.items():
            expected[user] += weight * weights[item].numpy()
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-7)
