# SPDX-License-Identifier: Apache-2.0
"""Attribute inference, and the success of attacks."""

import math

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from fedrec.attacks.audit import clopper_pearson
from fedrec.attacks.inference import (
    _found_ceiling,
    _judged,
    _stratified_folds,
    infer_attribute,
    measure,
)
from fedrec.errors import ExperimentError
from fedrec.privacy.statement import attack_ceiling

# Attribute inference against the best possible classifier and scikit-learn, and without any signal.

USERS, ITEMS = 900, 60


def profiles(lift, seed=0, share=0.5):
    """Independent items; a third of them is likelier in class 1, a third in class 0. And the log
    odds of class 1."""
    random = np.random.default_rng(seed)
    labels = (random.random(USERS) < share).astype(np.int64)
    chances = np.full((2, ITEMS), 0.2)
    chances[1, : ITEMS // 3] += lift
    chances[0, ITEMS // 3 : 2 * ITEMS // 3] += lift
    table = (random.random((USERS, ITEMS)) < chances[labels]).astype(np.float32)
    odds = table @ (np.log(chances[1]) - np.log(chances[0]))
    odds += (1 - table) @ (np.log(1 - chances[1]) - np.log(1 - chances[0]))
    return table, labels, odds


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["rows", "columns"])
def test_a_planted_signal_is_found_nearly_as_well_as_can_be(scaling):
    table, labels, odds = profiles(0.15)
    best = balanced_accuracy_score(labels, odds > 0)
    found = infer_attribute(table, labels, scaling=scaling)
    assert 0.8 < best < 0.95
    assert best - 0.07 < found.balanced_accuracy.value < best + 0.02
    assert roc_auc_score(labels, odds) - 0.06 < found.auc < roc_auc_score(labels, odds) + 0.02


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 0.15])
def test_without_a_signal_the_attacker_is_at_chance(share):
    """Also if always predicting the larger class has an accuracy of .85."""
    table, labels, _ = profiles(0.0, seed=1, share=share)
    found = infer_attribute(table, labels)
    smallest = min(found.classes)
    assert abs(found.balanced_accuracy.value - 0.5) < 4 * 0.5 / np.sqrt(smallest) / np.sqrt(2)
    assert abs(found.auc - 0.5) < 4 * 0.6 / np.sqrt(smallest)
    assert found.chance == 0.5


def test_several_classes():
    random = np.random.default_rng(4)
    labels = np.arange(600) % 3
    table = (
        random.random((600, 30)) < 0.15 + 0.25 * (np.arange(30) % 3 == labels[:, None])
    ).astype(np.float32)
    found = infer_attribute(table, labels)
    assert found.chance == pytest.approx(1 / 3)
    assert found.auc is None
    assert found.classes == (200, 200, 200)
    assert found.balanced_accuracy.value > 0.75


def test_figures_are_those_of_scikit_learn():
    random = np.random.default_rng(5)
    labels = (random.random(400) < 0.3).astype(np.int64)
    first = np.clip(random.random(400) * 0.7 + 0.3 * labels, 0, 1)
    fold = _stratified_folds(labels, 4, 0)
    found = _judged(np.column_stack([1 - first, first]), labels, fold)
    answers = first > 0.5
    assert found.balanced_accuracy.value == pytest.approx(balanced_accuracy_score(labels, answers))
    assert found.accuracy.value == pytest.approx((answers == labels).mean())
    parts = [balanced_accuracy_score(labels[fold == p], answers[fold == p]) for p in range(4)]
    assert found.folds == pytest.approx(parts)
    assert found.auc == pytest.approx(
        np.mean([roc_auc_score(labels[fold == p], first[fold == p]) for p in range(4)])
    )
    assert found.majority == pytest.approx(max(np.mean(labels), 1 - np.mean(labels)))
    assert (
        found.balanced_accuracy.low < found.balanced_accuracy.value < found.balanced_accuracy.high
    )


def test_folds_are_stratified_and_everyone_is_asked_once():
    labels = np.repeat([0, 1], [83, 17])
    fold = _stratified_folds(labels, 5, 0)
    for label in (0, 1):
        counts = np.bincount(fold[labels == label], minlength=5)
        assert counts.max() - counts.min() <= 1 and counts.sum() == (labels == label).sum()


def test_a_users_own_label_is_never_learned_from():
    """Each user's description is unique: only a classifier that was trained on the user can know
    its label."""
    labels = np.random.default_rng(6).integers(0, 2, 300)
    found = infer_attribute(np.eye(300, dtype=np.float32), labels)
    assert abs(found.auc - 0.5) < 0.15


