# SPDX-License-Identifier: Apache-2.0
"""The number of protected interactions, and their selection."""

from decimal import ROUND_CEILING, Decimal

import numpy as np
import pytest

from fedrec.perturb.targeted.selection import at_random, most_stereotypical, protected_count


@pytest.mark.parametrize("budget", ["0.0", "0.1", "0.3", "0.4", "0.7", "0.9", "1.0"])
@pytest.mark.parametrize("rows", [1, 5, 10, 165, 2000])
def test_the_count_is_the_ceiling_of_the_decimal_fraction(budget, rows):
    """In floats (1 - .7) * 10 is above 3, and its ceiling 4."""
    want = ((1 - Decimal(budget)) * rows).to_integral_value(ROUND_CEILING)
    assert protected_count(rows, float(budget)) == int(want)


def test_the_highest_scores_are_taken():
    scores = np.array([0.1, -1.0, 0.9, 0.3])
    assert most_stereotypical(scores, 2, np.random.default_rng(0)).tolist() == [2, 3]
    assert most_stereotypical(scores, 0, np.random.default_rng(0)).tolist() == []


def test_ties_are_broken_at_random():
    random = np.random.default_rng(0)
    taken = np.bincount(
        np.concatenate([most_stereotypical(np.zeros(5), 1, random) for _ in range(500)]),
        minlength=5,
    )
    assert taken.min() > 60 and taken.max() < 140  # 100 each; five standard deviations are 45


def test_random_places_are_uniform_and_distinct():
    random = np.random.default_rng(1)
    drawn = [at_random(6, 3, random) for _ in range(600)]
    assert all(len(set(places.tolist())) == 3 and (np.diff(places) > 0).all() for places in drawn)
    counts = np.bincount(np.concatenate(drawn), minlength=6)
    assert abs(counts - 300).max() < 62  # five standard deviations
