# SPDX-License-Identifier: Apache-2.0
"""Statistics of lists by hand, by definition, and in blocks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from fedrec.metrics.beyond_accuracy import ListStatistics, gini


def test_lists_by_hand():
    """Lists of two of four items: 1, 3 and 0, 1; the first user knows 0 and likes it, the second
    knows and likes 3."""
    statistics = ListStatistics(torch.tensor([0.8, 0.4, 0.2, 0.1]), (1, 2))
    scores = torch.tensor([[9.0, 3.0, 1.0, 2.0], [5.0, 4.0, 3.0, 9.0]])
    known = torch.tensor([[True, False, False, False], [False, False, False, True]])
    statistics.add(scores, known, known)
    found = statistics.result()
    assert found["coverage@1"] == 0.5 and found["coverage@2"] == 0.75
    assert found["popularity@1"] == pytest.approx((0.4 + 0.8) / 2)
    assert found["popularity@2"] == pytest.approx((0.25 + 0.6) / 2)
    assert found["popularity-lift@2"] == pytest.approx((0.25 / 0.8 - 1 + 0.6 / 0.1 - 1) / 2)
    assert found["gini@1"] == pytest.approx(0.5) and found["gini@2"] == gini(
        torch.tensor([1, 2, 0, 1])
    )


@pytest.mark.parametrize("seed", range(3))
def test_gini_is_half_the_relative_mean_difference(seed):
    counts = np.random.default_rng(seed).integers(0, 9, 17)
    differences = (
        sum(abs(int(a) - int(b)) for a, b in itertools.product(counts, counts)) / len(counts) ** 2
    )
    assert gini(torch.from_numpy(counts)) == pytest.approx(differences / (2 * counts.mean()))


def test_gini_at_its_ends():
    assert gini(torch.full((6,), 3)) == pytest.approx(0)
    assert gini(torch.tensor([0, 0, 0, 8])) == pytest.approx(1 - 1 / 4)
    assert math.isnan(gini(torch.zeros(4)))


def test_blocks_do_not_matter_and_short_lists_are_short():
    """The last users know all items, or all but one; no list contains a known item."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(30, 12, generator=generator)
    known = torch.rand(30, 12, generator=generator) < 0.3
    known[-2], known[-1] = True, True
    known[-2, 5] = False
    liked = known & (torch.rand(30, 12, generator=generator) < 0.7)
    share = torch.rand(12, generator=generator)
    whole, parts = ListStatistics(share, (3, 20)), ListStatistics(share, (3, 20))
    whole.add(scores, known, liked)
    for rows in torch.arange(30).split(7):
        parts.add(scores[rows], known[rows], liked[rows])
    assert whole.result() == pytest.approx(parts.result())
    offered = (~known).sum(0)
    # the whole catalogue is listed
    assert whole.result()["gini@20"] == pytest.approx(gini(offered))


def test_nobody_is_evaluated():
    found = ListStatistics(torch.ones(3), (2,)).result()
    assert found["coverage@2"] == 0 and all(
        math.isnan(found[f"{name}@2"]) for name in ("gini", "popularity")
    )
