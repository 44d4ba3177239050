# SPDX-License-Identifier: Apache-2.0
"""User vectors maximise their objective."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import logsumexp

from fedrec.factors.log_linear import LogLinear

ITEMS, WIDTH = 40, 5


@pytest.fixture(scope="module")
def given():
    """Embeddings, log popularities, and users with 1 to 30 items, one with weights and one with
    none."""
    random = np.random.default_rng(2)
    embeddings = random.normal(size=(ITEMS, WIDTH)) * [2.0, 1.0, 0.5, 0.1, 1.0]
    log_shares = random.normal(size=ITEMS) * 1.5
    liked = np.zeros((6, ITEMS))
    for user, number in enumerate((1, 3, 12, 30)):
        liked[user, random.choice(ITEMS, number, replace=False)] = 1
    liked[4, :10] = random.random(10)
    return embeddings, log_shares, liked


def optimum(embeddings, log_shares, liked):
    def loss(taste):
        utilities = embeddings @ taste + log_shares
        return liked.sum() * logsumexp(utilities) - liked @ embeddings @ taste + taste @ taste / 2

    return minimize(loss, np.zeros(embeddings.shape[1]), method="BFGS", options={"gtol": 1e-9}).x


def test_they_are_those_that_a_general_optimiser_finds(given):
    embeddings, log_shares, liked = given
    tables = torch.from_numpy(embeddings), torch.from_numpy(log_shares)
    found = LogLinear(*tables, tolerance=1e-5).scores(torch.from_numpy(liked)).numpy()
    for user, own in enumerate(liked):
        expected = embeddings @ optimum(embeddings, log_shares, own) + log_shares
        difference = found[user] - expected
        np.testing.assert_allclose(difference - difference.mean(), 0, atol=2e-3)


def test_a_user_without_items_has_popularity(given):
    embeddings, log_shares, liked = given
    model = LogLinear(torch.from_numpy(embeddings), torch.from_numpy(log_shares))
    found = model.scores(torch.from_numpy(liked))[5].numpy()
    np.testing.assert_allclose(found, log_shares - logsumexp(log_shares), atol=1e-9)


def test_without_coordinates_all_is_popularity(given):
    _, log_shares, liked = given
    model = LogLinear(torch.zeros(ITEMS, 0, dtype=torch.float64), torch.from_numpy(log_shares))
    found = model.scores(torch.from_numpy(liked)).numpy()
    np.testing.assert_allclose(found - found[:, :1], [log_shares - log_shares[0]] * 6, atol=1e-9)


def test_one_axis_has_its_closed_form():
    """Two items, equally popular, at +1 and -1; one is liked n times: w = n (1 - tanh w)."""
    model = LogLinear(
        torch.tensor([[1.0], [-1.0]], dtype=torch.float64),
        torch.zeros(2, dtype=torch.float64),
        tolerance=1e-5,
    )
    for number in (1.0, 7.0):
        taste = model.tastes(torch.tensor([[number, 0.0]], dtype=torch.float64))
        taste = abs(float(taste[0, 0]))
        assert taste == pytest.approx(number * (1 - np.tanh(taste)), abs=1e-3)
