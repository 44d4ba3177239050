# SPDX-License-Identifier: Apache-2.0
"""REPTILE and FedAvg on arrays small enough to compute by hand, through Flower's Strategy
interface."""

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message

from fedrec.protocol.messages import pack_sum, unpack_train
from fedrec.protocol.orders import TrainSum
from fedrec.protocol.zero_copy import from_record, to_record
from strategies.fedavg import FedAvg, FedAvgConfig
from strategies.reptile import Reptile, ReptileConfig

pytestmark = pytest.mark.usefixtures("identity")
THETA = {"w": np.array([1, 2], np.float32), "b": np.array(10, np.float32)}
STEP = {"name": "sgd", "epochs": 2}


class TwoNodes:
    """Node 7 hosts clients 0 and 2, node 5 hosts client 1: node order is not id order."""

    def __init__(self, cohort=(0, 1, 2)):
        self.cohort = np.array(cohort, dtype=np.int64)

    def sample(self, round_number):
        self.asked = round_number
        return self.cohort

    def by_node(self, clients):
        groups = [(7, clients[clients != 1]), (5, clients[clients == 1])]
        return [(node, group) for node, group in groups if len(group)]


def reptile(rate=0.5, cohort=(0, 1, 2), **settings):
    return Reptile(ReptileConfig(server_lr=rate, **settings), TwoNodes(cohort), STEP)


def fedavg():
    return FedAvg(FedAvgConfig(), TwoNodes(), STEP)


def configured(strategy, round_number=1, theta=THETA):
    return list(strategy.configure_train(round_number, to_record(theta), ConfigRecord(), None))


def answer(message, w, b, clients, weight, loss=(0.0, 0)):
    total = {"w": np.array(w, np.float32), "b": np.array(b, np.float32)}
    return Message(pack_sum(TrainSum(total, clients, weight, 4 * clients, *loss)), reply_to=message)


def test_every_node_gets_one_message_with_its_clients_and_the_step():
    strategy = reptile()
    messages = configured(strategy, 3)
    orders = [unpack_train(message.content)[1] for message in messages]
    assert [message.metadata.dst_node_id for message in messages] == [7, 5]
    assert [order.clients.tolist() for order in orders] == [[0, 2], [1]]
    assert all(order.round == 3 and order.step == STEP for order in orders)
    assert strategy.cohorts.asked == 3
    assert messages[0].content["arrays"] is messages[1].content["arrays"]


@pytest.mark.parametrize(("make", "weighting"), [(reptile, "uniform"), (fedavg, "examples")])
def test_clients_get_the_weighting(make, weighting):
    assert {unpack_train(message.content)[1].weighting for message in configured(make())} == {
        weighting
    }


def test_reptile_is_equation_6():
    """theta + 0.5 * (1 / 3) * (sum over three clients): w = [1, 2] + [9, -3] / 6, b = 10 + 1.5 /
    6."""
    strategy = reptile(0.5)
    one, two = configured(strategy)
    arrays, metrics = strategy.aggregate_train(
        1, [answer(one, [6, -6], 1, 2, 2, (1.0, 2)), answer(two, [3, 3], 0.5, 1, 1, (0.5, 1))]
    )
    found = from_record(arrays)
    assert found["w"].tolist() == [2.5, 1.5] and found["b"].tolist() == 10.25
    assert found["w"].dtype == np.float32 and found["b"].shape == ()
    sent = 3 * 4 * (2 + 1)  # three clients get w and b and send both, as the nodes do not tell
    counts = {"num-clients": 3, "num-examples": 12, "bytes-up": sent, "bytes-down": sent}
    assert dict(metrics) == counts | {"loss": 0.5}


@pytest.mark.parametrize(("round_number", "moved"), [(1, 8), (2, 6), (4, 2), (5, 0), (9, 0)])
def test_the_server_rate_falls_linearly_to_zero(round_number, moved):
    """Over T = 4 rounds the rate is 1, 3/4, 1/2, 1/4, and nothing after; one client moves w by
    8."""
    strategy = reptile(1.0, anneal_rounds=4)
    one, _ = configured(strategy, round_number)
    arrays, _ = strategy.aggregate_train(round_number, [answer(one, [8, 8], 8, 1, 1)])
    assert from_record(arrays)["w"].tolist() == [1 + moved, 2 + moved]


