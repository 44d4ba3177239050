# SPDX-License-Identifier: Apache-2.0
"""The roster: the clients of each node, in the order of the nodes' partitions and not of Flower's
ids."""

import numpy as np
import pytest
from flwr.app import Error, Message

from fedrec.errors import ClientError, EngineError
from fedrec.protocol.messages import pack_presence
from fedrec.protocol.orders import Presence
from server.cohorts.balance import balanced
from server.cohorts.roster import Roster, call_roster

pytestmark = pytest.mark.usefixtures("identity")
NOBODY = np.array([], dtype=np.int64)


def presence(partition, training=(), evaluated=()):
    return Presence(
        partition, np.array(training, dtype=np.int64), np.array(evaluated, dtype=np.int64)
    )


class Answering:
    """A grid whose nodes reply to `hello` with given contents."""

    def __init__(self, answers):
        self.answers = answers

    def get_node_ids(self):
        return list(self.answers)

    def send_and_receive(self, messages, *, timeout=None):
        self.timeout = timeout
        return [
            self._reply(message)
            for message in messages
            if self.answers[message.metadata.dst_node_id]
        ]

    def _reply(self, message):
        answer = self.answers[message.metadata.dst_node_id]
        content = pack_presence(answer) if isinstance(answer, Presence) else answer
        return Message(content, reply_to=message)


def test_nodes_are_ordered_by_their_partition():
    grid = Answering(
        {17: presence(2, [2, 5]), 901: presence(0, [3], [0]), 450: presence(1, [4, 1], [7])}
    )
    roster = call_roster(grid, timeout=9.0)
    assert roster.nodes == (901, 450, 17) and grid.timeout == 9.0
    assert [found.partition for found in roster.presences] == [0, 1, 2]
    assert roster.training.tolist() == [1, 2, 3, 4, 5] and roster.evaluated.tolist() == [0, 7]


def test_clients_are_grouped_by_the_node_that_hosts_them():
    roster = Roster(
        (17, 450, 901), (presence(0, [0, 3], [6]), presence(1, [1]), presence(2, [2, 5], [8]))
    )
    groups = {
        node: clients.tolist() for node, clients in roster.by_node(np.array([0, 2, 3, 5, 6, 8]))
    }
    assert groups == {17: [0, 3, 6], 901: [2, 5, 8]}
    assert list(roster.by_node(NOBODY)) == []


def working(partition, training, work):
    return Presence(partition, np.array(training), NOBODY, np.array(work))


def test_nodes_that_may_train_each_others_clients_share_the_work():
    """On the hosting nodes the work of the cohort would be 1,300 and 10."""
    roster = Roster(
        (17, 450), (working(0, [0, 2, 4], [600, 400, 300]), working(1, [1, 3], [10, 5000]))
    )
    groups = {
        node: clients.tolist() for node, clients in roster.for_training(np.array([0, 1, 2, 4]))
    }
    assert groups == {17: [0, 1], 450: [2, 4]}
    assert list(roster.for_training(NOBODY)) == []


def test_clients_stay_with_their_host_unless_every_node_can_train_them():
    roster = Roster((17, 450), (working(0, [0, 2], [9, 9]), presence(1, [1])))
    groups = {node: clients.tolist() for node, clients in roster.for_training(np.array([0, 1, 2]))}
    assert groups == {17: [0, 2], 450: [1]}


def test_work_is_shared_evenly_and_no_client_is_lost():
    work = np.random.default_rng(0).lognormal(4.5, 1.0, 200).astype(int) + 1
    shares = balanced(work, 3)
    assert sorted(np.concatenate(shares).tolist()) == list(range(200))
    loads = [work[share].sum() for share in shares]
    assert max(loads) < 1.15 * min(loads)


def test_many_clients_weigh_more_than_one_with_the_same_work():
    """Each of 40 with 10 examples takes its node longer than those examples do; so that node gets
    less than half."""
    work = np.array([400, *[10] * 40])
    alone, _ = sorted(balanced(work, 2), key=len)
    assert 0 in alone and work[alone].sum() > work.sum() / 2


def test_a_node_without_clients_is_no_fault():
    roster = Roster((1, 2), (presence(0), presence(1, [4])))
    assert [(node, clients.tolist()) for node, clients in roster.by_node(np.array([4]))] == [
        (2, [4])
    ]


def test_a_roster_without_nodes_has_no_clients():
    roster = Roster((), ())
    for clients in (roster.training, roster.evaluated, roster.validated):
        assert clients.dtype == np.int64 and not len(clients)
    assert roster.places_of(np.array([0, 7])).tolist() == [-1, -1]


@pytest.mark.parametrize("answers", [{}, {2: presence(0), 3: presence(0)}])
def test_no_nodes_and_two_nodes_of_one_place_are_refused(answers):
    with pytest.raises(EngineError, match="do not form a federation") as caught:
        call_roster(Answering(answers), timeout=1.0)
    assert caught.value.got == f"partition-ids {[found.partition for found in answers.values()]}"


def test_a_node_that_fails_or_does_not_answer_is_reported():
    with pytest.raises(ClientError) as caught:
        call_roster(Answering({2: presence(0), 3: Error(2, "no data here")}), timeout=1.0)
    assert caught.value.problem == "1 of 2 nodes failed" and caught.value.got == "no data here"
    with pytest.raises(ClientError) as caught:
        call_roster(Answering({2: presence(0), 3: None}), timeout=1.0)
    assert caught.value.got == "no answer in time"
