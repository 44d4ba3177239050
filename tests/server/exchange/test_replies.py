# SPDX-License-Identifier: Apache-2.0
"""Replies: which are accepted, and the error if too many failed."""

import logging

import pytest
from flwr.app import Error, Message, RecordDict

from fedrec.errors import ClientError
from server.exchange.dropped_replies import DroppedReplies
from server.exchange.replies import answers, is_refusal, reason_of

pytestmark = pytest.mark.usefixtures("identity")


def replies(good, *errors):
    asked = [Message(RecordDict(), 2 + place, "train") for place in range(good + len(errors))]
    failed = [
        Message(Error(2, text), reply_to=message)
        for text, message in zip(errors, asked, strict=False)
    ]
    return failed + [Message(RecordDict(), reply_to=message) for message in asked[len(errors) :]]


def refused(found, **settings):
    with pytest.raises(ClientError) as caught:
        answers(found, **settings)
    return caught.value


def test_all_good():
    found = replies(3)
    assert answers(iter(found), sent=[2, 3, 4], max_failures=0.0) == found
    assert answers([], sent=[], max_failures=0.0) == []


def test_one_failure_is_too_many_by_default_and_its_text_is_shown():
    error = refused(
        replies(2, "client 7 failed\n  got: ZeroDivisionError\n", "other"),
        sent=[2, 3, 4, 5],
        max_failures=0.0,
    )
    assert error.problem == "2 of 4 nodes failed"
    assert error.got == "client 7 failed\n  got: ZeroDivisionError" and "max-failures" in error.fix


@pytest.mark.parametrize(("share", "fine"), [(0.25, True), (0.249, False), (1.0, True)])
def test_a_share_of_failures_is_tolerated(share, fine, caplog):
    found = replies(3, "client 7 failed")
    with caplog.at_level(logging.WARNING, "fedrec"):
        if fine:
            assert answers(found, sent=[2, 3, 4, 5], max_failures=share) == found[1:]
        else:
            assert f"{share:g}" in refused(found, sent=[2, 3, 4, 5], max_failures=share).expected
    assert "node 2 failed: client 7 failed" in caplog.text


def test_a_missing_reply_is_a_failure(caplog):
    error = refused(replies(3), sent=[2, 3, 4, 5], max_failures=0.0)
    assert error.problem == "1 of 4 nodes failed" and error.got == "no answer in time"
    assert "engine.timeout" in error.fix and "1 of 4 nodes did not answer in time" in caplog.text
    assert len(answers(replies(3), sent=[2, 3, 4, 5], max_failures=0.3)) == 3


def test_all_nodes_may_fail_if_all_failures_are_tolerated():
    assert answers(replies(0, "a", "b"), sent=[2, 3], max_failures=1.0) == []


def test_failed_and_missing_replies_are_recorded_with_their_nodes():
    dropped = DroppedReplies()
    answers(replies(1, "no room"), sent=[2, 3, 9], max_failures=1.0, dropped=dropped)
    assert dropped.columns() == {
        "dropped-replies": 2,
        "bounded-replies": 0,
        "dropped-or-bounded": "node 2: failed: no room; node 9: no answer in time",
    }


def test_a_nodes_error_is_read_without_the_class_of_its_exception():
    error = Error(2, "<class 'fedrec.errors.RefusalError'>:<'no room\n  got: 'x''>")
    assert reason_of(error) == "no room\n  got: 'x'" and is_refusal(error)
    other = Error(2, "<class 'fedrec.errors.ClientError'>:<'RefusalError'>")
    assert reason_of(other) == "RefusalError" and not is_refusal(other)
    assert reason_of(Error(0, "ended by signal 9")) == "ended by signal 9"
