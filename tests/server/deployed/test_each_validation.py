# SPDX-License-Identifier: Apache-2.0
"""Validation of single clients' updates, by node and client."""

import numpy as np
import pytest
from flwr.app import Message

from fedrec.protocol.client_arrays import ClientArrays, ItemRequests
from fedrec.protocol.messages import pack_each, pack_train, unpack_each
from fedrec.protocol.orders import TrainEach, TrainOrder
from fedrec.protocol.zero_copy import to_record
from server.deployed.reply_validation import ReplyValidator

pytestmark = pytest.mark.usefixtures("identity")
THETA = {"t": np.zeros((5, 2), np.float32), "b": np.zeros(3, np.float32)}


def updates(clients, sizes=1.0, items=(1, 3), **changes):
    """Updates of some clients that touch the same items."""
    count = len(clients)
    sizes = np.broadcast_to(np.asarray(sizes, np.float32), count)
    requests = ItemRequests.of(np.array(clients), [np.array(items)] * count)
    values = {"b": np.repeat(sizes[:, None], 3, axis=1)}
    rows = {"t": np.repeat(np.repeat(sizes, len(items))[:, None], 2, axis=1)}
    made = {"updates": ClientArrays(requests, values, rows)}
    made |= {"examples": np.ones(count, np.int64), "losses": np.ones(count)}
    return TrainEach(**{**made, **changes})


def through(validator, replies, asked):
    """The clients that count, by node."""
    orders = {node: TrainOrder(1, np.array(own), each=True) for node, own in asked.items()}
    messages = [
        Message(pack_train(to_record(THETA), order), node, "train")
        for node, order in orders.items()
    ]
    answers = [
        Message(pack_each(replies[one.metadata.dst_node_id]), reply_to=one) for one in messages
    ]
    good = validator.trained(messages, answers, THETA)
    return {one.metadata.src_node_id: unpack_each(one.content) for one in good}


def test_every_client_of_a_node_counts():
    asked = {7: list(range(10)), 8: list(range(10, 20))}
    found = through(ReplyValidator(), {n: updates(own) for n, own in asked.items()}, asked)
    assert {node: one.clients.tolist() for node, one in found.items()} == asked


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_client_that_is_not_finite_is_left_out_alone(bad):
    validator = ReplyValidator()
    found = through(validator, {7: updates([1, 2, 3], [1, bad, 1])}, {7: [1, 2, 3]})
    assert found[7].clients.tolist() == [1, 3]
    assert np.isfinite(found[7].updates.rows["t"]).all()


def test_impossible_counts_cost_their_client():
    wrong = updates([1, 2, 3], examples=np.array([1, -1, 1]), losses=np.array([1.0, 1.0, 1e9]))
    assert through(ReplyValidator(), {7: wrong}, {7: [1, 2, 3]})[7].clients.tolist() == [1]


def test_a_much_larger_update_counts_as_ten_times_the_usual():
    asked = {7: [1, 2, 3], 8: [4]}
    found = through(ReplyValidator(), {7: updates([1, 2, 3], [1, 500, 1]), 8: updates([4])}, asked)
    assert found[7].updates.values["b"][:, 0] == pytest.approx([1, 10, 1], rel=1e-5)
    assert found[7].updates.rows["t"][:, 0] == pytest.approx([1, 1, 10, 10, 1, 1], rel=1e-5)
    assert found[8].updates.values["b"][:, 0] == pytest.approx([1])


def with_arrays(values=None, rows=None):
    made = updates([1, 2])
    own = made.updates
    arrays = ClientArrays(own.requests, values or own.values, rows or own.rows)
    return updates([1, 2], updates=arrays)


@pytest.mark.parametrize(
    "reply",
    [
        updates([1, 9]),
        updates([2, 1]),
        updates([1, 1]),
        updates([1, 2], items=(1, 5)),
        updates([1, 2], items=(-1, 3)),
        updates([1, 2], items=(3, 3)),
        updates([1, 2], items=(3, 1)),
        updates([1, 2], examples=np.ones(3, np.int64)),
        with_arrays(values={"b": np.zeros((2, 4), np.float32)}),
        with_arrays(values={"b": np.zeros((2, 3), np.int64)}),
        with_arrays(values={"c": np.zeros((2, 3), np.float32)}),
        with_arrays(values={"t": np.zeros((2, 5, 2), np.float32)}),
        with_arrays(rows={"t": np.zeros((3, 2), np.float32)}),
    ],
)
def test_other_clients_rows_or_parameters_cost_the_whole_reply(reply):
    found = through(ReplyValidator(), {7: reply, 8: updates([3])}, {7: [1, 2], 8: [3]})
    assert list(found) == [8]
