# SPDX-License-Identifier: Apache-2.0
"""Signals of the small world, by hand."""

import numpy as np
import pytest

from fedrec.attacks.signals import fit_signals

SCORES = np.array([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]).repeat(3, axis=0)
USERS = np.array([0, 1, 2])


def test_ranking(world):
    # positives of the training rows: user 0 likes item 0, user 1 item 1 (twice), user 2 none
    population = world()
    assert fit_signals(SCORES, population, USERS, "positives").tolist() == [1.0, 2.0, 0.0]
    assert fit_signals(SCORES, population, USERS, "contrast") == pytest.approx(
        [1 - 20 / 5, 2 - 19 / 5, 0.0]
    )


def test_rating(world):
    # training rows: user 0 rates items 0 and 1 with 5 and 2, user 1 item 1 with 5 and 4, user 2
    # item 5 with 1
    expected = [
        -((1 - 5) ** 2 + (2 - 2) ** 2) / 2,
        -((2 - 5) ** 2 + (2 - 4) ** 2) / 2,
        -((6 - 1) ** 2),
    ]
    assert fit_signals(SCORES, world("rating"), USERS, "contrast") == pytest.approx(expected)


def test_users_without_rows_have_no_signal(world):
    assert fit_signals(SCORES[:1], world("rating"), np.array([3]), "positives").tolist() == [0.0]
