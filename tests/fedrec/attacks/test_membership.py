# SPDX-License-Identifier: Apache-2.0
"""The paper's attack on constructed systems: one that recommends what its members like, and one
that is independent of its members."""

import sys

import numpy as np
import pytest
from sklearn.preprocessing import MultiLabelBinarizer, OneHotEncoder

from fedrec.attacks.membership import Describer, forest_scores, one_hot, top_lists, train_forest
from fedrec.attacks.success import measure
from fedrec.data.features import Feature, FeatureTable
from fedrec.errors import ExperimentError

USERS, ITEMS = 900, 60


def people(random):
    gender = Feature.single("gender", random.choice(["F", "M"], USERS))
    genres = Feature.multiple(
        "genres", [random.choice(list("abcdef"), random.integers(0, 3)) for _ in range(ITEMS)]
    )
    return FeatureTable(USERS, (gender,)), FeatureTable(ITEMS, (genres,))


def attack(lists, member, encoding, **options):
    """Train on the first third of the users, attack the others."""
    random = np.random.default_rng(1)
    describer = Describer(*people(random), popularity=np.arange(ITEMS)[::-1], encoding=encoding)
    known, attacked = np.arange(USERS // 3), np.arange(USERS // 3, USERS)
    forest = train_forest(describer.describe(known, lists[known]), member[known], seed=5, **options)
    scores = forest_scores(forest, describer.describe(attacked, lists[attacked]))
    return measure(scores, member[attacked], threshold=0.5)


@pytest.mark.parametrize("encoding", ["multi-hot", "pooled", "both"])
def test_a_system_that_memorises_its_members_is_detected(encoding):
    random = np.random.default_rng(0)
    member = random.random(USERS) < 0.5
    taste = random.normal(size=(USERS, ITEMS))
    # members get the rare items they like, others popular items
    taste[:, 40:] += 1.5 * member[:, None]
    taste[:, :20] += 1.5 * ~member[:, None]
    found = attack(top_lists(taste), member, encoding)
    assert found.balanced_accuracy.low > 0.9 and found.auc.value > 0.97 and found.found.low > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["multi-hot", "pooled", "both"])
def test_a_system_that_does_not_depend_on_its_members_is_at_chance(encoding):
    inside = []
    for seed in range(6):
        random = np.random.default_rng(seed)
        member = random.random(USERS) < 0.5
        found = attack(top_lists(random.normal(size=(USERS, ITEMS))), member, encoding)
        inside.append(
            [figure.low < 0.5 < figure.high for figure in (found.auc, found.balanced_accuracy)]
        )
    assert np.sum(inside) >= 10  # of twelve intervals of 95 %


def test_with_the_papers_shares_a_forest_without_a_clue_answers_member_and_balance_mends_it():
    random = np.random.default_rng(3)
    member = np.concatenate(
        [random.random(USERS // 3) < 0.8, random.random(USERS - USERS // 3) < 0.5]
    )
    lists = top_lists(random.normal(size=(USERS, ITEMS)))
    description = np.zeros((USERS, 1), np.float32)  # no information at all
    for balanced, answer in ((False, 0.8), (True, 0.5)):
        forest = train_forest(
            description, member[: USERS // 3].repeat(3)[:USERS], seed=1, balanced=balanced
        )
        assert forest_scores(forest, description[:1])[0] == pytest.approx(answer, abs=0.05)
    assert attack(lists, member, "multi-hot").balanced_accuracy.value == pytest.approx(
        0.5, abs=0.05
    )


def test_columns_are_those_of_scikit_learn():
    users, items = people(np.random.default_rng(1))
    lists = np.array([[3, 0, 7], [59, 58, 3]])
    found = Describer(users, items, np.zeros(ITEMS), "multi-hot").describe(np.array([4, 9]), lists)
    labels = np.array(users["gender"].categories)[users["gender"].codes]
    gender = OneHotEncoder(sparse_output=False).fit(labels[:, None]).transform(labels[[4, 9], None])
    shown = MultiLabelBinarizer(classes=list(range(ITEMS))).fit_transform(lists.tolist())
    assert np.array_equal(found, np.hstack([gender, shown]))


def test_pooled_columns_by_hand():
    items = FeatureTable(3, (Feature.multiple("genres", [["x", "y"], ["y"], []]),))
    describer = Describer(FeatureTable(1), items, popularity=np.array([5, 1, 9]), encoding="pooled")
    found = describer.describe(np.array([0]), np.array([[2, 0]]))
    # genres x and y: half of the list each; ranks of items 2 and 0 are 0 and 1/2; their mean,
    # smallest and largest
    assert found.tolist() == [[0.5, 0.5, 0.0, 0.5, 0.25, 0.0, 0.5]]
    both = Describer(FeatureTable(1), items, np.array([5, 1, 9]), "both").describe(
        np.array([0]), np.array([[2, 0]])
    )
    assert both.shape == (1, 3 + 7)


def test_a_missing_code_is_no_column():
    assert one_hot(np.array([[0, -1], [-1, -1], [2, 0]]), 3).tolist() == [
        [1, 0, 0],
        [0, 0, 0],
        [1, 0, 1],
    ]


def test_lists_are_the_best_items_in_order_ties_by_index():
    assert top_lists(np.array([[0.0, 3.0, 1.0, 3.0, 2.0]]), 4).tolist() == [[1, 3, 4, 2]]


def test_a_forest_is_a_function_of_its_seed():
    random = np.random.default_rng(0)
    rows, member = random.normal(size=(80, 5)), random.random(80) < 0.5
    one, same, other = (
        forest_scores(train_forest(rows, member, seed=s), rows[:9] + 0.1) for s in (1, 1, 2)
    )
    assert np.array_equal(one, same) and not np.array_equal(one, other)


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    with pytest.raises(ExperimentError) as caught:
        train_forest(np.zeros((2, 1)), np.array([True, False]), seed=0)
    assert caught.value.expected == "the extra 'attacks'"
    assert "fedrec[attacks]" in str(caught.value.fix)
