# SPDX-License-Identifier: Apache-2.0
"""Figures of an attack, against scikit-learn and against mechanisms whose limits are known."""

import math

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics

from fedrec.attacks.success import found_ceiling, measure
from fedrec.privacy.explain import attack_ceiling


@pytest.fixture(params=[False, True], ids=["distinct", "ties"])
def attacked(request):
    """Scores and membership of 300 users; members score slightly higher."""
    random = np.random.default_rng(4)
    member = random.random(300) < 0.6
    scores = random.normal(size=300) + 0.7 * member
    return (np.round(scores) if request.param else scores), member


def test_equal_to_scikit_learn(attacked):
    scores, member = attacked
    found = measure(scores, member, threshold=0.3, wanted=0.05)
    answer = scores > 0.3
    assert found.accuracy.value == pytest.approx(metrics.accuracy_score(member, answer))
    assert found.balanced_accuracy.value == pytest.approx(
        metrics.balanced_accuracy_score(member, answer)
    )
    assert found.auc.value == pytest.approx(metrics.roc_auc_score(member, scores))
    alarms, hits, _ = metrics.roc_curve(member, scores, drop_intermediate=False)
    assert found.found.value == pytest.approx(hits[alarms <= 0.05].max())
    assert found.false_alarms == pytest.approx(alarms[alarms <= 0.05].max())
    assert found.majority == max(member.mean(), 1 - member.mean())
    exact = stats.binomtest(round(found.found.value * found.members), found.members).proportion_ci(
        0.95, "exact"
    )
    assert (found.found.low, found.found.high) == pytest.approx((exact.low, exact.high))


def test_the_interval_of_the_area_is_that_of_all_pairs(attacked):
    scores, member = attacked
    inside, outside = scores[member][:, None], scores[~member][None]
    won = (inside > outside) + 0.5 * (inside == outside)
    variance = won.mean(1).var(ddof=1) / len(inside) + won.mean(0).var(ddof=1) / outside.shape[1]
    area = measure(scores, member, threshold=0.0).auc
    assert area.value == pytest.approx(won.mean())
    assert (area.high - area.low) / 2 == pytest.approx(1.959964 * math.sqrt(variance), rel=1e-6)


@pytest.mark.slow
def test_an_interval_of_the_area_has_about_its_coverage():
    random = np.random.default_rng(0)
    truth, covered = stats.norm.cdf(1 / math.sqrt(2)), 0
    for _ in range(400):
        scores = np.concatenate([random.normal(1, 1, 60), random.normal(0, 1, 60)])
        area = measure(scores, np.arange(120) < 60, threshold=0.5).auc
        covered += area.low <= truth <= area.high
    assert 0.91 < covered / 400 < 0.98


def test_perfect_and_useless_attacks():
    member = np.arange(200) < 100
    perfect = measure(member.astype(float), member, threshold=0.5)
    assert perfect.accuracy.value == perfect.auc.value == perfect.found.value == 1
    assert perfect.false_alarms == 0
    useless = measure(np.zeros(200), member, threshold=0.5)
    assert useless.balanced_accuracy.value == useless.auc.value == 0.5 and useless.found.value == 0


def test_if_all_false_alarms_are_allowed_all_members_are_found():
    member = np.array([True, False, True, False])
    assert (
        measure(np.array([0.1, 0.9, 0.2, 0.8]), member, threshold=0.5, wanted=1.0).found.value
        == 1.0
    )


@pytest.mark.parametrize(
    ("scores", "member"),
    [
        ([1.0, 2.0], [True, True]),
        ([1.0, np.nan], [True, False]),
        ([1.0], [True, False]),
        ([[1.0, 2.0]], [[True, False]]),
    ],
)
def test_wrong_input_is_refused(scores, member):
    with pytest.raises(ValueError, match="users of both kinds"):
        measure(np.array(scores), np.array(member), threshold=0.5)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0, 5.0])
def test_randomised_response_reaches_the_ceilings_and_nothing_passes_them(epsilon):
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))  # pure DP: answers truly with this chance
    assert attack_ceiling(epsilon, 0.0) == pytest.approx(truth)
    assert found_ceiling(1 - truth, epsilon, 0.0) == pytest.approx(truth)
    mu = 1.3  # a Gaussian mechanism, at the delta that it has for this epsilon
    delta = stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(
        -mu / 2 - epsilon / mu
    )
    for alarms in np.linspace(0, 1, 101):
        found = stats.norm.cdf(stats.norm.ppf(alarms) + mu)
        assert found <= found_ceiling(alarms, epsilon, delta) + 1e-12
    assert stats.norm.cdf(mu / 2) <= attack_ceiling(epsilon, delta) + 1e-12


def test_no_promise_is_no_ceiling():
    assert attack_ceiling(math.inf, 0.0) == found_ceiling(0.0, math.inf, 0.0) == 1.0
    assert found_ceiling(0.01, 1000.0, 0.0) == 1.0
