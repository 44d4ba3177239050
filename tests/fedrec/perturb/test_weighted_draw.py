# SPDX-License-Identifier: Apache-2.0
"""Draws by inverting a distribution function, against cumulative sums and by chi-square."""

import numpy as np
import pytest
from scipy.stats import chisquare

from fedrec.perturb.synthesis.substitutes import drawn_by_weight


@pytest.mark.parametrize("items", [1, 255, 256, 257, 900])
def test_items_are_those_of_the_cumulative_sums(items):
    random = np.random.default_rng(items)
    weights = random.integers(0, 4, (6, items)).astype(np.float32)  # whole numbers: sums are exact
    weights[:, items // 2] = 1
    uniform = random.random((6, 16))
    sums = weights.cumsum(axis=1)
    wanted = [
        np.searchsorted(own, shares * own[-1], side="right")
        for own, shares in zip(sums, uniform, strict=True)
    ]
    assert (drawn_by_weight(weights, uniform) == np.array(wanted)).all()


def test_counts_follow_the_weights():
    """Chi-square over a catalogue of four blocks, one of them without any weight."""
    random = np.random.default_rng(0)
    weights = random.exponential(1, (1, 1000)).astype(np.float32)
    weights[0, 256:512] = 0
    found = drawn_by_weight(weights, random.random((1, 200_000)))
    seen, likely = np.bincount(found[0], minlength=1000), weights[0] > 0
    assert not seen[~likely].any()
    chance = weights[0, likely].astype(float)
    assert chisquare(seen[likely], chance / chance.sum() * 200_000).pvalue > 1e-3


def test_nothing_without_weight_is_drawn_at_either_end():
    """The smallest and the largest share, with weight in the middle alone."""
    weights = np.zeros((1, 800), dtype=np.float32)
    weights[0, [300, 310]] = 0.1, 0.3
    found = drawn_by_weight(weights, np.array([[0.0, np.nextafter(1.0, 0.0)]]))
    assert found.tolist() == [[300, 310]]


def test_a_share_behind_the_last_weight_gets_the_last_item():
    """As caused by rounding of the sums."""
    weights = np.zeros((1, 800), dtype=np.float32)
    weights[0, [300, 310]] = 0.1, 0.3
    assert drawn_by_weight(weights, np.array([[1.0]])).tolist() == [[310]]
