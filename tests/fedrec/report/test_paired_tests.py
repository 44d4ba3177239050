# SPDX-License-Identifier: Apache-2.0
"""Paired tests against scipy, closed forms and worked examples."""

import numpy as np
import pytest
from scipy import stats

from fedrec.report.paired_tests import holm, paired_tests, seed_test


def test_p_values_are_scipys():
    random = np.random.default_rng(3)
    one, other = random.random(60), random.random(60)
    (found,) = paired_tests([one - other])
    assert found.t_p == pytest.approx(stats.ttest_rel(one, other).pvalue)
    assert found.wilcoxon_p == pytest.approx(stats.wilcoxon(one, other).pvalue)
    differences = one - other
    assert found.difference == pytest.approx(differences.mean())
    assert found.effect == pytest.approx(differences.mean() / differences.std(ddof=1))
    assert (found.better, found.worse) == ((differences > 0).sum(), (differences < 0).sum())


def test_rank_effect_by_hand():
    # differences 1, -2, 3: ranks 1, 2, 3; (1 - 2 + 3) / 6
    (found,) = paired_tests([np.array([1.0, -2, 3])])
    assert found.rank_effect == pytest.approx(1 / 3)


def test_hits_of_many_users_by_hand():
    # 60 users gain a hit, 40 lose one: ranks are all 50.5, so the balance is 20 * 50.5 and its
    # variance 100 * 50.5^2
    (found,) = paired_tests([np.repeat([1.0, -1.0, 0.0], [60, 40, 500])])
    assert found.wilcoxon_p == pytest.approx(2 * stats.norm.sf(2))
    assert found.rank_effect == pytest.approx(0.2)


def test_equal_systems_differ_by_nothing():
    (found,) = paired_tests([np.zeros(3)])
    assert (found.difference, found.low, found.high) == (0, 0, 0)
    assert (found.t_p, found.wilcoxon_p, found.effect, found.rank_effect) == (1, 1, 0, 0)


def test_users_without_a_value_do_not_count():
    one, other = np.array([1.0, np.nan, 0.5, 0.25]), np.array([0.5, 1.0, np.nan, 0.5])
    (found,) = paired_tests([one - other])
    assert found.users == 2
    with pytest.raises(ValueError, match="two users"):
        paired_tests([one[:2] - other[:2]])


def test_holm_by_hand():
    # .01 * 4, .02 * 3, .03 * 2 (raised to .06), .04 * 1 (raised to .06)
    np.testing.assert_allclose(holm(np.array([0.02, 0.01, 0.04, 0.03])), [0.06, 0.04, 0.06, 0.06])
    np.testing.assert_allclose(holm(np.array([0.7, 0.9])), [1, 1])


def test_what_was_not_tested_does_not_count_as_a_comparison():
    found = holm(np.array([np.nan, 0.02, 0.5]))
    np.testing.assert_allclose(found, [np.nan, 0.04, 0.5])


def test_seeds_are_tested_as_scipy_does():
    differences = np.array([0.02, 0.05, -0.01])
    found = seed_test(differences)
    assert found.seed_p == pytest.approx(stats.ttest_1samp(differences, 0).pvalue)
    assert (found.common_seeds, found.seed_difference) == (3, pytest.approx(0.02))
    assert np.isnan(seed_test(np.array([0.1])).seed_p)
    assert np.isnan(seed_test(np.full(3, 0.1)).seed_p)


def test_users_with_the_smaller_error_are_served_better():
    (found,) = paired_tests([np.array([-1.0, -2.0, 3.0])], lower_is_better=True)
    assert (found.better, found.worse) == (2, 1)
