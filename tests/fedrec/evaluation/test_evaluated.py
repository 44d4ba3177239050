# SPDX-License-Identifier: Apache-2.0
"""Metrics of several nodes as one table."""

import numpy as np
import pandas as pd

from fedrec.evaluation.table import Evaluated

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


def test_groups_are_numbers_beside_the_metrics():
    found = ONE.with_groups({"late": np.array([True, False])})
    assert found.columns["group:late"].tolist() == [1.0, 0.0]
    assert found.columns["rows"].dtype == np.int64 and found.sums is ONE.sums
