# SPDX-License-Identifier: Apache-2.0
"""The node of a grid that is in a thread of this process."""

import threading
from concurrent.futures import TimeoutError

import pytest
from flwr.app import Message, RecordDict

from fedrec.errors import ClientError
from simulations.engines.flwr_private import identify_server, number
from simulations.engines.node_thread import NodeThread

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def message():
    identify_server()

    def made(identifier):
        message = Message(RecordDict(), 2, "train")
        number(message, identifier)
        return message

    return made


@pytest.fixture
def started():
    """Starts threads, and stops them."""
    threads = []

    def start(work):
        threads.append(NodeThread(work))
        return threads[-1]

    yield start
    for thread in threads:
        thread.close()


def answered(message):
    return Message(RecordDict(), reply_to=message)


def test_messages_are_answered_one_after_the_other_in_another_thread(started, message):
    names, running = [], threading.Lock()

    def work(given):
        assert running.acquire(blocking=False)
        names.append((given.metadata.message_id, threading.current_thread()))
        running.release()
        return answered(given)

    thread = started(work)
    answers = [thread.send(message(name)).result(30) for name in "abc"]
    assert [answer.message.metadata.reply_to_message_id for answer in answers] == list("abc")
    assert [name for name, _ in names] == list("abc")
    assert len({worker for _, worker in names} | {threading.current_thread()}) == 2


def test_errors_are_answers(started, message):
    raised = iter([ClientError("a client failed"), ValueError("a defect"), KeyboardInterrupt()])

    def work(given):
        raise next(raised)

    thread = started(work)
    said = [thread.send(message(name)).result(30).message for name in "abc"]
    assert all(reply.has_error() for reply in said)
    reasons = [reply.error.reason for reply in said]
    assert reasons[0].startswith("a client failed")
    assert "Traceback" in reasons[1] and "ValueError: a defect" in reasons[1]
    assert reasons[2].startswith("KeyboardInterrupt (")


def test_the_sender_need_not_wait(started, message):
    released = threading.Event()

    def work(given):
        released.wait(50)
        return answered(given)

    answer = started(work).send(message("a"))
    with pytest.raises(TimeoutError):
        answer.result(0.05)
    released.set()
    assert not answer.result(30).message.has_error()