@pytest.mark.slow
def test_the_same_seed_gives_the_same_figures_and_leaves_torchs_generator_alone():
    import torch

    table, labels, _ = profiles(0.15)
    state = torch.random.get_rng_state()
    first, again = infer_attribute(table, labels, seed=3), infer_attribute(table, labels, seed=3)
    assert first == again != infer_attribute(table, labels, seed=4)
    assert torch.equal(state, torch.random.get_rng_state())


def test_constant_columns_do_no_harm():
    table, labels, _ = profiles(0.15)
    padded = np.concatenate([table, np.full((USERS, 5), 7e6, np.float32)], axis=1)
    assert infer_attribute(padded, labels, scaling="columns").balanced_accuracy.value > 0.75


def test_too_few_users_of_a_class_are_explained():
    with pytest.raises(ExperimentError, match="too few users"):
        infer_attribute(np.eye(10), np.array([0] * 8 + [1] * 2))
    with pytest.raises(ExperimentError, match="too few users"):
        infer_attribute(np.eye(10), np.zeros(10, dtype=np.int64))
    with pytest.raises(ValueError, match="finite"):
        infer_attribute(np.full((10, 2), np.nan), np.array([0, 1] * 5), folds=2)


# Figures of an attack, against scikit-learn and against mechanisms whose limits are known.


@pytest.fixture(params=[False, True], ids=["distinct", "ties"])
def attacked(request):
    """Scores and membership of 300 users; members score slightly higher."""
    random = np.random.default_rng(4)
    member = random.random(300) < 0.6
    scores = random.normal(size=300) + 0.7 * member
    return (np.round(scores) if request.param else scores), member


def test_equal_to_scikit_learn(attacked):
    scores, member = attacked
    found = measure(scores, member, threshold=0.3)
    answer = scores > 0.3
    assert found.accuracy.value == pytest.approx(metrics.accuracy_score(member, answer))
    assert found.balanced_accuracy.value == pytest.approx(
        metrics.balanced_accuracy_score(member, answer)
    )
    assert found.auc.value == pytest.approx(metrics.roc_auc_score(member, scores))
    alarms, hits, _ = metrics.roc_curve(member, scores, drop_intermediate=False)
    assert found.members_found.value == pytest.approx(hits[alarms <= 0.01].max())
    assert found.false_alarms == pytest.approx(alarms[alarms <= 0.01].max())
    assert found.majority == max(member.mean(), 1 - member.mean())
    caught = round(found.members_found.value * found.members)
    exact = clopper_pearson(caught, found.members)
    assert (found.members_found.low, found.members_found.high) == exact


def test_the_interval_of_the_area_is_that_of_all_pairs(attacked):
    scores, member = attacked
    inside, outside = scores[member][:, None], scores[~member][None]
    won = (inside > outside) + 0.5 * (inside == outside)
    variance = won.mean(1).var(ddof=1) / len(inside) + won.mean(0).var(ddof=1) / outside.shape[1]
    area = measure(scores, member, threshold=0.0).auc
    assert area.value == pytest.approx(won.mean())
    assert (area.high - area.low) / 2 == pytest.approx(1.959964 * math.sqrt(variance), rel=1e-6)


@pytest.mark.parametrize(
    ("scores", "member"), [([1.0, 2.0], [True, True]), ([1.0, np.nan], [True, False])]
)
def test_wrong_input_is_refused(scores, member):
    with pytest.raises(ValueError, match="users of both kinds"):
        measure(np.array(scores), np.array(member), threshold=0.5)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0, 5.0])
def test_randomised_response_reaches_the_ceilings_and_nothing_passes_them(epsilon):
    assert attack_ceiling(math.inf, 0.0) == _found_ceiling(0.0, math.inf, 0.0) == 1.0
    assert _found_ceiling(0.01, 1000.0, 0.0) == 1.0
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))  # pure DP: answers truly with this chance
    assert attack_ceiling(epsilon, 0.0) == pytest.approx(truth)
    assert _found_ceiling(1 - truth, epsilon, 0.0) == pytest.approx(truth)
    mu = 1.3  # a Gaussian mechanism, at the delta that it has for this epsilon
    delta = stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(
        -mu / 2 - epsilon / mu
    )
    for alarms in np.linspace(0, 1, 101):
        found = stats.norm.cdf(stats.norm.ppf(alarms) + mu)
        assert found <= _found_ceiling(alarms, epsilon, delta) + 1e-12
    assert stats.norm.cdf(mu / 2) <= attack_ceiling(epsilon, delta) + 1e-12
