# SPDX-License-Identifier: Apache-2.0
"""Clients with private parameters, trained in blocks: equal to training one after the other, over
several rounds."""

import numpy as np
import pytest

from clients.evaluation import evaluate_clients
from clients.hosting.node import Node
from clients.training.round import train_clients
from fedrec.protocol.orders import EvaluateOrder, TrainOrder
from fedrec.protocol.sparse_update import dense_change

SETTINGS = {
    "plain": {},
    "everything": {"momentum": 0.5, "weight-decay": 0.05, "proximal-mu": 0.3},
    "items late": {"late-parameters": ["item.*"], "rates": {"item.*": 5.0, "bias": 0.0}},
}


@pytest.fixture
def nodes(tiny_experiment, tmp_path):
    """Two nodes that differ in the path, each with its own private folder."""
    from fedrec.experiment.loading import load

    def make(task, settings, model=None):
        found = []
        for path in ("auto", "reference"):
            table = tiny_experiment() | {
                "task": task,
                "split": {"name": "ratio", "stream": "dataset"},
            }
            if task == "rating":
                del table["positive-above"]
            table["model"] = model or {"name": "mf", "factors": 3, "center": 3.0}
            common = {
                "learning-rate": 0.05,
                "epochs": 3,
                "batch-size": 4,
                "private-parameters": ["user.*"],
            }
            table["step"] = {"name": "sgd", **common, **settings}
            table["evaluation"]["fine-tune"] = {"epochs": 0}
            table["engine"]["path"] = path
            found.append(Node(load(table), 0, 1, tmp_path / path))
        return found

    return make


def assert_close(got, expected):
    np.testing.assert_allclose(
        got, expected, rtol=1e-4, atol=2e-6 * max(1.0, np.abs(expected).max())
    )


@pytest.mark.slow
@pytest.mark.parametrize("task", ["rating", "ranking"])
@pytest.mark.parametrize("case", SETTINGS)
def test_two_rounds_are_equal(nodes, case, task):
    """The second round starts from the private state of the first one; some clients are new in
    it."""
    fast, slow = nodes(task, SETTINGS[case])
    arrays = {name: value.numpy() for name, value in slow.initial().items()}
    for number, clients in ((1, np.arange(0, 14)), (2, np.arange(6, 24))):
        order = TrainOrder(number, clients)
        got, expected = train_clients(fast, arrays, order), train_clients(slow, arrays, order)
        for name in arrays:
            assert_close(
                dense_change(got.total[name], arrays[name]),
                dense_change(expected.total[name], arrays[name]),
            )
        assert got.loss == pytest.approx(expected.loss, rel=1e-4)
        assert got.examples == expected.examples
        assert not dense_change(got.total["user.factors"], arrays["user.factors"]).any()
        changes = {name: dense_change(got.total[name], value) for name, value in arrays.items()}
        arrays = {
            name: value + changes[name].astype(np.float32) / 20 for name, value in arrays.items()
        }
    for client in range(24):
        own, other = fast.private.load(client, 3), slow.private.load(client, 3)
        assert list(own) == list(other) == ["user.factors", "user.bias"]
        for name in own:
            assert_close(own[name], other[name])
    assert (
        np.abs(
            fast.private.load(8, 3)["user.factors"] - fast.private.load(8, 2)["user.factors"]
        ).max()
        > 1e-3
    )
    order = EvaluateOrder(2, None)
    mine, others = (evaluate_clients(node, arrays, order).table for node in (fast, slow))
    np.testing.assert_allclose(mine.to_numpy(), others.to_numpy(), rtol=1e-4, atol=1e-6)
    # there is no state before the first round
    later = evaluate_clients(fast, arrays, EvaluateOrder(0, None)).table
    assert not np.allclose(later.iloc[:, 0], mine.iloc[:, 0])


NEUMF = {
    "both": {"name": "neumf", "factors": 3, "tower": [4, 5, 3]},
    "tower": {"name": "neumf", "factors": 0, "tower": [6, 4]},
}


@pytest.mark.parametrize("task", ["rating", "ranking"])
@pytest.mark.parametrize("case", NEUMF)
def test_neumf_in_the_kernel_is_equal(nodes, case, task):
    rates = {"user.*": 2.0, "item.*": 3.0, "output.*": 0.5}
    fast, slow = nodes(task, {"rates": rates}, NEUMF[case])
    assert fast.paths == {"sgd": "kernel"}
    arrays = {name: value.numpy() for name, value in slow.initial().items()}
    order = TrainOrder(1, np.arange(12))
    got, expected = (train_clients(node, arrays, order) for node in (fast, slow))
    for name, start in arrays.items():
        wanted = dense_change(expected.total[name], start)
        assert_close(dense_change(got.total[name], start), wanted)
    assert got.loss == pytest.approx(expected.loss, rel=1e-4)
    for name, own in fast.private.load(5, 2).items():
        assert_close(own, slow.private.load(5, 2)[name])
        assert np.abs(own - arrays[name]).max() > 1e-3


def test_neumf_without_a_tower_trains_in_blocks(nodes):
    fast, _ = nodes("ranking", {}, {"name": "neumf", "factors": 3, "tower": []})
    assert fast.paths == {"sgd": "blocks (model Neumf declares no kernel)"}


def test_private_item_tables_go_one_by_one(nodes):
    """Whole tables per client are not compatible with compact ones."""
    fast, slow = nodes("rating", {"private-parameters": ["item.bias", "user.*"]})
    arrays = {name: value.numpy() for name, value in slow.initial().items()}
    for node in (fast, slow):
        reply = train_clients(node, arrays, TrainOrder(1, np.arange(5)))
        assert not dense_change(reply.total["item.bias"], arrays["item.bias"]).any()
        assert node.private.load(3, 2)["item.bias"].shape == (30, 1)
