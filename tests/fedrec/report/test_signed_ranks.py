# SPDX-License-Identifier: Apache-2.0
"""Wilcoxon's signed-rank test beside SciPy's, with and without ties, around the sizes up to which
which distributions are exact."""

import numpy as np
import pytest
from scipy import stats

from fedrec.report.signed_ranks import signed_ranks


@pytest.mark.parametrize("users", [1, 2, 12, 13, 14, 49, 50, 51, 800, 6040])
@pytest.mark.parametrize("values", [None, 2, 20])
def test_p_values_are_scipys(users, values):
    random = np.random.default_rng(users)
    differences = random.standard_normal(users) + 0.1
    if values is not None:  # few values, so that ranks are shared
        differences = np.ceil(differences * values) / values
        differences[0] = 1.0
    moved = differences[differences != 0]
    found = signed_ranks(differences)
    assert found.p == pytest.approx(stats.wilcoxon(moved).pvalue, rel=1e-9, abs=1e-300)
    ranks = stats.rankdata(np.abs(moved))
    assert found.effect == pytest.approx((ranks * np.sign(moved)).sum() / ranks.sum())


def test_hits_of_many_users_by_hand():
    # 60 users gain a hit, 40 lose one: ranks are all 50.5, so the balance is 20 * 50.5 and its
    # variance 100 * 50.5^2
    found = signed_ranks(np.repeat([1.0, -1.0, 0.0], [60, 40, 500]))
    assert found.p == pytest.approx(2 * stats.norm.sf(2))
    assert found.effect == pytest.approx(0.2)


def test_nobody_differs():
    found = signed_ranks(np.zeros(100))
    assert (found.p, found.effect) == (1, 0)


def test_a_very_sure_difference_has_a_small_p_value():
    assert 0 < signed_ranks(np.arange(1.0, 1001)).p < 1e-100
