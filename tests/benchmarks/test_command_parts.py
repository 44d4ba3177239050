# SPDX-License-Identifier: Apache-2.0
"""Processor time of a command is divided among its parts."""

import threading

import pytest

from benchmarks.contestants import command_parts
from benchmarks.contestants.command_parts import PARTS, Clock
from benchmarks.experiments import parts


@pytest.fixture
def processor(monkeypatch):
    seconds = iter(range(100))
    monkeypatch.setattr(command_parts.time, "process_time", lambda: next(seconds))


def test_time_counts_for_the_innermost_part(processor):
    clock = Clock()
    with clock.part("training"), clock.part("evaluation"):
        pass
    clock.stop()
    spent = {part: seconds for part, seconds in clock.seconds.items() if seconds}
    assert spent == {"training": 2, "evaluation": 1, "else": 1}


def test_what_other_threads_do_counts_for_the_part_that_the_main_thread_is_in(processor):
    clock = Clock()

    def write():
        with clock.part("writing"):
            pass

    thread = threading.Thread(target=write)
    with clock.part("training"):
        thread.start()
        thread.join()
    assert clock.seconds["writing"] == 0 and clock.seconds["training"] == 1


def test_functions_and_class_methods_count_for_their_part(processor):
    class Work:
        @classmethod
        def of(cls, number):
            return cls, number

        def done(self):
            return self

    clock = Clock()
    clock.timed(Work, "of", "data")
    clock.timed(Work, "done", "writing")
    own = Work()
    assert Work.of(3) == (Work, 3) and own.done() is own
    assert clock.seconds["data"] == 1 and clock.seconds["writing"] == 1


@pytest.mark.slow
def test_the_parts_of_a_whole_command():
    found = parts("linear-synthetic")
    assert list(found) == ["sum", *PARTS]
    assert all(seconds > 0 for seconds in found.values())
    assert found["sum"] == pytest.approx(sum(found[part] for part in PARTS))
    assert found["imports"] > found["training"]
