# SPDX-License-Identifier: Apache-2.0
"""Attribute inference against the best possible classifier and scikit-learn, and without any
signal."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from fedrec.attacks.attribute import infer_attribute, judged, stratified_folds
from fedrec.errors import ExperimentError

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
@pytest.mark.parametrize("attacker", ["neural", "logistic"])
@pytest.mark.parametrize("scaling", ["rows", "columns"])
def test_a_planted_signal_is_found_nearly_as_well_as_can_be(attacker, scaling):
    table, labels, odds = profiles(0.15)
    best = balanced_accuracy_score(labels, odds > 0)
    found = infer_attribute(table, labels, attacker=attacker, scaling=scaling)
    assert 0.8 < best < 0.95
    assert best - 0.07 < found.balanced_accuracy.value < best + 0.02
    assert roc_auc_score(labels, odds) - 0.06 < found.auc < roc_auc_score(labels, odds) + 0.02


@pytest.mark.slow
@pytest.mark.parametrize("attacker", ["neural", "logistic"])
@pytest.mark.parametrize("share", [0.5, 0.15])
def test_without_a_signal_the_attacker_is_at_chance(attacker, share):
    """Also if always predicting the larger class has an accuracy of .85."""
    table, labels, _ = profiles(0.0, seed=1, share=share)
    found = infer_attribute(table, labels, attacker=attacker)
    smallest = min(found.classes)
    assert abs(found.balanced_accuracy.value - 0.5) < 4 * 0.5 / np.sqrt(smallest) / np.sqrt(2)
    assert abs(found.auc - 0.5) < 4 * 0.6 / np.sqrt(smallest)
    assert found.chance == 0.5


@pytest.mark.slow
def test_the_neural_attacker_finds_what_no_linear_one_can():
    random = np.random.default_rng(2)
    table = random.standard_normal((1500, 6)).astype(np.float32)
    labels = (table[:, 0] * table[:, 1] > 0).astype(np.int64)
    linear = infer_attribute(table, labels, attacker="logistic", scaling="columns")
    neural = infer_attribute(table, labels, attacker="neural", scaling="columns")
    assert linear.balanced_accuracy.value < 0.57 and neural.balanced_accuracy.value > 0.85


@pytest.mark.slow
def test_logistic_is_about_as_good_as_scikit_learns():
    table, labels, _ = profiles(0.07, seed=3)
    fold = stratified_folds(labels, 5, 0)
    areas = []
    for place in range(5):
        known, asked = fold != place, fold == place
        model = LogisticRegression(C=0.1, class_weight="balanced", max_iter=500).fit(
            table[known], labels[known]
        )
        areas.append(roc_auc_score(labels[asked], model.predict_proba(table[asked])[:, 1]))
    assert infer_attribute(table, labels, attacker="logistic").auc == pytest.approx(
        np.mean(areas), abs=0.03
    )


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
    fold = stratified_folds(labels, 4, 0)
    found = judged(np.column_stack([1 - first, first]), labels, fold)
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
    fold = stratified_folds(labels, 5, 0)
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
