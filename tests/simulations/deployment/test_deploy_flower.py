# SPDX-License-Identifier: Apache-2.0
"""Flower's parts in a deployment."""

import importlib
import inspect
import os
import sys
import time
from types import SimpleNamespace

import httpx
import pytest
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.corestate import sql_corestate
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers as link_handlers
from flwr.supernode.servicer.runtime import runtime_handlers as node_handlers
from sqlalchemy import event, text
from sqlalchemy.pool import Pool

from fedrec import __version__
from fedrec.errors import ClientError
from fedrec.runtime.process import Backoff
from server.deployed import federation as grid
from simulations import flower_commands
from simulations.deployment import superlink, supernode

# The private parts of Flower that a deployment depends on: if a new version changes one, the test's
# name tells which.


FlowersState = superlink.linkstate_factory.SqlLinkState
superexec = supernode.run_superexec.run_superexec
HANDLERS = (fleet_handlers, link_handlers, node_handlers)
SOURCES = [
    (supernode._load(), "time.sleep(3)", "time.sleep(0.5)"),
    (supernode._load(), "push_object_contents_from_iterable(", " pull_objects("),
    (inflatable_utils.pull_and_inflate_object_from_tree, "pull_objects("),
    (inflatable_utils.push_objects, "push_object_contents_from_iterable("),
    *((part.pull_object, ".get_object(") for part in HANDLERS),
    *((part.push_object, "state.store_object(") for part in HANDLERS),
    (supernode.heartbeat.HeartbeatSender, "HEARTBEAT_DEFAULT_INTERVAL"),
    (sql_corestate, "HEARTBEAT_PATIENCE * HEARTBEAT_DEFAULT"),
    (superexec, "RuntimeHttpClient.from_server_address(", "client.AcquireTask(", "get_executor("),
    (supernode.run_superexec, "time.sleep(task_poll_interval)"),
    (supernode.run_clientapp.run_clientapp, "get_load_client_app_fn(", "install_from_fab(fab"),
    (superlink.linkstate_factory.LinkStateFactory.state, "SqlLinkState("),
    (FlowersState.store_message_and_object_tree, "self.store_message_ins("),
]


@pytest.mark.parametrize(("part", "texts"), [(part, texts) for part, *texts in SOURCES])
def test_flower_calls_by_name_what_is_replaced(part, texts):
    source = inspect.getsource(part)
    assert [text for text in texts if text not in source] == []


def test_flowers_settings_are_those_that_are_replaced():
    assert inspect.ismodule(supernode._load().time)
    for module in (supernode.heartbeat, sql_corestate):
        assert module.HEARTBEAT_DEFAULT_INTERVAL == 30
    sender = inspect.signature(supernode.heartbeat.HeartbeatSender)
    assert list(sender.parameters) == ["heartbeat_fn"]
    # if this fails, a new version of Flower may no longer need `TolerantClient`
    assert "except" not in inspect.getsource(superexec).partition("while True")[2]


def test_a_node_is_lost_after_two_of_our_heartbeats(linked):
    state = linked
    node = state.create_node("", "", b"key", 30.0)
    for beat in (state.activate_node, state.acknowledge_node_heartbeat):
        assert beat(node, 30.0)
        (info,) = state.get_node_info(node_ids=[node])
        assert info.heartbeat_interval == supernode.HEARTBEAT == 15.0


def test_messages_that_were_not_there_in_time_have_the_codes_that_the_grid_knows():
    codes = importlib.import_module("flwr.common.constant").ErrorCode
    assert grid._EXPIRED == (codes.MESSAGE_UNAVAILABLE, codes.REPLY_MESSAGE_UNAVAILABLE)


def test_an_upload_that_lost_its_place_is_begun_again():
    assert grid._passes(ObjectPushError("a", 1, "b")) and not grid._passes(ValueError())


def test_flowers_executor_starts_a_program_for_each_task_and_asks_for_an_executor():
    source = inspect.getsource(superexec)
    usual = supernode.run_superexec.get_executor("subprocess")
    assert "subprocess.Popen(args)" in inspect.getsource(type(usual).launch)
    calls = source + inspect.getsource(supernode.run_superexec.AutoExecPlugin.__mro__[1])
    for name in ("get_eligible_capacity", "launch", "reconcile", "close"):
        assert callable(getattr(supernode._ForkExecutor, name)) and f"executor.{name}" in calls


