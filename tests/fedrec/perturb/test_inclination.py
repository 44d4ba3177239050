# SPDX-License-Identifier: Apache-2.0
"""Item-group inclination and stereotypicality by hand."""

import numpy as np
import pytest

from fedrec.perturb.targeted.inclination import inclination, stereotypicality


def test_two_groups_by_hand():
    """Group 0 is users 0 and 1, group 1 users 2, 3 and 4; user 5 has no group. Item 3 has no
    rows."""
    groups = np.array([0, 0, 1, 1, 1, -1])
    users = np.array([0, 0, 0, 1, 2, 3, 4, 4, 5, 5])
    items = np.array([0, 0, 1, 1, 0, 0, 2, 2, 2, 3])
    inside, outside = inclination(users, items, groups, num_groups=2, num_items=5)
    assert inside == pytest.approx(np.array([[1 / 2, 1, 0, 0, 0], [2 / 3, 0, 1 / 3, 0, 0]]))
    assert outside == pytest.approx(inside[::-1])
    score = stereotypicality(inside, outside)
    assert score[0] == pytest.approx([(1 / 2 - 2 / 3) / (2 / 3), 1, -1, 0, 0])
    assert score[1] == pytest.approx(-score[0])  # the sign I_a(u) of equation 1


def test_three_groups_are_each_compared_with_all_others():
    groups = np.array([0, 1, 2, 2])
    users, items = np.array([0, 2, 3, 1]), np.array([0, 0, 1, 1])
    inside, outside = inclination(users, items, groups, num_groups=3, num_items=2)
    assert inside == pytest.approx(np.array([[1, 0], [0, 1], [1 / 2, 1 / 2]]))
    assert outside == pytest.approx(np.array([[1 / 3, 2 / 3], [2 / 3, 1 / 3], [1 / 2, 1 / 2]]))
    assert stereotypicality(inside, outside)[0] == pytest.approx([2 / 3, -1])


def test_a_group_of_everybody_has_an_empty_complement():
    inside, outside = inclination(
        np.array([0]), np.array([0]), np.array([0]), num_groups=1, num_items=1
    )
    assert inside.tolist() == [[1.0]] and outside.tolist() == [[0.0]]
