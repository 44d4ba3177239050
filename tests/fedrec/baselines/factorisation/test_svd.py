# SPDX-License-Identifier: Apache-2.0
"""Matrix factorization by gradient descent against Surprise, one step by hand, and new users."""

import numpy as np
import pytest

from fedrec.baselines.base import Ratings
from fedrec.baselines.factorisation.svd import Svd, SvdConfig


@pytest.fixture(scope="module")
def planted():
    """Sixty users and forty items of rank two with biases, a fifth of the ratings missing, users
    ascending."""
    random = np.random.default_rng(1)
    truth = (
        random.normal(size=(60, 2)) @ random.normal(size=(2, 40)) + random.normal(size=(60, 1)) + 3
    )
    users, items = np.nonzero(random.random(truth.shape) < 0.8)
    return truth, Ratings(60, 40, users, items, truth[users, items])


def some(ratings, chosen):
    return Ratings(
        60, 40, *(column[chosen] for column in (ratings.users, ratings.items, ratings.values))
    )


def test_the_first_step_by_hand():
    model = Svd(SvdConfig(factors=2, epochs=1, learning_rate=0.1, regularisation=0.5))
    users, items = np.array([[0.2, -0.1]]), np.array([[0.3, 0.4], [0.0, 0.0]])
    model._learn(Ratings(1, 2, np.array([0]), np.array([0]), np.array([4.0])), users, items)
    error = 4 - 4 - (0.2 * 0.3 - 0.1 * 0.4)
    np.testing.assert_allclose(
        users[0], [0.2 + 0.1 * (error * 0.3 - 0.1), -0.1 + 0.1 * (error * 0.4 + 0.05)]
    )
    np.testing.assert_allclose(
        items[0], [0.3 + 0.1 * (error * 0.2 - 0.15), 0.4 + 0.1 * (error * -0.1 - 0.2)]
    )
    assert model._user_biases[0] == pytest.approx(0.1 * error)
    assert model._item_biases.tolist() == pytest.approx([0.1 * error, 0])


def test_a_planted_structure_is_found(planted):
    truth, ratings = planted
    model = Svd(SvdConfig(factors=4, epochs=300, learning_rate=0.02, regularisation=0.005))
    model.fit_ratings(ratings)
    missing = np.array(
        sorted({*np.ndindex(60, 40)} - {*zip(ratings.users, ratings.items, strict=True)})
    ).T
    predicted = model.predict(ratings, *missing)
    assert np.sqrt(np.square(predicted - truth[tuple(missing)]).mean()) < 0.3 < truth.std() / 3


def test_users_who_come_later(planted):
    """New users are fitted to their known ratings nearly as well as by training with them."""
    truth, ratings = planted
    early = ratings.users < 50
    model = Svd(SvdConfig(factors=4, epochs=300, learning_rate=0.02, regularisation=0.005))
    model.fit_ratings(some(ratings, early))
    late = np.repeat(np.arange(50, 60), 40), np.tile(np.arange(40), 10)
    predicted = model.predict(ratings, *late)
    assert np.sqrt(np.square(predicted - truth[late]).mean()) < truth[50:].std() / 3
    np.testing.assert_array_equal(predicted, model.predict(some(ratings, ~early), *late))
    alone = model.predict(some(ratings, ratings.users == 55), np.full(40, 55), np.arange(40))
    np.testing.assert_allclose(alone, predicted[200:240])


def test_who_has_no_rating_gets_the_items_mean_level(planted):
    _, ratings = planted
    model = Svd(SvdConfig())
    model.fit_ratings(some(ratings, ratings.users < 50))
    nobody = Ratings(60, 40, *(np.zeros(0, np.int64),) * 2, np.zeros(0))
    found = model.predict(nobody, np.full(40, 59), np.arange(40))
    np.testing.assert_allclose(found, (model._mean + model._item_biases).clip(*model._range))


def test_predictions_stay_within_the_ratings(planted):
    _, ratings = planted
    model = Svd(SvdConfig(factors=3, epochs=50, learning_rate=0.05))
    model.fit_ratings(ratings)
    found = model.predict(ratings, *(part.ravel() for part in np.indices((60, 40))))
    assert found.min() >= ratings.values.min() and found.max() <= ratings.values.max()


def test_it_equals_surprise(planted):
    """From the same factors, after three epochs: factors and biases to 1e-10."""
    surprise = pytest.importorskip("surprise")
    import pandas as pd

    _, ratings = planted
    frame = pd.DataFrame({"user": ratings.users, "item": ratings.items, "value": ratings.values})
    scale = float(ratings.values.min()), float(ratings.values.max())
    data = surprise.Dataset.load_from_df(
        frame, surprise.Reader(rating_scale=scale)
    ).build_full_trainset()
    reference = surprise.SVD(n_factors=5, n_epochs=3, random_state=7)
    reference.fit(data)
    random = np.random.RandomState(7)
    users, items = random.normal(0, 0.1, (60, 5)), random.normal(0, 0.1, (40, 5))
    order = np.array([data.to_inner_iid(item) for item in range(40)])
    model = Svd(SvdConfig(factors=5, epochs=3))
    model._learn(ratings, users, items[order])
    np.testing.assert_allclose(model._users, reference.pu, atol=1e-10)
    np.testing.assert_allclose(model._items, reference.qi[order], atol=1e-10)
    np.testing.assert_allclose(model._item_biases, reference.bi[order], atol=1e-10)
    predicted = model.predict(ratings, np.array([3, 50]), np.array([9, 0]))
    np.testing.assert_allclose(
        predicted, [reference.predict(3, 9).est, reference.predict(50, 0).est], atol=1e-10
    )
