# SPDX-License-Identifier: Apache-2.0
"""Results of evaluations: tables, groups and items without training."""

import numpy as np
import pandas as pd
import pytest
import torch

from fedrec.baselines.base import Baseline
from fedrec.data.interactions import Feature, FeatureTable, Interactions
from fedrec.data.population import Population
from fedrec.data.splits.rules import Partition
from fedrec.evaluation.central import CentralEvaluation
from fedrec.evaluation.tables import (
    UNTRAINED_ITEMS,
    Evaluated,
    group_gaps,
    group_means,
    user_groups,
)
from fedrec.experiment.schema import EvaluationConfig

# Metrics of several nodes as one table.

ONE = Evaluated(
    np.array([7, 2]),
    {"hits@5": np.array([0.7, 0.2]), "rows": np.array([70, 20]), "group:old": np.array([1.0, 0.0])},
    {"seen": np.array([1.0, 2.0])},
)
OTHER = Evaluated(
    np.array([5]),
    {
        "hits@5": np.array([0.5]),
        "rows": np.array([50]),
        "group:new": np.array([1.0]),
        "untrained:hits@5": np.array([0.0]),
    },
    {"seen": np.array([3.0, 4.0])},
)


def test_parts_are_joined_by_client():
    found = Evaluated.joined([ONE, OTHER])
    expected = pd.DataFrame(
        {
            "hits@5": [0.2, 0.5, 0.7],
            "rows": [20, 50, 70],
            "group:old": [0.0, 0.0, 1.0],
            "group:new": [0.0, 1.0, 0.0],
            "untrained:hits@5": [np.nan, 0.0, np.nan],
        },
        index=pd.Index([2, 5, 7], name="client"),
    )
    pd.testing.assert_frame_equal(found.table, expected)
    assert found.sums["seen"].tolist() == [4.0, 6.0] and len(found) == 3
    assert list(found.users.columns) == list(found.metrics) == ["hits@5", "rows"]
    assert found.groups().index.tolist() == ["new", "old", "items without training rows"]
    pd.testing.assert_frame_equal(Evaluated.of_table(expected).table, expected)


def test_nothing_is_joined_to_nothing():
    found = Evaluated.joined([])
    assert len(found) == 0 and found.table.index.dtype == np.int64 and not found.columns


@pytest.fixture
def dataset() -> Interactions:
    gender = Feature.single("gender", ["F", "M", "F", "M"])
    age = Feature.multiple("age", [["18-24"], ["25-34"], [], ["25-34"]])
    tags = Feature.multiple("tags", [["a", "b"], ["a"], [], []])
    features = FeatureTable(4, (gender, age, tags)), FeatureTable(1)
    empty = np.empty(0, dtype=np.int64)
    return Interactions("hand", empty, empty, np.arange(4), np.arange(1), *features)


def test_groups_by_activity_and_single_valued_features(dataset):
    groups = user_groups(dataset, np.array([2, 3, 1]), np.array([19, 20, 3]))
    assert {name: member.tolist() for name, member in groups.items()} == {
        "inactive": [True, False, True],
        "active": [False, True, False],
        "gender=F": [True, False, False],
        "gender=M": [False, True, True],
        "age=25-34": [False, True, True],
    }


def test_means_leave_out_users_without_a_value():
    per_user = pd.DataFrame({"hits@10": [0.5, np.nan, 1.0], "mrr": [0.1, np.nan, np.nan]})
    groups = {
        "all": np.ones(3, bool),
        "second": np.array([False, True, False]),
        "nobody": np.zeros(3, bool),
    }
    means = group_means(dict(per_user), groups)
    assert means.index.tolist() == list(groups)
    assert means.columns.tolist() == ["count", "hits@10", "mrr"]
    assert means["count"].tolist() == [2, 0, 0]
    np.testing.assert_allclose(means.loc["all", ["hits@10", "mrr"]].astype(float), [0.75, 0.1])
    assert means.loc[["second", "nobody"], "mrr"].isna().all()


