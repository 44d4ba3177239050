# SPDX-License-Identifier: Apache-2.0
"""GF-CF against its formula in plain numpy."""

from dataclasses import replace

import numpy as np
import pytest

from fedrec.baselines.base import Histories
from fedrec.baselines.factorisation.gf_cf import GfCf, GfCfConfig


def by_hand(rows: np.ndarray, own: np.ndarray, factors: int, alpha: float) -> np.ndarray:
    """Scores of users `own` `[n, items]` after fitting to `rows`."""
    users = rows.sum(1)
    items = rows.sum(0)
    with np.errstate(divide="ignore"):
        left = np.where(users > 0, users**-0.5, 0)
        right = np.where(items > 0, items**-0.5, 0)
    shares = left[:, None] * rows * right
    vectors = np.linalg.svd(shares, full_matrices=False)[2][:factors]
    ideal = np.diag(right) @ vectors.T @ vectors @ np.diag(items**0.5)
    return own @ (shares.T @ shares + alpha * ideal)


@pytest.mark.parametrize("low_rated", [0.0, 0.4])
@pytest.mark.parametrize(("factors", "alpha"), [(5, 0.3), (5, 0.0), (500, 2.0)])
def test_scores_are_those_of_the_formula(liked, others, drawn, factors, alpha, low_rated):
    """Of users who were fitted and of others; one item is nobody's, and one user has nothing."""

    def rated(histories: Histories, seed: int) -> tuple[Histories, np.ndarray]:
        ends = np.append(histories.offsets, histories.offsets[-1])
        both = Histories(51, ends, histories.items)
        low = drawn(histories.num_users, 50, 9, seed=seed)
        low = Histories(51, np.append(low.offsets, low.offsets[-1]), low.items)
        rows = np.maximum(both.matrix().numpy(), low_rated * low.matrix().numpy())
        return replace(both, low_rated=low), rows.astype(np.float64)

    training, rows = rated(liked, 3)
    new, own = rated(others, 4)
    model = GfCf(GfCfConfig(factors=factors, alpha=alpha, low_rated=low_rated))
    model.fit(training)
    for histories, table in ((training, rows), (new, own)):
        expected = by_hand(rows, table, factors, alpha)
        assert np.ptp(expected) > 0.1
        np.testing.assert_allclose(model.scores(histories).numpy(), expected, atol=2e-5)
