# SPDX-License-Identifier: Apache-2.0
"""Memory in reference cycles is released on request and looked for less often, and large arrays
are used again."""

import gc
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest

from fedrec.runtime import heap
from simulations.cli.experiments.finishing import interruptible


class Node:
    pass


def test_a_cycle_of_references_is_freed(monkeypatch):
    monkeypatch.setattr(heap, "gc", gc)  # tests of runs do without
    node = Node()
    node.itself = node
    freed = weakref.ref(node)
    gc.disable()
    try:
        del node
        assert freed() is not None
        heap.release_free_heap()
        assert freed() is None
    finally:
        gc.enable()


def test_cycles_are_looked_for_less_often(monkeypatch):
    monkeypatch.setattr(heap, "gc", gc)
    before = gc.get_threshold()
    try:
        heap.collect_rarely()
        assert all(new >= old for new, old in zip(gc.get_threshold(), before, strict=True))
        assert gc.get_threshold()[0] > 10 * before[0] > 0
    finally:
        gc.set_threshold(*before)


EXCLUDED = """
import gc, runpy, sys
heap = runpy.run_path(sys.argv[1])
modules = len(gc.get_objects())
heap["exclude_modules"]()
node = {}
node["itself"] = node
del node
assert len(gc.get_objects()) < modules / 10 and gc.get_freeze_count() >= modules
assert gc.collect() == 1
"""


def test_what_exists_before_a_command_works_is_not_looked_at_again():
    subprocess.run([sys.executable, "-c", EXCLUDED, heap.__file__], check=True)


def test_commands_that_run_experiments_exclude_them(monkeypatch):
    done = []
    collector = SimpleNamespace(
        freeze=lambda: done.append("excluded"), set_threshold=lambda *own: done.append(own)
    )
    monkeypatch.setattr(heap, "gc", collector)
    heap.collect_after_imports()
    with interruptible("the same command continues"):
        done.append("work")
    (most, *_), *rest = done
    (_, (fewer, *_), _) = rest
    assert rest == ["excluded", (fewer, 20, 20), "work"] and most > 10 * fewer


FAULTS = """
import resource, runpy, sys
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"1" * 2**26
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
outside = min(faults() for _ in range(3))
with runpy.run_path(sys.argv[1])["reused_heap"]():
    faults()
    print(outside, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_the_memory_of_a_freed_array_is_used_again():
    """Writing to it is then no work of the system. In a process of its own, whose heap is not in
    pieces."""
    command = [sys.executable, "-c", FAULTS, heap.__file__]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    outside, inside = map(int, found)
    assert inside < outside / 4  # outside: 16,384 pages of 4 KiB, or fewer of 2 MiB


ROUNDS = """
import resource, runpy, sys
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    updates = [b"1" * 2**21 for _ in range(60)]
    del updates
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
runpy.run_path(sys.argv[1])["keep_free_heap"]()
print(faults(), faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_what_a_round_frees_is_used_again_in_the_next():
    command = [sys.executable, "-c", ROUNDS, heap.__file__]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    first, second = map(int, found)
    assert second < first / 4  # first: 120 MiB in pages
