# SPDX-License-Identifier: Apache-2.0
"""Blocks of clients."""

import numpy as np
import pytest
import torch

from fedrec.cohort.batches import Batches
from fedrec.cohort.block import Block, _numbered


@pytest.mark.parametrize("catalogue", [1, 50, 5_000_000])
@pytest.mark.parametrize("order", ["C", "F"])
def test_items_are_numbered_as_numpy_does(catalogue, order):
    """Of clients with no, one and several steps, with padding anywhere."""
    random = np.random.default_rng(catalogue)
    steps = np.array([3, 0, 1, 5, 2])
    references = random.integers(catalogue, size=(steps.sum(), 12))
    real = random.random(references.shape) < 0.7
    real[-2:] = False  # the last client has padding alone
    table, counts, places = _numbered(references.copy(order), real.copy(order), steps)
    ends = steps.cumsum()
    for client, (start, end) in enumerate(zip(ends - steps, ends, strict=True)):
        own = references[start:end][real[start:end]]
        wanted, number = np.unique(own, return_inverse=True)
        assert np.array_equal(table[client, : counts[client]], wanted)
        assert not table[client, counts[client] :].any()
        assert np.array_equal(places[start:end][real[start:end]], number)
    assert not places[~real].any()


def test_weights_are_one_over_the_size_of_a_batch_and_begins_are_steps():
    def cut(count):
        return Batches.cut([(np.arange(count), np.ones(count, dtype=np.float32))] * 3, 4)

    block = Block.of([(), ()], [cut(6), cut(1)], torch.device("cpu"))
    assert block.weights[:, 0].tolist() == [[0.25] * 4, [0.5, 0.5, 0, 0]] * 3
    assert block.weights[:3, 1].tolist() == [[1, 0, 0, 0]] * 3 and not block.weights[3:, 1].any()
    assert block.steps == [6, 3]
    assert block.last_epoch_begins.tolist() == [4, 2]
    losses = torch.arange(12.0).view(6, 2)
    assert block.last_epoch_means(losses).tolist() == [9.0, 5.0]
