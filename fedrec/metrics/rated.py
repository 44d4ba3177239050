# SPDX-License-Identifier: Apache-2.0
"""Predicted ratings of a block of users."""

from __future__ import annotations

import numpy as np

from fedrec.errors import ExperimentError


class RatedBlock:
    """Errors of predicted ratings.

    Args:
        predicted: `float [rows]`.
        actual: `float [rows]`.
        users: `int64 [rows]`, each in `[0, num_users)`; None: all are of one user.
        num_users: number of users.
        targets: `float [num_users, targets]`, the predictions for the items that an adversary
            promotes, NaN for those that a user has rated; None: there are none.

    Attributes:
        errors: `float64 [rows]`, predicted minus actual.
        counts: `int64 [num_users]`, number of rows of each user.

    Raises:
        ExperimentError: a prediction is NaN.
        ValueError: the lengths differ.
    """

    def __init__(
        self,
        predicted: np.ndarray,
        actual: np.ndarray,
        users: np.ndarray | None = None,
        num_users: int = 1,
        targets: np.ndarray | None = None,
    ) -> None:
        if predicted.shape != actual.shape:
            raise ValueError(
                f"Expected as many predictions as ratings, got {predicted.shape} and"
                f" {actual.shape}."
            )
        self.errors = np.asarray(predicted, np.float64) - np.asarray(actual, np.float64)
        nans = int(np.isnan(self.errors).sum())
        if nans:
            raise ExperimentError(
                "predicted ratings cannot be evaluated",
                expected="predictions that are numbers",
                got=f"{nans} NaN among {len(self.errors)} predictions",
                fix="training has probably diverged: lower the learning rate or the noise",
            )
        self._users = np.zeros(len(predicted), np.int64) if users is None else users
        self.counts = np.bincount(self._users, minlength=num_users)
        self.targets = targets

    def means(self, values: np.ndarray) -> np.ndarray:
        """`float64 [num_users]`: mean over each user's rows of `values [rows]`; NaN without
        rows."""
        if len(self.counts) == 1 and len(values):  # pairwise sum, more exact than bincount's
            return np.array([values.mean()])
        with np.errstate(invalid="ignore"):
            return np.bincount(self._users, values, len(self.counts)) / self.counts
