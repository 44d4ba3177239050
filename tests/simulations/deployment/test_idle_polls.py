# SPDX-License-Identifier: Apache-2.0
"""Nodes without a message are answered from memory, and no other caller is."""

import asyncio
import inspect
from base64 import b64encode
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import AsyncMock

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import (
    generate_key_pairs,
    public_key_to_bytes,
    sign_message,
)
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.supernode.fleet_http_client import FleetHttpClient
from starlette.middleware import Middleware
from starlette.testclient import TestClient

from simulations import flower_commands
from simulations.deployment.flower import superlink, supernode
from simulations.deployment.flower.patches import idle_polls
from simulations.deployment.flower.patches.idle_polls import (
    BELIEVED,
    HELD,
    PULL,
    AnswerIdleNodes,
    EmptyQueues,
)
from simulations.deployment.pki import node_signatures

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


async def held(queues, seconds=30.0):
    """A held call of the node; it ends when it is answered."""
    call = asyncio.ensure_future(queues.wait(NODE, seconds))
    await asyncio.sleep(0)
    return call


def waiting_queues():
    queues = EmptyQueues()
    queues.none_found(NODE, 0)
    return queues


def test_a_held_call_ends_when_a_message_is_stored_by_another_thread():
    async def ends():
        queues = waiting_queues()
        call = await held(queues)
        queues.stored(NODE + 1)
        await asyncio.sleep(0.01)
        assert not call.done()
        await asyncio.to_thread(queues.stored, NODE)
        await asyncio.wait_for(call, 10)
        await asyncio.wait_for(queues.wait(NODE, 30.0), 10)  # there is a message: none is held
        assert not queues._held

    asyncio.run(ends())


def test_a_held_call_ends_after_its_time_and_is_removed():
    async def ends():
        queues = waiting_queues()
        await asyncio.wait_for(queues.wait(NODE, 0.01), 10)
        assert not queues._held

    asyncio.run(ends())


def test_a_node_has_one_call_held():
    async def ends():
        queues = waiting_queues()
        first, second = await held(queues), await held(queues)
        await asyncio.wait_for(first, 10)
        assert not second.done() and len(queues._held) == 1
        queues.stored(NODE)
        await asyncio.wait_for(second, 10)

    asyncio.run(ends())


def test_a_superlink_that_ends_answers_held_calls_and_holds_no_more():
    async def ends():
        queues = waiting_queues()
        state = SimpleNamespace(empty_queues=queues)
        factory = SimpleNamespace(state=lambda: state)
        app = SimpleNamespace(state=SimpleNamespace(linkstate_factory=factory))
        call = await held(queues)
        ended = SimpleNamespace(
            config=SimpleNamespace(app=app), on_tick=AsyncMock(return_value=True)
        )
        await idle_polls.until_it_ends(ended)
        await asyncio.wait_for(call, 10)
        await asyncio.wait_for(queues.wait(NODE, 30.0), 10)

    asyncio.run(ends())


def test_a_node_asks_again_at_once_after_an_answer_that_was_held():
    moment = [0.0]
    pace = supernode.NodePace(lambda: moment[0])
    sleeps = [pace(3.0) for _ in range(30)]  # answered at once
    assert sleeps[0] == supernode.FIRST_POLL and sleeps[-1] == 3.0
    moment[0] += sleeps[-1] + supernode.HELD_LONG + 1.0
    assert pace(3.0) == supernode.FIRST_POLL


def test_a_node_keeps_its_connections_from_one_heartbeat_to_the_next(monkeypatch):
    monkeypatch.setattr(httpx, "Client", httpx.Client)
    kept = []
    for keep in (lambda: None, supernode.keep_connections):
        keep()
        with FleetHttpClient.from_server_address("localhost:1", True, None, []) as client:
            kept.append(client._client._transport._pool._keepalive_expiry)
    assert kept == [5.0, supernode.KEPT] and supernode.KEPT > HELD


class Calls:
    """A SuperLink with one node, and the number of calls of its own code."""

    def __init__(self):
        self.queues, self.passed = EmptyQueues(), []
        state = SimpleNamespace(empty_queues=self.queues, nodes={KEY: NODE})
        app = FastAPI(middleware=[Middleware(AnswerIdleNodes, state=state, held=0.01)])

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
        {"media": "text/plain"},
        {"path": "/v1/fleet/push-messages"},
        {"key": b"no key"},
    ],
    ids=["another key", "an old signature", "no protobuf", "another call", "no key"],
)
def test_everything_else_is_left_to_flower_with_its_body(calls, call):
    calls.queues.none_found(NODE, 0)
    assert calls.ask(**call).content == b"usual"
    asked = PullMessagesRequest(node=Node(node_id=NODE)).SerializeToString()
    assert calls.passed == [call.get("body", asked)]


def test_another_nodes_queue_is_not_revealed(calls):
    calls.queues.none_found(NODE + 1, 0)
    assert calls.ask(node=NODE + 1).content == b"usual"  # its key is another one


def test_a_key_is_looked_up_once_until_a_node_is_removed(monkeypatch):
    looked, usual = [], superlink.linkstate_factory.SqlLinkState

    def found(_, key):
        looked.append(key)
        return NODE if len(looked) == 1 else None

    monkeypatch.setattr(usual, "get_node_id_by_public_key", found)
    monkeypatch.setattr(usual, "delete_node", lambda *_: None)
    state = superlink.SuperLinkState(":memory:", SimpleNamespace(), SimpleNamespace())
    assert [state.get_node_id_by_public_key(KEY) for _ in range(2)] == [NODE, NODE]
    assert len(looked) == 1
    state.delete_node("", NODE)
    assert state.get_node_id_by_public_key(KEY) is None
    assert state.get_node_id_by_public_key(KEY) is None and len(looked) == 3


def test_a_web_server_of_a_superlink_asks_it_first(monkeypatch, calls):
    monkeypatch.setattr(uvicorn.Config, "load", uvicorn.Config.load)
    monkeypatch.setattr(uvicorn.Server, "main_loop", uvicorn.Server.main_loop)
    idle_polls.use()
    state = SimpleNamespace(empty_queues=EmptyQueues())
    app = FastAPI()
    app.state.linkstate_factory = SimpleNamespace(state=lambda: state)
    config = uvicorn.Config(app)
    config.load()
    assert isinstance(config.loaded_app, AnswerIdleNodes)
    assert uvicorn.Server.main_loop is idle_polls.until_it_ends
    source = inspect.getsource(inspect.getmodule(flower_commands.load("flower-superlink")))
    assert "uvicorn.run(" in source and "main_loop" in vars(uvicorn.Server)


def test_headers_and_ages_of_signatures_are_flowers():
    assert node_signatures.TIMESTAMP == TIMESTAMP_HEADER
    assert node_signatures.PUBLIC_KEY == FLEET_HTTP_PUBLIC_KEY_HEADER
    assert node_signatures.SIGNATURE == FLEET_HTTP_SIGNATURE_HEADER
    assert node_signatures.EARLIEST == SYSTEM_TIME_TOLERANCE
    assert node_signatures.OLDEST == TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE


def test_flower_answers_an_idle_node_at_once():
    """If this fails, a new version of Flower may hold polls itself."""
    asked = []
    state = SimpleNamespace(get_message_ins=lambda **given: asked.append(given) or [])
    request = PullMessagesRequest(node=Node(node_id=NODE))
    answer = fleet_handlers.pull_messages(request, state, SimpleNamespace())
    assert answer == PullMessagesResponse() and len(asked) == 1
