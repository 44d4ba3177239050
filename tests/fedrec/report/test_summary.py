# SPDX-License-Identifier: Apache-2.0
"""Remarks below the result table."""

from types import SimpleNamespace
from typing import Any

import pytest

from fedrec.experiment.loading import load
from fedrec.report.summary import summary_notes
from simulations.own_data import linear_system


@pytest.mark.parametrize(("best", "fewer"), [(1, False), (2, True)])
def test_fewer_items_are_advised_only_where_items_have_weights(best, fewer):
    experiment = load(
        {
            "name": "private",
            "rounds": 2,
            "dataset": {"name": "synthetic"},
            "split": {"name": "user-holdout"},
            **linear_system(1.0, 100),
        }
    )
    result: Any = SimpleNamespace(
        experiment=experiment,
        metrics={"hits@10": 0.1},
        baselines={"dp-popularity": {"hits@10": 0.2}},
        early_stopping={"best-round": best},
    )
    said = " ".join(summary_notes(result))
    assert "a larger epsilon" in said and ("model.items" in said) == fewer