def test_an_executor_repeats_a_call_that_failed_on_the_server(monkeypatch):
    answers = iter([503, 500, None, 404])

    def acquire(self, request):
        status = next(answers)
        if status is not None:
            asked = httpx.Request("POST", "https://superlink/v1/runtime/acquire-task")
            httpx.Response(status, request=asked).raise_for_status()
        return request

    client = supernode._TolerantClient
    monkeypatch.setattr(supernode, "AGAIN", 0.0)
    monkeypatch.setattr(client.__bases__[0], "AcquireTask", acquire)
    assert client("https://superlink").AcquireTask("task") == "task"
    with pytest.raises(httpx.HTTPStatusError):
        client("https://superlink").AcquireTask("task")


@pytest.mark.parametrize("name", [supernode.SERVER_APP, supernode.CLIENT_APP])
def test_flowers_commands_for_tasks_take_our_arguments(name, monkeypatch):
    taken = {}
    command = inspect.getmodule(flower_commands.load(name))
    (run,) = (part for part in vars(command) if part in ("run_serverapp", "run_clientapp"))
    monkeypatch.setattr(command, run, lambda **given: taken.update(given))
    for part in ("mirror_output_to_queue", "validate_and_resolve_root_certificates"):
        monkeypatch.setattr(command, part, lambda *given: given, raising=False)
    task = SimpleNamespace(runtime_api_address="a:1", token="t", root_certificates_path="ca.crt")
    monkeypatch.setattr(sys, "argv", [])
    supernode._work_on(name, task)
    assert taken["runtime_api_address"] == "a:1" and taken["token"] == "t"
    assert taken["certificates"] == ("ca.crt", False) and taken["parent_pid"] == os.getppid()
    assert taken["runtime_dependency_install"] is False


def test_the_kinds_of_tasks_are_flowers():
    kinds = supernode.run_superexec.AutoExecPlugin.supported_task_types
    for kind in (supernode.SERVER_APP, supernode.CLIENT_APP):
        executor = supernode._ForkExecutor(kind, lambda spec: None, Backoff(1, 1))
        assert executor.get_eligible_capacity(kinds) == ({kind}, set())


def test_the_superlink_waits_for_its_database_as_long_as_we_say(tmp_path):
    """Flower has no setting for it; a call for a message or for a piece fails after 5 s."""
    waits = []
    database = str(tmp_path / "superlink.db")
    store = ObjectStoreFactory(database).store()
    state = superlink._SuperLinkState(database, SimpleNamespace(), store)
    state.initialize()
    listener = (Pool, "checkout", superlink._wait_longer)
    for patch in (lambda: None, superlink._wait_for_database):
        patch()
        for part in (state, store):
            with part.session() as session:
                waits.append(session.execute(text("PRAGMA busy_timeout")).scalar())
    event.remove(*listener)
    assert waits == [5000, 5000, superlink.DATABASE_WAIT_MS, superlink.DATABASE_WAIT_MS]


