# SPDX-License-Identifier: Apache-2.0
"""Neighbourhood models: gradients, Langevin dynamics and similarities."""

import numpy as np
import pytest
import torch

from fedrec.baselines.base import Ratings
from fedrec.baselines.neighbours import profiles_of
from fedrec.neighbourhood import (
    Bounds,
    Examples,
    cosine,
    item_means,
    langevin,
    nearest,
    pearson,
    predicted,
)

# Predictions and gradients against autograd and closed-form limits.

ITEMS = 12


@pytest.fixture(scope="module")
def profiles():
    random = np.random.default_rng(0)
    lists = [random.choice(ITEMS, random.integers(2, 9), replace=False) for _ in range(15)]
    users, items = np.repeat(np.arange(15), [len(own) for own in lists]), np.concatenate(lists)
    return profiles_of(Ratings(15, ITEMS, users, items, random.integers(1, 6, len(items)) * 1.0))


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
    means = item_means(profiles)
    leaf = torch.tensor(similarity, requires_grad=True)
    loss, _ = by_torch(profiles, means, leaf, **extra)
    (expected,) = torch.autograd.grad(loss, leaf)
    examples = Examples(profiles, means)
    found = examples.gradient(similarity, np.arange(len(examples)), Bounds(**extra))
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-11)


def test_predictions_and_their_scale(profiles, similarity):
    means = item_means(profiles)
    users, items = (
        grid.ravel() for grid in np.meshgrid(np.arange(15), np.arange(ITEMS), indexing="ij")
    )
    _, expected = by_torch(profiles, means, torch.tensor(similarity))
    found = predicted(similarity, profiles, means, users, items)
    np.testing.assert_allclose(found, expected.numpy().ravel(), atol=1e-12)
    scaled = similarity * np.random.default_rng(2).uniform(0.1, 9, ITEMS)[:, None]
    np.testing.assert_allclose(predicted(scaled, profiles, means, users, items), found, atol=1e-12)


def test_bounds_act_example_by_example(profiles, similarity):
    """Against the formulas of algorithm 1, example by example."""
    means = item_means(profiles)
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
        found = examples.gradient(similarity, np.array([place]), bounds)
        np.testing.assert_allclose(found, expected, atol=1e-14)
        assert np.abs(found).max() <= 0.7 * 0.9 / 4.0


# The chain against a closed form, and against another sampler of the same posterior.


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_the_conjugate_limit(temperature):
    """Without the denominator the posterior of a row is normal; its mean and covariance are known,
    and scale with rho."""
    random = np.random.default_rng(0)
    design, target = random.normal(size=(40, 3)), random.normal(size=40)
    precision = design.T @ design + 2 * np.eye(3)
    mean = np.linalg.solve(precision, design.T @ target)
    points = langevin(
        np.zeros((8000, 3)), lambda s, _: s @ precision - design.T @ target, random,
        steps=600, rate=2e-3, decay=0.0, temperature=temperature,
    )  # fmt: skip
    np.testing.assert_allclose(points.mean(0), mean, atol=0.02)
    # Euler steps of size h have the covariance (P (1 - h P / 4))^-1 exactly.
    expected = temperature * np.linalg.inv(precision @ (np.eye(3) - 2e-3 / 4 * precision))
    np.testing.assert_allclose(np.cov(points.T), expected, rtol=0.1, atol=0.03 * expected.max())


def test_noise_and_steps_have_the_scale_of_the_schedule():
    """Without an energy a chain is a random walk of variance rho eta_1 sum of t^-xi."""
    random, steps = np.random.default_rng(1), 50
    found = langevin(
        np.zeros(200_000), lambda x, _: np.zeros_like(x), random,
        steps=steps, rate=0.3, decay=0.3, temperature=0.09,
    )  # fmt: skip
    expected = 0.09 * 0.3 * (np.arange(1, steps + 1) ** -0.3).sum()
    assert found.var() == pytest.approx(expected, rel=0.02)
    assert abs(found.mean()) < 5 * np.sqrt(expected / 200_000)
    drift = langevin(
        np.ones(1), lambda x, _: np.ones_like(x), random,
        steps=3, rate=0.1, decay=1.0, temperature=1e-30,
    )  # fmt: skip
    assert drift[0] == pytest.approx(1 - 0.05 * (1 + 1 / 2 + 1 / 3))