@pytest.mark.parametrize(("round_number", "moved"), [(1, 8), (4, 8), (5, 6), (7, 2), (8, 0)])
def test_the_rate_may_begin_to_fall_later(round_number, moved):
    """After three rounds at the whole rate, over T = 4 rounds."""
    strategy = reptile(1.0, anneal_rounds=4, anneal_after=3)
    one, _ = configured(strategy, round_number)
    arrays, _ = strategy.aggregate_train(round_number, [answer(one, [8, 8], 8, 1, 1)])
    assert from_record(arrays)["w"].tolist() == [1 + moved, 2 + moved]


def test_fedavg_divides_by_the_examples():
    """Weights 8 and 2: w = [1, 2] + ([6, -6] + [4, 0]) / 10, b = 10 + (5 + 5) / 10."""
    strategy = fedavg()
    one, two = configured(strategy)
    arrays, _ = strategy.aggregate_train(
        1, [answer(one, [6, -6], 5, 2, 8), answer(two, [4, 0], 5, 1, 2)]
    )
    found = from_record(arrays)
    np.testing.assert_allclose(found["w"], [2, 1.4], rtol=1e-6)
    assert found["b"] == 11


def test_fedavg_without_any_example_changes_nothing():
    strategy = fedavg()
    one, two = configured(strategy)
    arrays, _ = strategy.aggregate_train(
        1, [answer(one, [0, 0], 0, 2, 0), answer(two, [0, 0], 0, 1, 0)]
    )
    assert all(np.array_equal(from_record(arrays)[name], value) for name, value in THETA.items())


def test_only_those_who_answered_count():
    """The failed node is skipped: M is 1, not 3."""
    strategy = reptile(1.0)
    one, two = configured(strategy)
    failed = Message(Error(2, "out of memory"), reply_to=one)
    arrays, metrics = strategy.aggregate_train(1, [failed, answer(two, [3, 3], 0.5, 1, 1)])
    assert from_record(arrays)["w"].tolist() == [4, 5] and metrics["num-clients"] == 1


@pytest.mark.parametrize("cohort", [(), (0, 1, 2)])
def test_without_any_answer_the_parameters_stay(cohort):
    strategy = reptile(cohort=cohort)
    messages = configured(strategy)
    assert len(messages) == (2 if cohort else 0)
    arrays, metrics = strategy.aggregate_train(
        1, [Message(Error(2, "x"), reply_to=message) for message in messages]
    )
    down = {"bytes-up": 0, "bytes-down": 4 * (2 + 1) * len(cohort)}
    assert arrays is None and dict(metrics) == {"num-clients": 0, "num-examples": 0} | down


def test_a_round_without_anything_to_learn_from_has_no_loss():
    strategy = reptile()
    one, _ = configured(strategy)
    _, metrics = strategy.aggregate_train(1, [answer(one, [0, 0], 0, 2, 2)])
    assert "loss" not in metrics


def test_sums_are_added_in_float64():
    """In float32, 2^24 + 1 + 1 would stay 2^24."""
    strategy = reptile(1.0)
    one, two = configured(
        strategy, theta={"w": np.zeros(2, np.float32), "b": np.zeros((), np.float32)}
    )
    replies = [
        answer(one, [2**24, 1], 0, 1, 1),
        answer(two, [1, 1], 0, 1, 1),
        answer(two, [1, 1], 0, 0, 0),
    ]
    arrays, _ = strategy.aggregate_train(1, replies)
    assert from_record(arrays)["w"].tolist() == [2**23 + 1, 1.5]


def test_evaluation_is_left_to_the_server_loop():
    strategy = reptile()
    assert list(strategy.configure_evaluate(1, to_record(THETA), ConfigRecord(), None)) == []
    assert strategy.aggregate_evaluate(1, []) is None and strategy.state() == {}
