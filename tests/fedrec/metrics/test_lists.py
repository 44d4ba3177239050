# SPDX-License-Identifier: Apache-2.0
"""Metrics of all users' lists by hand, by definition, and in blocks."""

import itertools
import math

import numpy as np
import pytest
import torch

from fedrec.evaluation.metrics import Metrics
from fedrec.evaluation.table import Evaluated
from fedrec.experiment.tables import EvaluationConfig
from fedrec.metrics.block import RankedBlock
from fedrec.metrics.concentration import gini


def measured(scores, known, liked, popularity, ks, size=100):
    """The metrics of lists, from the sums of blocks of some size."""
    metrics = Metrics("ranking", EvaluationConfig(ks=ks))
    parts = []
    for rows in torch.arange(len(scores)).split(size):
        nothing = torch.zeros_like(known[rows])
        masks = {"seen": known[rows], "known": known[rows], "relevant": nothing}
        block = RankedBlock(scores[rows], ks=ks, **masks)
        block.liked, block.popularity = liked[rows], popularity.double()
        columns = metrics.of_block(block)
        parts.append(Evaluated(rows.numpy(), columns, metrics.sums(block)))
    return metrics.of_sums(Evaluated.joined(parts).sums)


def test_lists_by_hand():
    """Lists of two of four items: 1, 3 and 0, 1; the first user knows 0 and likes it, the second
    knows and likes 3."""
    scores = torch.tensor([[9.0, 3.0, 1.0, 2.0], [5.0, 4.0, 3.0, 9.0]])
    known = torch.tensor([[True, False, False, False], [False, False, False, True]])
    found = measured(scores, known, known, torch.tensor([0.8, 0.4, 0.2, 0.1]), (1, 2))
    assert found["coverage@1"] == 0.5 and found["coverage@2"] == 0.75
    assert found["popularity@1"] == pytest.approx((0.4 + 0.8) / 2)
    assert found["popularity@2"] == pytest.approx((0.25 + 0.6) / 2)
    assert found["popularity-lift@2"] == pytest.approx((0.25 / 0.8 - 1 + 0.6 / 0.1 - 1) / 2)
    assert found["gini@1"] == pytest.approx(0.5)
    assert found["gini@2"] == gini(np.array([1, 2, 0, 1]))


@pytest.mark.parametrize("seed", range(3))
def test_gini_is_half_the_relative_mean_difference(seed):
    counts = np.random.default_rng(seed).integers(0, 9, 17)
    differences = (
        sum(abs(int(a) - int(b)) for a, b in itertools.product(counts, counts)) / len(counts) ** 2
    )
    assert gini(counts) == pytest.approx(differences / (2 * counts.mean()))


def test_gini_at_its_ends():
    assert gini(np.full(6, 3)) == pytest.approx(0)
    assert gini(np.array([0, 0, 0, 8])) == pytest.approx(1 - 1 / 4)
    assert math.isnan(gini(np.zeros(4)))


def test_blocks_do_not_matter_and_short_lists_are_short():
    """The last users know all items, or all but one; no list contains a known item."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(30, 12, generator=generator)
    known = torch.rand(30, 12, generator=generator) < 0.3
    known[-2] = True
    known[-1] = True
    known[-2, 5] = False
    liked = known & (torch.rand(30, 12, generator=generator) < 0.7)
    given = (scores, known, liked, torch.rand(12, generator=generator), (3, 20))
    whole = measured(*given)
    assert whole == pytest.approx(measured(*given, size=7))
    # the whole catalogue is listed
    assert whole["gini@20"] == pytest.approx(gini((~known).sum(0).numpy()))


def test_a_user_who_likes_only_what_nobody_likes_has_no_lift():
    scores = torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.0, 0.0]])
    known = torch.tensor([[False, False, True], [True, False, False]])
    found = measured(scores, known, known, torch.tensor([0.5, 0.25, 0.0]), (1,))
    assert found["popularity-lift@1"] == pytest.approx(0.25 / 0.5 - 1)
