# SPDX-License-Identifier: Apache-2.0
"""The archive of the benchmark's workload as contestants read it."""

import json

import numpy as np
import pytest
import torch

from benchmarks.archive import BATCH, Arrays, RoundClock
from benchmarks.contestants.plain_torch import Net, batches, train


@pytest.fixture
def work(tmp_path):
    random = np.random.default_rng(0)
    shapes = {
        "user.gender": (2, 4),
        "item.id": (9, 4),
        "item.genres": (3, 4),
        "layer0.weight": (12, 5),
    }
    shapes |= {"layer0.bias": (5,), "layer1.weight": (5, 1), "layer1.bias": (1,)}
    lengths = [3, 40]
    offsets = np.concatenate([[0], np.cumsum(np.array(lengths) * 2)])
    np.savez(
        tmp_path / "work.npz",
        **{
            f"initial/{name}": random.normal(size=shape).astype(np.float32)
            for name, shape in shapes.items()
        },
        genres=np.array([[0, -1], [1, 2], [-1, -1]] * 3),
        users=np.array([[[0]], [[1]]]),
        cohorts=np.array([[5], [6]]),
        items=np.arange(offsets[-1]) % 9,
        labels=(np.arange(offsets[-1]) % 2).astype(np.float32),
        lengths=np.array(lengths),
        offsets=offsets,
    )
    return Arrays(str(tmp_path / "work.npz"))


def test_epochs_are_the_users_rows_in_order(work):
    assert [items.tolist() for items, _ in work.epochs(0)] == [[0, 1, 2], [3, 4, 5]]
    assert [len(labels) for _, labels in work.epochs(1)] == [40, 40]


def test_batches_do_not_reach_into_the_next_epoch(work):
    assert [len(items) for items, _ in batches(work, 1)] == [BATCH, 8, BATCH, 8]


@pytest.mark.slow
def test_training_does_not_change_the_work(work):
    before = {name: value.copy() for name, value in work.initial().items()}
    net = Net(work, sparse=False)
    train(net, torch.tensor([1]), batches(work, 1))
    assert all(np.array_equal(value, before[name]) for name, value in work.initial().items())
    pairs = zip(net.arrays(), Net(work, sparse=False).arrays(), strict=True)
    assert all(not np.array_equal(after, start) for after, start in pairs)


def test_a_report_holds_rounds_sum_and_change():
    clock = RoundClock()
    clock.begin()
    clock.end()
    clock.end()
    final = [np.array([3.0, 4.0]), np.array([[2.0]])]
    initial = [np.array([3.0, 1.0]), np.array([[0.0]])]
    report = json.loads(clock.report(final, initial))
    assert (report["squared_sum"], report["squared_change"]) == (29.0, 13.0)
    (first, second), (third, fourth) = report["rounds"]
    assert first <= second == third <= fourth
