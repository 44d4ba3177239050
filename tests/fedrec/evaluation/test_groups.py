# SPDX-License-Identifier: Apache-2.0
"""Groups of users and the means over them."""

import numpy as np
import pandas as pd
import pytest

from fedrec.data.features import Feature, FeatureTable
from fedrec.data.interactions import Interactions
from fedrec.evaluation.groups import group_gaps, group_means, user_groups


@pytest.fixture
def dataset() -> Interactions:
    features = FeatureTable(
        4,
        (
            Feature.single("gender", ["F", "M", "F", "M"]),
            Feature.multiple("age", [["18-24"], ["25-34"], [], ["25-34"]]),
            Feature.multiple("tags", [["a", "b"], ["a"], [], []]),
        ),
    )
    empty = np.empty(0, dtype=np.int64)
    return Interactions("hand", empty, empty, np.arange(4), np.arange(1), features, FeatureTable(1))


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
