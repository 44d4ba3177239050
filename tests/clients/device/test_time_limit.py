# SPDX-License-Identifier: Apache-2.0
"""Work on a message ends at its time limits."""

import os
import signal
import time

import pytest

from clients.device.time_limit import ended_after, seconds_left
from fedrec.runtime.forks import Fork


def status_after(processor, elapsed, work):
    def limited():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not pytest's, as on a node
        with ended_after(processor, elapsed):
            work()

    return os.waitpid(Fork(limited).pid, 0)[1]


def busy(seconds=60.0):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.mark.parametrize(
    ("limits", "work", "ended"),
    [
        ((0.01, 0), busy, signal.SIGVTALRM),
        ((0, 0.01), busy, signal.SIGALRM),
        ((60, 0.01), lambda: time.sleep(60), signal.SIGALRM),
    ],
)
def test_a_process_that_works_longer_is_ended(limits, work, ended):
    status = status_after(*limits, work)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == ended


@pytest.mark.parametrize("limits", [(60.0, 60.0), (0, 0)])
def test_work_within_the_limits_is_left_alone(limits):
    assert status_after(*limits, lambda: busy(0.02)) == 0


@pytest.mark.parametrize(
    ("now", "left"),
    [
        (1000.0, 120.0),
        (1050.0, 70.0),
        (1119.0, 1.0),
        (900.0, 120.0),  # this clock is behind
        (2000.0, 120.0),  # this clock is ahead
    ],
)
def test_an_answer_is_awaited_until_its_message_is_invalid(now, left):
    assert seconds_left(1000.0, 120.0, now) == left
