# SPDX-License-Identifier: Apache-2.0
"""The serial grid: nodes in this process that do not affect each other."""

import traceback

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from simulations.engines.serial import SerialGrid


def contexts(count):
    return [
        Context(1, 2 + place, {"partition-id": place}, RecordDict(), {}) for place in range(count)
    ]


def shared():
    arrays = ArrayRecord({"w": Array(np.arange(3, dtype=np.float32))})
    return RecordDict({"arrays": arrays, "config": ConfigRecord({"rate": 0.5, "list": [1, 2]})})


@pytest.fixture
def vandal():
    """Its ClientApp reports its message, then edits every part of it in place."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        arrays, config = message.content["arrays"], message.content["config"]
        given = {
            "sum": float(arrays["w"].numpy().sum()),
            "rate": config["rate"],
            "list": list(config["list"]),
        }
        arrays["w"].numpy()[:] = -1
        arrays["w"] = Array(np.full(3, 100, np.float32))
        config["rate"] = 99.0
        config["list"].append(3)
        message.content["more"] = ConfigRecord()
        context.state["count"] = ConfigRecord({"n": len(context.state) + 1})
        place = context.node_config["partition-id"]
        return Message(
            RecordDict({"metrics": MetricRecord({**given, "place": place})}), reply_to=message
        )

    return SerialGrid(app, contexts(3))


def test_a_client_that_edits_its_message_does_not_change_the_others(vandal):
    content = shared()
    replies = vandal.send_and_receive(
        [Message(content, node, "train") for node in vandal.get_node_ids()]
    )
    for place, reply in enumerate(replies):
        assert dict(reply.content["metrics"]) == {
            "sum": 3.0,
            "rate": 0.5,
            "list": [1, 2],
            "place": place,
        }
    assert content["arrays"]["w"].numpy().tolist() == [0, 1, 2]
    assert set(content) == {"arrays", "config"}
    assert dict(content["config"]) == {"rate": 0.5, "list": [1, 2]}


def test_replies_come_in_the_order_of_the_messages(vandal):
    # more than ten messages, so that numerical and alphabetical order differ
    nodes = [4, 2, 3, 2, 4] * 6
    replies = vandal.send_and_receive([Message(shared(), node, "train") for node in nodes])
    assert [reply.metadata.src_node_id for reply in replies] == nodes
    assert vandal.send_and_receive([]) == []


def test_messages_can_be_pushed_and_pulled(vandal):
    first = vandal.push_messages([Message(shared(), node, "train") for node in (2, 3)])
    second = vandal.push_messages([Message(shared(), 4, "train")])
    assert len({*first, *second}) == 3
    (reply,) = vandal.pull_messages(second)
    assert reply.metadata.reply_to_message_id == second[0]
    assert {reply.metadata.reply_to_message_id for reply in vandal.pull_messages(first)} == set(
        first
    )
    assert list(vandal.pull_messages(first)) == []


def test_create_message_and_run_as_flower_has_them(vandal):
    message = vandal.create_message(shared(), "train", 3, "group", 60.0)
    assert (message.metadata.dst_node_id, message.metadata.group_id, message.metadata.ttl) == (
        3,
        "group",
        60.0,
    )
    vandal.set_run("a run")
    assert vandal.run == "a run"


def test_an_error_comes_through_with_its_traceback(identity):
    app = ClientApp()

    @app.train()
    def train(message, context):
        return taste(message)

    def taste(message):
        raise ZeroDivisionError("no taste")

    grid = SerialGrid(app, contexts(1))
    with pytest.raises(ZeroDivisionError, match="no taste") as caught:
        grid.send_and_receive([Message(shared(), 2, "train")])
    assert "taste" in {frame.name for frame in traceback.extract_tb(caught.value.__traceback__)}
