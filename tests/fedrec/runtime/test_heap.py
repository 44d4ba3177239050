# SPDX-License-Identifier: Apache-2.0
"""Memory in reference cycles is released on request."""

import gc
import weakref

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
