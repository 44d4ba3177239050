# SPDX-License-Identifier: Apache-2.0
"""Nodes without a message are answered from memory, and nobody else is."""

from __future__ import annotations

import inspect
from base64 import b64encode
from datetime import timedelta
from types import SimpleNamespace

import pytest
from fastapi import FastAPI, Request, Response
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import (
    generate_key_pairs,
    public_key_to_bytes,
    sign_message,
)
from flwr.superlink import main
from starlette.middleware import Middleware
from starlette.testclient import TestClient

from simulations.deployment.flower import superlink
from simulations.deployment.flower.idle_polls import BELIEVED, PULL, AnswerIdleNodes, EmptyQueues

NODE = 7
PRIVATE, PUBLIC = generate_key_pairs()
KEY = public_key_to_bytes(PUBLIC)


def test_a_queue_is_empty_until_a_message_is_stored_and_not_for_ever():
    moment = [0.0]
    queues = EmptyQueues(lambda: moment[0])
    assert NODE not in queues
    queues.none_found(NODE, queues.messages(NODE))
    assert NODE in queues and NODE + 1 not in queues
    queues.stored(NODE)
    assert NODE not in queues
    queues.none_found(NODE, queues.messages(NODE))
    moment[0] = BELIEVED
    assert NODE not in queues


def test_a_message_stored_while_the_database_is_asked_is_not_missed():
    queues = EmptyQueues()
    before = queues.messages(NODE)
    queues.stored(NODE)
    queues.none_found(NODE, before)
    assert NODE not in queues


class Calls:
    """A SuperLink with one node, and how often its own code was asked."""

    def __init__(self):
        self.queues, self.passed = EmptyQueues(), []
        state = SimpleNamespace(empty_queues=self.queues, get_node_id_by_public_key={KEY: NODE}.get)
        app = FastAPI(middleware=[Middleware(AnswerIdleNodes)])
        app.state.linkstate_factory = SimpleNamespace(state=lambda: state)

        async def usual(request: Request) -> Response:
            self.passed.append(await request.body())
            return Response(b"usual")

        app.post(PULL)(usual)
        app.post("/v1/fleet/push-messages")(usual)
        self._client = TestClient(app)

    def ask(self, node=NODE, path=PULL, body=None, key=KEY, age=0.0, media="application/protobuf"):
        stamp = (now() - timedelta(seconds=age)).isoformat()
        headers = {
            FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(key).decode(),
            FLEET_HTTP_SIGNATURE_HEADER: b64encode(
                sign_message(PRIVATE, stamp.encode("ascii"))
            ).decode(),
            TIMESTAMP_HEADER: stamp,
            "content-type": media,
        }
        asked = PullMessagesRequest(node=Node(node_id=node)).SerializeToString()
        return self._client.post(path, content=asked if body is None else body, headers=headers)


@pytest.fixture
def calls():
    return Calls()


def test_only_a_genuine_node_without_messages_is_answered_from_memory(calls):
    assert calls.ask().content == b"usual" and len(calls.passed) == 1
    calls.queues.none_found(NODE, 0)
    answer = calls.ask()
    assert len(calls.passed) == 1 and answer.status_code == 200
    assert answer.headers["content-type"] == "application/protobuf"
    assert PullMessagesResponse.FromString(answer.content) == PullMessagesResponse()
    calls.queues.stored(NODE)
    assert calls.ask().content == b"usual"


OTHER = public_key_to_bytes(generate_key_pairs()[1])


@pytest.mark.parametrize(
    "call",
    [
        {"key": OTHER},
        {"age": 3600.0},
        {"body": b"\xff\xff"},
        {"media": "text/plain"},
        {"path": "/v1/fleet/push-messages"},
        {"key": b"no key"},
    ],
    ids=["another key", "an old signature", "no message", "no protobuf", "another call", "no key"],
)
def test_everything_else_is_left_to_flower_with_its_body(calls, call):
    calls.queues.none_found(NODE, 0)
    assert calls.ask(**call).content == b"usual"
    asked = PullMessagesRequest(node=Node(node_id=NODE)).SerializeToString()
    assert calls.passed == [call.get("body", asked)]


def test_another_node_s_queue_tells_nothing(calls):
    calls.queues.none_found(NODE + 1, 0)
    assert calls.ask(node=NODE + 1).content == b"usual"  # its key is another one


def test_a_key_is_looked_up_once_until_a_node_is_removed(monkeypatch):
    looked, usual = [], superlink.SqlLinkState

    def found(_, key):
        looked.append(key)
        return NODE if len(looked) == 1 else None

    monkeypatch.setattr(usual, "get_node_id_by_public_key", found)
    monkeypatch.setattr(usual, "delete_node", lambda *_: None)
    state = superlink.TidyLinkState(":memory:", SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    assert [state.get_node_id_by_public_key(KEY) for _ in range(2)] == [NODE, NODE]
    assert len(looked) == 1
    state.delete_node("", NODE)
    assert state.get_node_id_by_public_key(KEY) is None
    assert state.get_node_id_by_public_key(KEY) is None and len(looked) == 3


def test_a_superlink_asks_it_first():
    assert "*extensions.get_middleware()" in inspect.getsource(main._get_middleware)
