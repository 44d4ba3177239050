# SPDX-License-Identifier: Apache-2.0
"""Rounds of real nodes that close before all have answered, over a fake of Flower's grid with a
clock."""

from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Error, Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID

from fedrec.errors import ClientError, ExperimentError
from fedrec.protocol.messages import pack_sum, pack_train
from fedrec.protocol.orders import TrainOrder, TrainSum
from fedrec.protocol.zero_copy import to_record
from server.deployed.federation import DeployedFederation
from server.deployed.grid import DeployedGrid
from server.exchange.dropped_replies import DroppedReplies
from server.exchange.replies import answers

pytestmark = pytest.mark.usefixtures("identity")
BUFFERED = "asynchronous={concurrency=12}"
THETA = {"w": np.zeros(2, dtype=np.float32)}


class Delayed:
    """Nodes that reply so many seconds after their message; at -1, with an error at once."""

    def __init__(self, delays):
        self.delays = dict(delays)
        self.now = 0.0
        self.waiting: dict = {}
        self.asked: list = []

    def get_node_ids(self):
        return list(self.delays)

    def push_messages(self, messages):
        names = []
        for message in messages:
            names.append(f"m{len(self.asked)}")
            message.metadata.__dict__["_message_id"] = names[-1]
            node = message.metadata.dst_node_id
            self.asked.append(node)
            self.waiting[names[-1]] = (self.now + max(0.0, self.delays[node]), message)
        return names

    def pull_messages(self, names):
        ready = [
            name for name in names if name in self.waiting and self.now >= self.waiting[name][0]
        ]
        return [self._reply(self.waiting.pop(name)[1]) for name in ready]

    def _reply(self, message):
        if self.delays[message.metadata.dst_node_id] < 0:
            return Message(Error(0, "it failed"), reply_to=message)
        total = {name: np.ones_like(value) for name, value in THETA.items()}
        return Message(pack_sum(TrainSum(total, 1, 1.0, 1, 0.0, 0)), reply_to=message)

    def sleep(self, seconds):
        self.now += max(seconds, 0.001)


@pytest.fixture
def federation(load_tiny):
    def make(delays, *settings):
        nodes = Delayed(delays)
        found = object.__new__(DeployedFederation)  # without a roster
        found.experiment = load_tiny("engine.max-failures=0.2", *settings)
        found.timeout, found.secure = 100.0, None
        found.dropped = DroppedReplies(always=True)
        found._deployed = DeployedGrid(nodes, clock=lambda: nodes.now, sleep=nodes.sleep)
        found.grid = found._deployed
        return found, nodes

    return make


def a_round(federation, number=1, clients=1):
    """The nodes whose replies a round takes."""
    nodes = federation.grid.get_node_ids()
    orders = [TrainOrder(number, np.arange(clients) + clients * node, "uniform") for node in nodes]
    messages = [
        Message(pack_train(to_record(THETA), order), node, "train")
        for node, order in zip(nodes, orders, strict=True)
    ]
    _, replies = federation._exchange(messages)
    good = answers(
        replies,
        sent=nodes,
        max_failures=federation.experiment.engine.max_failures,
        dropped=federation.dropped,
        may_be_late=True,
    )
    return sorted(reply.metadata.src_node_id for reply in good)


DELAYS = {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0, 5: 4.0}


def test_a_round_closes_at_its_deadline_and_the_late_are_counted(federation):
    found, nodes = federation(DELAYS, "closing={deadline=10.0}")
    assert a_round(found) == [1, 2, 3, 5] and 10 <= nodes.now < 13
    row = found.dropped.columns()
    assert row["dropped-replies"] == 1 and row["dropped-or-bounded"] == "node 4: no answer in time"
    assert a_round(found, 2) == [1, 2, 3, 5]
    assert nodes.asked.count(4) == 1  # it let a deadline pass, so it is not asked this time
    assert nodes.now < 20


def test_sending_is_part_of_the_time_and_messages_left_at_the_deadline_are_not_sent(federation):
    """Four messages are announced at a time; each time takes 7 of the 10 seconds."""
    found, nodes = federation(dict.fromkeys(range(1, 15), 0.5), "closing={deadline=10.0}")
    push = nodes.push_messages

    def slowly(messages):
        nodes.now += 7
        return push(messages)

    nodes.push_messages = slowly
    assert a_round(found) == [1, 2, 3, 4] and nodes.now == 14
    assert nodes.asked == list(range(1, 9))  # the second four were sent, and let it pass
    nodes.push_messages = push
    assert a_round(found, 2) == [1, 2, 3, 4, *range(9, 15)]


def test_a_round_closes_when_enough_have_answered(federation):
    """Four cohorts' clients are asked for three; whoever is late has missed no deadline."""
    found, nodes = federation(DELAYS, "closing={deadline=60.0, enough=0.6}")
    assert a_round(found) == [1, 2, 3] and nodes.now < 4
    before = nodes.now
    a_round(found, 2)
    assert nodes.asked.count(4) == 2 and nodes.now < before + 6


def test_enough_counts_clients_and_not_nodes(federation):
    found, nodes = federation(DELAYS, "closing={over-selection=1.6}")
    assert a_round(found, clients=2) == [1, 2, 3] and nodes.now < 4  # 6 of 10 clients for 6


def test_nodes_that_fail_are_not_late(federation):
    found, _ = federation({1: 1.0, 2: -1.0, 3: -1.0, 4: 1.0}, "closing={deadline=10.0}")
    with pytest.raises(ClientError, match="2 of 4 nodes failed"):
        a_round(found)


def test_without_a_deadline_of_its_own_a_round_closes_at_the_timeout(federation):
    found, nodes = federation({1: 1.0, 2: 500.0}, "closing={}")
    assert a_round(found) == [1] and 100 <= nodes.now < 104


@pytest.mark.parametrize("table", ["devices", "asynchronous"])
def test_simulated_devices_beside_real_nodes_are_refused(load_tiny, table):
    """Before the server waits for a node."""
    run = SimpleNamespace(experiment=load_tiny(f"{table}={{}}" if table == "devices" else BUFFERED))
    with pytest.raises(ExperimentError, match="is for simulated devices") as caught:
        DeployedFederation(run, DeployedGrid(Delayed({})))
    assert f"leave out [{table}]" in caught.value.text()


def test_an_empty_round_asks_nobody(federation):
    found, nodes = federation({1: 1.0}, "closing={deadline=10.0}")
    assert not list(
        found._deployed.send_and_receive([Message(RecordDict(), 9, "train")], timeout=1)
    )
    assert not nodes.asked


def test_an_error_of_the_superlink_is_that_of_the_lost_node(federation):
    """It answers as node 1 for a node that went offline, which must not count twice."""
    made, nodes = federation({8: 1.0, 9: -1.0}, "engine.max-failures=0.5")
    failing = nodes._reply

    def as_superlink(message):
        reply = failing(message)
        if reply.has_error():
            reply.metadata.__dict__["_src_node_id"] = SUPERLINK_NODE_ID
        return reply

    nodes._reply = as_superlink
    a_round(made)
    assert made.dropped.columns()["dropped-or-bounded"] == "node 9: failed: it failed"