# Similarities against their definitions pair by pair, and profiles against loops.

USERS, SIMILARITY_ITEMS = 30, 9


@pytest.fixture(scope="module")
def table():
    """Ratings 1 to 5, NaN for none."""
    random = np.random.default_rng(0)
    found = random.integers(1, 6, (USERS, SIMILARITY_ITEMS)).astype(float)
    found[random.random(found.shape) < 0.5] = np.nan
    found[:, 8] = np.nan
    found[3, 8] = 4.0  # one rater
    found[:, 7] = np.where(np.isnan(found[:, 7]), np.nan, 3.0)  # no variance
    return found


def grouped(table):
    users, items = np.nonzero(~np.isnan(table))
    order = np.random.default_rng(1).permutation(len(users))
    values = table[users, items][order]
    return profiles_of(Ratings(*table.shape, users[order], items[order], values))


def by_pairs(table, measure):
    """A measure of two columns over the users who rated both."""
    found = np.zeros((SIMILARITY_ITEMS, SIMILARITY_ITEMS))
    for i, j in np.ndindex(found.shape):
        both = ~np.isnan(table[:, i]) & ~np.isnan(table[:, j])
        if i != j and both.any():
            found[i, j] = measure(table[both, i], table[both, j])
    return found


def ratio(a, b):
    norm = np.sqrt((a @ a) * (b @ b))
    return a @ b / norm if norm else 0.0


def correlation(a, b):
    return 0.0 if np.ptp(a) == 0 or np.ptp(b) == 0 else np.corrcoef(a, b)[0, 1]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (cosine, lambda table: by_pairs(table, ratio)),
        (lambda own: cosine(own, "all"), lambda table: filled(np.nan_to_num(table))),
        (pearson, lambda table: by_pairs(table, correlation)),
        (
            lambda own: pearson(own, "all"),  # with means of all ratings
            lambda table: by_pairs(table - np.nanmean(table, axis=0), ratio),
        ),
    ],
    ids=["cosine", "cosine of all", "pearson", "pearson of all"],
)
def test_similarities_are_those_of_each_pair(table, found, expected):
    np.testing.assert_allclose(found(grouped(table)), expected(table), atol=1e-9)


def filled(table):
    """Cosines of whole columns, filled with zeros."""
    norms = np.linalg.norm(table, axis=0)
    return table.T @ table / np.outer(norms, norms) * (1 - np.eye(SIMILARITY_ITEMS))


def test_nearest_keeps_the_largest_magnitudes():
    kept = nearest(np.array([[0.0, -3, 2, 1], [1, 0, 1, 1], [0, 0, 0, 0], [4, 3, -5, 0]]), 2)
    assert kept.tolist() == [[0, -3, 2, 0], [1, 0, 1, 0], [0, 0, 0, 0], [4, 0, -5, 0]]


def test_profiles_group_and_average_repeated_ratings():
    columns = [2, 0, 2, 2], [1, 3, 0, 1], [5.0, 4, 1, 2]
    found = profiles_of(Ratings(3, 4, *map(np.array, columns)))
    assert found.offsets.tolist() == [0, 1, 1, 3] and found.items.tolist() == [3, 0, 1]
    assert found.values.tolist() == [4, 1, 3.5] and found.users.tolist() == [0, 2, 2]
    means = item_means(found)
    assert means.tolist() == [1, 3.5, pytest.approx(8.5 / 3), 4]


def test_profiles_are_cut_to_so_many_ratings_at_random(table):
    profiles = grouped(table)
    keys = np.random.default_rng(0).random((2, len(profiles.items)))
    cut = profiles.at_most(3, keys[0])
    assert np.array_equal(cut.counts, np.minimum(profiles.counts, 3))
    places = cut.users * SIMILARITY_ITEMS + cut.items
    assert np.isin(places, profiles.users * SIMILARITY_ITEMS + profiles.items).all()
    assert (np.diff(places) > 0).all()
    assert not np.array_equal(cut.items, profiles.at_most(3, keys[1]).items)
