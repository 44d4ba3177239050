# SPDX-License-Identifier: Apache-2.0
"""Negatives are exactly uniform, and do not reveal the held-out items."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from fedrec.data.negatives import draw_negatives
from fedrec.errors import DataError


def test_every_free_item_is_equally_likely():
    positives = np.array([0, 3, 4, 9, 19])
    drawn = draw_negatives(positives, 20, 300_000, np.random.default_rng(0))
    counts = np.bincount(drawn, minlength=20)
    assert counts[positives].sum() == 0
    assert chisquare(np.delete(counts, positives)).pvalue > 1e-3


@given(st.data())
def test_each_rank_maps_to_one_free_item(data):
    num_items = data.draw(st.integers(1, 30))
    positives = np.array(
        sorted(data.draw(st.sets(st.integers(0, num_items - 1), max_size=num_items - 1))), dtype=int
    )

    class Ranks:
        def integers(self, low, high, size):
            assert (low, size) == (0, high)
            return np.arange(high)

    free = np.setdiff1d(np.arange(num_items), positives)
    assert draw_negatives(positives, num_items, len(free), Ranks()).tolist() == free.tolist()


@pytest.mark.parametrize("num_items", [0, 1, 4])
def test_all_items_positive(num_items):
    with pytest.raises(DataError, match="no negative item"):
        draw_negatives(np.arange(num_items), num_items, 1, np.random.default_rng(0))


def test_nothing_asked_nothing_drawn():
    assert draw_negatives(np.array([2]), 5, 0, np.random.default_rng(0)).shape == (0,)


def test_catalogue_size_costs_nothing():
    drawn = draw_negatives(np.arange(0, 2000, 2), 10**15, 1000, np.random.default_rng(0))
    assert drawn.max() < 10**15 and drawn.dtype == np.int64


USERS, ITEMS, TRAINED, ROUNDS = 400, 300, 20, 100


def _times_drawn(excluded: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """How often each item became a negative in all rounds (four per positive)."""
    drawn = [draw_negatives(excluded, ITEMS, 4 * TRAINED, generator) for _ in range(ROUNDS)]
    return np.bincount(np.concatenate(drawn), minlength=ITEMS)


def _expected_hit(score: np.ndarray, item: int, others: np.ndarray, k: int = 10) -> float:
    """Probability that `item` is in the top k among `others`, ties broken at random."""
    above, equal = np.sum(score[others] > score[item]), np.sum(score[others] == score[item])
    return float(np.clip(k - above, 0, equal + 1) / (equal + 1))


def _hits_of_the_count(leaky: bool) -> tuple[float, float]:
    """Mean Hits@10 of the score -(number of draws): among 99 sampled never-seen items, and among
    all of them."""
    generator = np.random.default_rng(7)
    sampled, full = [], []
    for _ in range(USERS):
        own = generator.choice(ITEMS, TRAINED + 1, replace=False)
        train, held_out = np.sort(own[:-1]), own[-1]
        score = -_times_drawn(np.sort(own) if leaky else train, generator)
        never_seen = np.setdiff1d(np.arange(ITEMS), own)
        sampled.append(
            _expected_hit(score, held_out, generator.choice(never_seen, 99, replace=False))
        )
        full.append(_expected_hit(score, held_out, never_seen))
    return float(np.mean(sampled)), float(np.mean(full))


def test_the_number_of_draws_reveals_nothing_about_held_out_items():
    """A score without learning is at chance level: within four binomial standard deviations of 400
    users."""
    sampled, full = _hits_of_the_count(leaky=False)
    for hits, chance in ((sampled, 10 / 100), (full, 10 / (ITEMS - TRAINED))):
        assert abs(hits - chance) < 4 * np.sqrt(chance * (1 - chance) / USERS)


def test_drawing_outside_the_held_out_items_would_betray_them():
    """The same score under the leaky rule, which shows that the test above can fail."""
    sampled, full = _hits_of_the_count(leaky=True)
    assert sampled > 0.9 and full > 0.9
