# SPDX-License-Identifier: Apache-2.0
"""Intervals of proportions, against scipy and by their coverage."""

import numpy as np
import pytest
from scipy import stats

from fedrec.attacks.intervals import (
    clopper_pearson,
    exact_lower,
    exact_upper,
    mean_of,
    wilson,
)

CASES = [(0, 10), (1, 10), (5, 10), (10, 10), (3, 250), (499, 500), (17, 1000)]


@pytest.mark.parametrize(("successes", "trials"), CASES)
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.999])
def test_equal_to_scipy(successes, trials, confidence):
    test = stats.binomtest(successes, trials)
    exact = test.proportion_ci(confidence, "exact")
    assert clopper_pearson(successes, trials, confidence) == pytest.approx(
        (exact.low, exact.high), abs=1e-10
    )
    score = test.proportion_ci(confidence, "wilson")
    assert wilson(successes, trials, confidence) == pytest.approx(
        (score.low, score.high), abs=1e-10
    )


def test_one_sided_limits_are_quantiles_of_beta():
    assert exact_upper(3, 50, 0.01) == pytest.approx(stats.beta.ppf(0.99, 4, 47), abs=1e-10)
    assert exact_lower(3, 50, 0.01) == pytest.approx(stats.beta.ppf(0.01, 3, 48), abs=1e-10)
    assert exact_lower(0, 50, 0.01) == 0.0 and exact_upper(50, 50, 0.01) == 1.0


@pytest.mark.parametrize("share", [0.02, 0.3, 0.5])
def test_an_exact_limit_has_its_coverage(share):
    count = np.arange(61)
    right = np.array([exact_upper(int(n), 60, 0.05) >= share for n in count])
    assert stats.binom.pmf(count, 60, share)[right].sum() >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(0.5, 0.5), (0.9, 0.2), (0.05, 0.95)])
def test_the_interval_of_a_mean_of_two_has_about_its_coverage(first, second):
    n, m, covered = 40, 25, 0.0
    for a, chance_a in enumerate(stats.binom.pmf(np.arange(n + 1), n, first)):
        for b, chance_b in enumerate(stats.binom.pmf(np.arange(m + 1), m, second)):
            low, high = mean_of([(a, n), (b, m)])
            covered += chance_a * chance_b * (low <= (first + second) / 2 <= high)
    assert 0.93 < covered < 0.99


@pytest.mark.slow
def test_the_interval_of_a_mean_of_three_has_about_its_coverage():
    shares, trials = np.array([0.2, 0.6, 0.9]), np.array([30, 20, 40])
    drawn = np.random.default_rng(0).binomial(trials, shares, size=(1500, 3))
    ends = np.array(
        [mean_of(list(zip(hits.tolist(), trials.tolist(), strict=True))) for hits in drawn]
    )
    covered = ((ends[:, 0] <= shares.mean()) & (shares.mean() <= ends[:, 1])).mean()
    assert 0.93 < covered < 0.98
    assert mean_of([(3, 10)]) == pytest.approx(wilson(3, 10))


def test_without_a_trial_everything_is_possible():
    assert wilson(0, 0) == (0.0, 1.0) and clopper_pearson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize("bad", [(3, 2, 0.95), (-1, 2, 0.95), (1, 2, 1.0)])
def test_wrong_input_is_refused(bad):
    for interval in (wilson, clopper_pearson):
        with pytest.raises(ValueError, match="Expected"):
            interval(*bad)
