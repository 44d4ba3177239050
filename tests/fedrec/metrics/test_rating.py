# SPDX-License-Identifier: Apache-2.0
"""Rating errors, pooled and per user."""

import numpy as np
import pytest

from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.evaluation.metrics import ROWS, Metrics
from fedrec.experiment.tables import EvaluationConfig
from fedrec.metrics.rated import RatedBlock
from fedrec.metrics.targets import TargetRating

PREDICTED = np.array([3.0, 5.0, 1.0], dtype=np.float32)
ACTUAL = np.array([4.0, 2.0, 1.0], dtype=np.float32)
METRICS = Metrics("rating", EvaluationConfig())


def test_by_user_and_pooled_over_rows():
    got = METRICS.of_ratings(RatedBlock(PREDICTED, ACTUAL, np.array([0, 0, 2]), 3))
    np.testing.assert_allclose(got["mae"], [2, np.nan, 0])
    np.testing.assert_allclose(got["rmse"], [5**0.5, np.nan, 0])
    assert got[ROWS].tolist() == [2, 0, 1]
    assert METRICS.means(got) == {
        "mae": pytest.approx(4 / 3),
        "rmse": pytest.approx((10 / 3) ** 0.5),
    }


def test_no_rating():
    got = METRICS.of_ratings(RatedBlock(np.empty(0), np.empty(0), np.empty(0, dtype=int), 2))
    assert np.isnan(got["mae"]).all() and np.isnan(METRICS.means(got)["rmse"])


def test_predicted_ratings_of_targets_over_the_users_who_have_not_rated_them():
    targets = np.array([[4.0, 2.0], [np.nan, 5.0], [np.nan, np.nan]])
    block = RatedBlock(PREDICTED, ACTUAL, np.array([0, 0, 2]), 3, targets)
    metric = TargetRating(Config())
    np.testing.assert_allclose(metric.per_user(block), [3, 5, np.nan])
    assert metric.pooled(metric.per_user(block), block.counts) == 4  # users count the same
    without = metric.per_user(RatedBlock(PREDICTED, ACTUAL, np.array([0, 0, 2]), 3))
    assert np.isnan(without).all() and np.isnan(metric.pooled(without, block.counts))


def test_faults():
    with pytest.raises(ExperimentError, match="1 NaN among 1"):
        RatedBlock(np.array([np.nan]), np.array([1.0]))
    with pytest.raises(ValueError, match="as many predictions"):
        RatedBlock(PREDICTED, ACTUAL[:2])
