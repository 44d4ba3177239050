# SPDX-License-Identifier: Apache-2.0
"""Work on a message ends at its time limit."""

from __future__ import annotations

import os
import signal
import time

from clients.device.time_limit import ended_after
from fedrec.runtime.forks import forked


def status_after(limit):
    def work():
        with ended_after(limit):
            end = time.process_time() + (0.05 if limit > 1 else 60)
            while time.process_time() < end:
                pass

    return os.waitpid(forked(work), 0)[1]


def test_a_process_that_works_longer_is_ended():
    status = status_after(0.01)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGVTALRM


def test_work_within_the_limit_is_left_alone():
    assert status_after(60.0) == 0
