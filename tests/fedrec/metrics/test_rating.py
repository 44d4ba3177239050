# SPDX-License-Identifier: Apache-2.0
"""Rating errors, pooled and per user."""

from __future__ import annotations

import numpy as np
import pytest

from fedrec.errors import ExperimentError
from fedrec.metrics.rating import rating_errors, rating_errors_by_user

PREDICTED, ACTUAL = (
    np.array([3.0, 5.0, 1.0], dtype=np.float32),
    np.array([4.0, 2.0, 1.0], dtype=np.float32),
)


def test_pooled():
    assert rating_errors(PREDICTED, ACTUAL) == {
        "mae": pytest.approx(4 / 3),
        "rmse": pytest.approx((10 / 3) ** 0.5),
    }


def test_by_user():
    got = rating_errors_by_user(PREDICTED, ACTUAL, np.array([0, 0, 2]), 3)
    np.testing.assert_allclose(got["mae"], [2, np.nan, 0])
    np.testing.assert_allclose(got["rmse"], [5**0.5, np.nan, 0])


def test_no_rating():
    empty = np.empty(0)
    assert np.isnan(rating_errors(empty, empty)["rmse"])
    assert np.isnan(rating_errors_by_user(empty, empty, np.empty(0, dtype=int), 2)["mae"]).all()


def test_faults():
    with pytest.raises(ExperimentError, match="1 NaN among 1"):
        rating_errors(np.array([np.nan]), np.array([1.0]))
    with pytest.raises(ValueError, match="as many predictions"):
        rating_errors(PREDICTED, ACTUAL[:2])
