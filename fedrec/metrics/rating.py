# SPDX-License-Identifier: Apache-2.0
"""Errors of predicted ratings: MAE and RMSE, per user and pooled over all ratings.

The two means differ: pooled metrics (those of MetaMF and PNBM) weight a user by the number of
held-out ratings, the mean over users weights all users equally.
"""

from __future__ import annotations

import numpy as np

from fedrec.errors import ExperimentError


def rating_errors(predicted: np.ndarray, actual: np.ndarray) -> dict[str, float]:
    """`"mae"` and `"rmse"` pooled over all ratings; NaN when there is none.

    Args:
        predicted: `float [rows]`.
        actual: `float [rows]`.

    Raises:
        ExperimentError: a prediction is NaN.
        ValueError: the lengths differ.
    """
    difference = _differences(predicted, actual)
    if not len(difference):
        return {"mae": float("nan"), "rmse": float("nan")}
    return {
        "mae": float(np.abs(difference).mean()),
        "rmse": float(np.sqrt(np.square(difference).mean())),
    }


def rating_errors_by_user(
    predicted: np.ndarray, actual: np.ndarray, users: np.ndarray, num_users: int
) -> dict[str, np.ndarray]:
    """`"mae"` and `"rmse"`, `float64 [num_users]`; NaN for a user without a rating.

    Args:
        predicted: `float [rows]`.
        actual: `float [rows]`.
        users: `int64 [rows]`, each in `[0, num_users)`.
        num_users: number of users.

    Raises:
        ExperimentError: a prediction is NaN.
        ValueError: the lengths differ.
    """
    difference = _differences(predicted, actual)
    with np.errstate(invalid="ignore"):
        count = np.bincount(users, minlength=num_users)
        absolute = np.bincount(users, np.abs(difference), num_users) / count
        square = np.bincount(users, np.square(difference), num_users) / count
    return {"mae": absolute, "rmse": np.sqrt(square)}


def _differences(predicted: np.ndarray, actual: np.ndarray) -> np.ndarray:
    if predicted.shape != actual.shape:
        raise ValueError(
            f"Expected as many predictions as ratings, got {predicted.shape} and {actual.shape}."
        )
    difference = np.asarray(predicted, dtype=np.float64) - np.asarray(actual, dtype=np.float64)
    nans = int(np.isnan(difference).sum())
    if nans:
        raise ExperimentError(
            "predicted ratings cannot be evaluated",
            expected="predictions that are numbers",
            got=f"{nans} NaN among {len(difference)} predictions",
            fix="training has probably diverged: lower the learning rate or the noise",
        )
    return difference