def test_sleeps_grow_until_there_is_work(monkeypatch):
    backoff = Backoff(0.1, 1.0, growth=2.0)
    assert [backoff.next() for _ in range(6)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    backoff.restart()
    assert backoff.next() == 0.1
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    paced = supernode._PacedTime(lambda seconds: seconds / 2)
    paced.sleep(3)
    assert slept == [1.5] and paced.monotonic() > 0


def test_an_executor_asks_ever_more_rarely_until_there_is_work():
    backoff = Backoff(0.1, 1.0)
    executor = supernode._ForkExecutor(supernode.CLIENT_APP, lambda spec: None, backoff)
    assert backoff.next() < backoff.next()
    executor.launch(SimpleNamespace(task_id=1))
    assert backoff.next() == 0.1
    while executor._children:
        executor.reconcile()


def test_polls_slow_down_without_work_and_are_fast_again_after_a_message():
    pace = supernode._NodePace()
    idle = [pace(3) for _ in range(20)]
    assert idle[0] == 0.1 and sorted(idle) == idle and idle[-1] == 3.0
    looks = [pace(0.5) for _ in range(60)]
    assert looks[0] == 0.03 and sorted(looks) == looks and looks[-1] == 0.5
    assert pace(3) == 0.1 and pace(0.5) == 0.03


@pytest.fixture
def memory(identity, monkeypatch):
    """A SuperNode's state, created as by Flower."""
    factory = supernode.nodestate_factory
    monkeypatch.setattr(factory, "InMemoryNodeState", supernode._SuperNodeState)
    return factory.NodeStateFactory(ObjectStoreFactory()).state()


def test_flower_does_not_answer_for_a_process_that_failed(identity):
    """If this fails, a new version of Flower may no longer need `AnsweringState`."""
    memory = supernode.nodestate_factory.InMemoryNodeState(ObjectStoreFactory().store())
    _, task = received(memory, 1)
    memory.get_messages_legacy(is_reply=False)
    assert memory.finish_task(task, "failed", "killed") and not replies(memory)


def received(memory, number):
    """A message as stored by the SuperNode's loop, and the id of its running task."""
    message = Message(RecordDict(), 1, "train")
    message.metadata.__dict__["_message_id"] = f"message-{number}"
    task = memory.create_task(task_type=supernode.CLIENT_APP, run_id=message.metadata.run_id)
    memory.store_message(message)
    assert memory.claim_task(task) and memory.activate_task(task)
    return message, task


def replies(memory):
    return memory.get_messages_legacy(is_reply=True)


@pytest.mark.parametrize("fetched", [True, False])
def test_a_clients_process_that_ended_without_an_answer_is_answered_for(memory, fetched):
    message, task = received(memory, 1)
    if fetched:
        assert len(memory.get_messages_legacy(is_reply=False)) == 1
    assert memory.finish_task(task, "failed", "killed")
    (reply,) = replies(memory)
    code = importlib.import_module("flwr.common.constant").ErrorCode.CLIENT_APP_CRASHED
    assert reply.error.code == code
    assert reply.metadata.reply_to_message_id == message.metadata.message_id
    assert not replies(memory)


def test_one_that_failed_with_an_answer_is_not_answered_for_again(memory):
    message, task = received(memory, 1)
    memory.get_messages_legacy(is_reply=False)
    answer(memory, message, "own")
    memory.finish_task(task, "failed", "later")
    assert [reply.metadata.message_id for reply in replies(memory)] == ["own"]


def test_one_that_fails_late_does_not_answer_the_next_message(memory):
    first, task = received(memory, 1)
    memory.delete_messages(message_ids=[first.metadata.message_id])  # as after its reply was sent
    received(memory, 2)
    memory.finish_task(task, "failed", "late")
    assert not replies(memory)


def answer(memory, message, name):
    """The reply of a client's process."""
    reply = Message(RecordDict(), reply_to=message)
    reply.metadata.__dict__["_message_id"] = name
    memory.store_message(reply)


def test_a_reply_to_a_message_that_was_given_up_is_not_taken_for_the_next_ones(memory):
    """If a run is stopped while its message arrives, the loop forgets it, and its process replies
    later."""
    given_up, _ = received(memory, 1)
    message, _ = received(memory, 2)
    assert [m.metadata.message_id for m in memory.get_messages_legacy(is_reply=False)] == [
        "message-2"
    ]
    answer(memory, given_up, "late")
    assert not replies(memory)
    answer(memory, message, "own")
    assert [reply.metadata.message_id for reply in replies(memory)] == ["own"]


def test_what_is_done_is_not_kept(memory):
    for number in range(20):
        message, task = received(memory, number)
        answer(memory, message, f"reply-{number}")
        memory.finish_task(task, "completed", "")
    assert len(memory.task_store) == 1 and len(memory.msg_store) <= 2
    assert not memory.finish_task(task - 1, "failed", "late")


def test_a_node_runs_its_own_code_and_only_with_its_own_version():
    assert isinstance(supernode._own_app("fedrec/fedrec", __version__, "whatever"), ClientApp)
    if __version__ != "0+unknown":
        with pytest.raises(ClientError, match="different versions"):
            supernode._own_app("fedrec/fedrec", "99.0", "whatever")


@pytest.fixture
def linked(tmp_path):
    """A SuperLink's state with the patches."""
    store = ObjectStoreFactory().store()
    state = superlink._SuperLinkState(str(tmp_path / "superlink.db"), SimpleNamespace(), store)
    state.initialize()
    return state
