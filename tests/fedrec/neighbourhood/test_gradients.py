# SPDX-License-Identifier: Apache-2.0
"""Predictions and gradients against autograd, Euler's identity and closed-form limits."""

import numpy as np
import pytest
import torch

from fedrec.neighbourhood.gradients import EVERY, Bounds, Examples, predicted
from fedrec.neighbourhood.profiles import Profiles, item_means
from fedrec.neighbourhood.start import initial_similarity, renormalised

ITEMS = 12


@pytest.fixture(scope="module")
def profiles():
    random = np.random.default_rng(0)
    rows = np.array(
        [
            (u, i)
            for u in range(15)
            for i in random.choice(ITEMS, random.integers(2, 9), replace=False)
        ]
    )
    return Profiles.of(
        15, ITEMS, rows[:, 0], rows[:, 1], random.integers(1, 6, len(rows)).astype(float)
    )


@pytest.fixture(scope="module")
def similarity():
    found = np.random.default_rng(1).normal(size=(ITEMS, ITEMS))
    np.fill_diagonal(found, 0)
    return found


def by_torch(profiles, means, similarity, *, prior=0.0, low=-np.inf, high=np.inf):
    """Half the sum of squared errors of all ratings, with whole matrices; and predictions `[users,
    items]`."""
    rated = torch.tensor(profiles.matrix(np.ones(len(profiles.values))).toarray())
    deviations = torch.tensor(profiles.centred(means).matrix().toarray())
    s = similarity * (1 - torch.eye(ITEMS, dtype=torch.float64))
    guess = torch.tensor(means) + deviations @ s.T / (prior + rated @ s.abs().T)
    errors = (guess.clamp(low, high) - torch.tensor(means) - deviations)[rated > 0]
    return 0.5 * (errors**2).sum(), guess


@pytest.mark.parametrize("extra", [{}, {"prior": 3.0}, {"low": 2.2, "high": 3.9}])
def test_gradients_are_those_of_autograd(profiles, similarity, extra):
    means, _ = item_means(profiles)
    leaf = torch.tensor(similarity, requires_grad=True)
    loss, _ = by_torch(profiles, means, leaf, **extra)
    (expected,) = torch.autograd.grad(loss, leaf)
    examples = Examples(profiles, means)
    found, squares = examples.gradient(similarity, np.arange(len(examples)), Bounds(**extra))
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-11)
    assert squares / 2 == pytest.approx(float(loss.detach()))


def test_euler(profiles, similarity):
    """Predictions do not change with the scale of a row, so similarities are orthogonal to each
    example's gradient."""
    examples = Examples(profiles, item_means(profiles)[0])
    for place in range(len(examples)):
        gradient, _ = examples.gradient(similarity, np.array([place]))
        assert abs((similarity * gradient).sum()) < 1e-12 * max(1, np.abs(gradient).max())
        assert np.count_nonzero(gradient.any(axis=1)) <= 1  # one row


def test_predictions_and_their_scale(profiles, similarity):
    means, _ = item_means(profiles)
    users, items = (
        grid.ravel() for grid in np.meshgrid(np.arange(15), np.arange(ITEMS), indexing="ij")
    )
    _, expected = by_torch(profiles, means, torch.tensor(similarity))
    found = predicted(similarity, profiles, means, users, items)
    np.testing.assert_allclose(found, expected.numpy().ravel(), atol=1e-12)
    scaled = similarity * np.random.default_rng(2).uniform(0.1, 9, ITEMS)[:, None]
    np.testing.assert_allclose(predicted(scaled, profiles, means, users, items), found, atol=1e-12)
    np.testing.assert_allclose(np.abs(renormalised(scaled, np.full(ITEMS, 7.0))).sum(1), 7.0)


def test_equal_similarities_give_the_mean_deviation(profiles):
    means, _ = item_means(profiles)
    own = profiles.centred(means)
    ones = initial_similarity("constant", profiles, np.random.default_rng(0))
    users = np.arange(15)
    items = np.array(
        [np.setdiff1d(np.arange(ITEMS), profiles.items[profiles.users == u])[0] for u in range(15)]
    )
    expected = means[items] + [own.values[own.users == user].mean() for user in range(15)]
    np.testing.assert_allclose(predicted(ones, profiles, means, users, items), expected, atol=1e-12)


def test_without_known_raters_the_result_is_nan_or_the_item_mean(profiles, similarity):
    means, _ = item_means(profiles)
    nobody = Profiles.of(1, ITEMS, *(np.empty(0, np.int64),) * 2, np.empty(0))
    zero = np.zeros(1, np.int64)
    assert np.isnan(predicted(similarity, nobody, means, zero, zero)).all()
    assert predicted(similarity, nobody, means, zero, zero, prior=1.0) == means[0]


def test_a_limit_takes_the_users_nearest_items(similarity):
    """Of three rated items the two of largest magnitude count."""
    similarity = similarity.copy()
    similarity[0, [1, 2, 3]] = [0.5, -2.0, 1.0]
    own = Profiles.of(
        1, ITEMS, np.zeros(3, np.int64), np.array([1, 2, 3]), np.array([5.0, 4.0, 2.0])
    )
    zero = np.zeros(1, np.int64)
    assert predicted(similarity, own, np.zeros(ITEMS), zero, zero, limit=2) == pytest.approx(
        (-2 * 4 + 2) / 3
    )
    assert predicted(similarity, own, np.zeros(ITEMS), zero, zero, limit=EVERY) == pytest.approx(
        (2.5 - 8 + 2) / 3.5
    )


def test_bounds_act_example_by_example(profiles, similarity):
    """Against the formulas of algorithm 1, example by example."""
    means, _ = item_means(profiles)
    examples, bounds = Examples(profiles, means), Bounds(error=0.7, factor=0.9, floor=4.0)
    own = profiles.centred(means)
    for place in range(len(examples)):
        i, mine = own.items[place], np.flatnonzero(own.users == own.users[place])
        others = mine[mine != place]
        s, d = similarity[i, own.items[others]], own.values[others]
        weight = max(np.abs(s).sum(), 4.0)
        guess = s @ d / weight
        error = np.clip(guess - own.values[place], -0.7, 0.7)
        expected = np.zeros((ITEMS, ITEMS))
        expected[i, own.items[others]] = error * np.clip(d - np.sign(s) * guess, -0.9, 0.9) / weight
        found, _ = examples.gradient(similarity, np.array([place]), bounds)
        np.testing.assert_allclose(found, expected, atol=1e-14)
        assert np.abs(found).max() <= 0.7 * 0.9 / 4.0
