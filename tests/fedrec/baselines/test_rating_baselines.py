# SPDX-License-Identifier: Apache-2.0
"""Rating baselines by hand, against other solvers, and on published folds."""

import numpy as np
import pytest

from fedrec.baselines.base import Histories, Ratings
from fedrec.baselines.simple.biased_mf import BiasedMf, BiasedMfConfig
from fedrec.baselines.simple.item_mean import ItemMean, ItemMeanConfig
from fedrec.errors import ExperimentError
from fedrec.evaluation.central import evaluate_baselines
from tests.fedrec.baselines.histories import published_fold


def ratings(rows, num_users=4, num_items=5):
    users, items, values = (np.array(column) for column in zip(*rows, strict=True))
    return Ratings(num_users, num_items, users, items, values.astype(np.float64))


ROWS = [(0, 0, 5), (0, 1, 3), (1, 0, 4), (1, 2, 1), (2, 0, 3), (2, 1, 5), (2, 2, 2), (3, 3, 4)]


def test_item_means():
    model = ItemMean(ItemMeanConfig())
    model.fit_ratings(ratings(ROWS))
    got = model.predict(ratings(ROWS), np.zeros(5, dtype=np.int64), np.arange(5))
    assert got.tolist() == [4.0, 4.0, 1.5, 4.0, 27 / 8]


def test_damped_item_means():
    model = ItemMean(ItemMeanConfig(damping=2.0))
    model.fit_ratings(ratings(ROWS))
    got = model.predict(ratings(ROWS), np.zeros(5, dtype=np.int64), np.arange(5))
    mean = 27 / 8
    np.testing.assert_allclose(
        got, [(12 + 2 * mean) / 5, (8 + 2 * mean) / 4, (3 + 2 * mean) / 4, (4 + 2 * mean) / 3, mean]
    )


def objective(data, mean, users, items, regularisation):
    """The penalised squared error, from the formula."""
    errors = data.values - mean - users[data.users, 0] - items[data.items, 0]
    errors = errors - (users[data.users, 1:] * items[data.items, 1:]).sum(1)
    penalty = np.square(users[data.users]).sum() + np.square(items[data.items]).sum()
    return np.square(errors).sum() + regularisation * penalty


def test_users_are_optimal_given_the_items():
    """No change of any user's bias or factors lowers the penalised error; the gradient by finite
    differences is 0."""
    random = np.random.default_rng(0)
    data = Ratings(
        6,
        8,
        random.integers(0, 6, 60),
        random.integers(0, 8, 60),
        random.integers(1, 6, 60).astype(float),
    )
    model = BiasedMf(BiasedMfConfig(factors=2, regularisation=0.1, sweeps=4))
    model.fit_ratings(data)
    pairs = np.divmod(np.arange(48), 8)
    predicted = model.predict(data, *pairs).reshape(6, 8)
    own = np.linalg.lstsq(
        np.column_stack([np.ones(8), model._items[:, 1:]]),
        (predicted - model._mean - model._items[:, 0]).T,
        rcond=None,
    )[0].T
    best = objective(data, model._mean, own, model._items, 0.1)
    for place in np.ndindex(own.shape):
        for step in (-1e-3, 1e-3):
            moved = own.copy()
            moved[place] += step
            assert objective(data, model._mean, moved, model._items, 0.1) > best


def test_a_planted_structure_is_found():
    """Rank-2 ratings with biases, a tenth held out: nearly exact, while item means have large
    errors."""
    random = np.random.default_rng(1)
    truth = (
        random.normal(size=(60, 2)) @ random.normal(size=(2, 40)) + random.normal(size=(60, 1)) + 3
    )
    rows = np.array(list(np.ndindex(60, 40)))
    held = random.random(len(rows)) < 0.1
    values = truth[rows[:, 0], rows[:, 1]]
    data = Ratings(60, 40, rows[~held, 0], rows[~held, 1], values[~held])
    errors = {}
    for model in (
        BiasedMf(BiasedMfConfig(factors=2, regularisation=1e-4, sweeps=30)),
        ItemMean(ItemMeanConfig()),
    ):
        model.fit_ratings(data)
        predicted = model.predict(data, rows[held, 0], rows[held, 1])
        errors[type(model)] = np.sqrt(np.square(predicted - values[held]).mean())
    assert errors[BiasedMf] < 0.05 and errors[ItemMean] > 0.5


def test_ranking_is_refused():
    with pytest.raises(ExperimentError, match="does not rank items"):
        ItemMean(ItemMeanConfig()).fit(Histories(2, np.array([0, 1]), np.array([1])))


def test_protocol(world):
    """Clients 0 to 2 train on ratings 5, 2; 5, 4; 1 of items 0, 1; 1, 1; 5. Held out of client 0
    are items 2 and 3."""
    names = ["item-mean", "popularity"]
    found = evaluate_baselines(names, world("rating"), held_out="test", clients=np.array([0]))
    # Items 2 and 3 have no ratings, so both are predicted by the overall mean, 3.4; the true
    # ratings are 4 and 1.
    assert list(found) == ["item-mean"]
    assert found["item-mean"]["mae"] == pytest.approx((0.6 + 2.4) / 2)
    assert found["item-mean"]["rmse"] == pytest.approx(np.sqrt((0.6**2 + 2.4**2) / 2))


@pytest.mark.real_data
@pytest.mark.slow
def test_published_folds():
    """Five-fold RMSE on MovieLens-100K: item means 1.0246, and below .935 for biased matrix
    factorization."""
    errors = []
    for fold in range(1, 6):
        found = evaluate_baselines(
            ["item-mean", "biased-mf"], published_fold(fold), held_out="test"
        )
        errors.append([found["item-mean"]["rmse"], found["biased-mf"]["rmse"]])
    means = np.mean(errors, axis=0)
    assert means[0] == pytest.approx(1.0246, abs=3e-4) and means[1] < 0.935, means
