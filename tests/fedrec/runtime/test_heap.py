# SPDX-License-Identifier: Apache-2.0
"""Memory in reference cycles is released on request, and large arrays are used again."""

import gc
import resource
import sys
import weakref

import pytest
import torch

from fedrec.runtime import heap


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


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_the_memory_of_a_freed_array_is_used_again():
    """Writing to it is then no work of the system."""

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(2**24)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert min(faults() for _ in range(3)) > 1000  # in pages of 4 KiB there are 16,384
    with heap.reused_heap():
        faults()
        assert faults() < 100
