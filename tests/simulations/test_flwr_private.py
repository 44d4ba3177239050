# SPDX-License-Identifier: Apache-2.0
"""The private parts of Flower that our grids use. If a new version fails here, fix
`simulations/engines/flwr_private.py`."""

import inspect

import pytest
from flwr.app import Context, Error, Message, Metadata, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from simulations.engines import flwr_private
from simulations.engines.flwr_private import identify_server, number, rebuilt

pytestmark = pytest.mark.usefixtures("identity")


@pytest.fixture
def nobody(monkeypatch):
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, None)


def test_task_identity_has_the_three_attributes_that_are_set():
    for name in ("run_id", "node_id", "task_id"):
        assert hasattr(TaskIdentity, f"_{name}"), f"flwr: TaskIdentity._{name} is gone"
        assert isinstance(getattr(type(TaskIdentity), name), property), (
            f"flwr: TaskIdentity.{name} is no property"
        )


def test_without_an_identity_no_message_can_be_made(nobody):
    with pytest.raises(RuntimeError, match="not set"):
        Message(RecordDict(), 2, "train")


def test_with_an_identity_messages_can_be_made(nobody):
    identify_server()
    message = Message(RecordDict(), 2, "train")
    assert message.metadata.src_node_id == flwr_private.SERVER_NODE_ID
    assert message.metadata.dst_node_id == 2


def test_the_identity_of_a_real_flower_task_is_kept(nobody):
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 77, 88, 99
    identify_server()
    assert (TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id) == (77, 88, 99)


def test_a_message_can_be_numbered_and_its_reply_names_the_number():
    message = Message(RecordDict(), 2, "train")
    assert message.metadata.message_id == "", "flwr: messages now number themselves"
    number(message, "message-5")
    assert message.metadata.message_id == "message-5", (
        "flwr: Metadata keeps the message id elsewhere"
    )
    reply = Message(RecordDict(), reply_to=message)
    assert reply.metadata.reply_to_message_id == "message-5" and reply.metadata.src_node_id == 2


def test_a_message_can_be_put_together_from_its_parts():
    message = Message(RecordDict(), 2, "train")
    number(message, "message-6")
    again = rebuilt(message.metadata, RecordDict())
    assert again.metadata.message_id == "message-6", "flwr: Message no longer takes metadata="
    assert isinstance(message.metadata, Metadata)


def test_the_error_code_is_flowers():
    from flwr.common.constant import ErrorCode

    assert ErrorCode.CLIENT_APP_RAISED_EXCEPTION == flwr_private.CLIENT_RAISED
    assert Error(flwr_private.CLIENT_RAISED, "x").reason == "x"


def test_the_public_parts_have_the_shapes_that_are_used():
    assert set(Grid.__abstractmethods__) == {
        "set_run", "run", "create_message", "get_node_ids", "push_messages", "pull_messages",
        "send_and_receive",
    }, "flwr: Grid has other abstract methods"  # fmt: skip
    context = list(inspect.signature(Context).parameters)
    assert context[:5] == [
        "run_id",
        "node_id",
        "node_config",
        "state",
        "run_config",
    ], "flwr: Context was changed"
    assert callable(ClientApp())