def test_gaps_between_groups_of_a_kind():
    """0.2 to 0.5 for activity, 0.1 to 0.4 over the existing ages, a single gender."""
    names = ["inactive", "active", "age=18", "age=25", "age=35", "gender=F"]
    per_user = pd.DataFrame({"hits@10": [0.2, 0.5, 0.1, 0.4, np.nan, 0.3]})
    means = group_means(dict(per_user), dict(zip(names, np.eye(6, dtype=bool), strict=True)))
    gaps = group_gaps(means)
    assert gaps.index.tolist() == ["activity", "age", "gender"]
    assert gaps.columns.tolist() == ["hits@10"]
    np.testing.assert_allclose(gaps["hits@10"], [0.3, 0.3, np.nan])


# Held-out items without training rows have a line of their own, for federated and centralised
# systems.

USERS = 12
ITEMS = 20
COLD = (15, 16, 17, 18, 19)


@pytest.fixture(scope="module")
def population():
    """Two thirds of the users train; items from 15 on are only held out; user 0 holds out none of
    them, and item 14 is known to test users alone."""
    random = np.random.default_rng(2)
    rows = []
    for user in range(USERS):
        known = random.choice(14, 4, replace=False)
        if user >= 8:
            known = np.append(known, 14)
        wanted = [item for item in random.permutation(ITEMS) if item not in known and item != 14]
        held_out = [item for item in wanted if user or item not in COLD][:6]
        rows += [(user, item, part) for own, part in ((known, 0), (held_out, 1)) for item in own]
    users, items, part = np.array(rows).T
    names, features = zip(*((np.arange(n), FeatureTable(n)) for n in (USERS, ITEMS)), strict=True)
    data = Interactions("hand", users, items, *names, *features)
    none = np.empty(0, dtype=np.int64)
    parts = Partition(np.arange(8), np.flatnonzero(part == 0), none, np.flatnonzero(part == 1))
    return Population(data, parts, task="ranking", positive_above=None)


class FixedScores(Baseline):
    """Scores that were drawn before."""

    values = np.random.default_rng(4).permutation(USERS * ITEMS).reshape(USERS, ITEMS)

    def fit(self, histories):
        pass

    def scores(self, histories):
        return torch.from_numpy(self.values[histories.users].astype(np.float32))


def hits_by_hand(population, k):
    """Mean over users of the share of their held-out untrained items that fewer than k items
    beat, of those that the user has in no part."""
    data = population.interactions
    held_out = np.isin(np.arange(len(data)), population.partition.test_rows)
    shares = []
    for user in range(USERS):
        own = data.items[data.users == user]
        tested = data.items[(data.users == user) & held_out]
        never = np.setdiff1d(np.arange(ITEMS), own)
        score = FixedScores.values[user]
        cold = [item for item in tested if item in (*COLD, 14)]
        if cold:
            shares.append(np.mean([(score[never] > score[item]).sum() < k for item in cold]))
    return len(shares), np.mean(shares)


def test_their_line_is_the_mean_over_them_alone(population):
    evaluation = CentralEvaluation(population, EvaluationConfig(ks=(3, 5)))
    found = evaluation.measure(FixedScores(Baseline.Config()))
    groups = found.groups()
    for k in (3, 5):
        count, share = hits_by_hand(population, k)
        assert groups.loc[UNTRAINED_ITEMS, "count"] == count
        assert groups.loc[UNTRAINED_ITEMS, f"hits@{k}"] == pytest.approx(share)
    assert count == USERS - 1 and 0 < share < 1
    assert UNTRAINED_ITEMS not in " ".join(map(str, found.users.columns))
    assert group_gaps(groups).index.tolist() == ["activity"], "they are no group of users"


def test_parts_without_such_items_are_joined(population, monkeypatch):
    evaluation = CentralEvaluation(population, EvaluationConfig(ks=(3,)))
    whole = evaluation.measure(FixedScores(Baseline.Config()))
    monkeypatch.setattr("fedrec.evaluation.central._CLIENTS_AT_ONCE", 1)
    parts = evaluation.measure(FixedScores(Baseline.Config()))
    assert parts.groups().equals(whole.groups())
    assert UNTRAINED_ITEMS not in Evaluated(whole.clients, whole.metrics).groups().index
