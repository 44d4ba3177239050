# SPDX-License-Identifier: Apache-2.0
"""Similarities against their definitions pair by pair, and profiles against loops."""

import numpy as np
import pytest

from fedrec.neighbourhood.profiles import Profiles, item_means
from fedrec.neighbourhood.similarity import co_raters, cosine, nearest, pearson, shrunk

USERS, ITEMS = 30, 9


@pytest.fixture(scope="module")
def table():
    """Ratings 1 to 5, NaN for none."""
    random = np.random.default_rng(0)
    found = random.integers(1, 6, (USERS, ITEMS)).astype(float)
    found[random.random(found.shape) < 0.5] = np.nan
    found[:, 8] = np.nan
    found[3, 8] = 4.0  # one rater
    found[:, 7] = np.where(np.isnan(found[:, 7]), np.nan, 3.0)  # no variance
    return found


def profiles_of(table):
    users, items = np.nonzero(~np.isnan(table))
    order = np.random.default_rng(1).permutation(len(users))
    return Profiles.of(*table.shape, users[order], items[order], table[users, items][order])


def by_pairs(table, measure):
    found = np.zeros((ITEMS, ITEMS))
    for i, j in np.ndindex(found.shape):
        both = ~np.isnan(table[:, i]) & ~np.isnan(table[:, j])
        if i != j and both.any():
            found[i, j] = measure(table[both, i], table[both, j])
    return found


def test_cosine_over_co_raters(table):
    expected = by_pairs(table, lambda a, b: a @ b / np.sqrt((a @ a) * (b @ b)))
    np.testing.assert_allclose(cosine(profiles_of(table)), expected, atol=1e-12)


def test_cosine_over_columns_filled_with_zeros(table):
    full = np.nan_to_num(table)
    norms = np.linalg.norm(full, axis=0)
    expected = full.T @ full / np.outer(norms, norms)
    np.fill_diagonal(expected, 0)
    np.testing.assert_allclose(cosine(profiles_of(table), "all"), expected, atol=1e-12)


def test_pearson_is_that_of_numpy(table):
    def correlation(a, b):
        return 0.0 if np.ptp(a) == 0 or np.ptp(b) == 0 else np.corrcoef(a, b)[0, 1]

    found = pearson(profiles_of(table))
    np.testing.assert_allclose(found, by_pairs(table, correlation), atol=1e-9)
    assert not found[7].any() and not found[8].any()


def test_pearson_with_means_of_all_ratings(table):
    centred = table - np.nanmean(table, axis=0)

    def ratio(a, b):
        norm = np.sqrt((a @ a) * (b @ b))
        return a @ b / norm if norm else 0.0

    np.testing.assert_allclose(
        pearson(profiles_of(table), "all"), by_pairs(centred, ratio), atol=1e-12
    )


def test_shrinkage(table):
    profiles = profiles_of(table)
    rated = ~np.isnan(table)
    both = rated.T.astype(float) @ rated
    np.testing.assert_array_equal(co_raters(profiles), both)
    np.testing.assert_allclose(shrunk(np.ones((ITEMS, ITEMS)), both, 5.0), both / (both + 5))


def test_nearest_keeps_the_largest_magnitudes():
    kept = nearest(np.array([[0.0, -3, 2, 1], [1, 0, 1, 1], [0, 0, 0, 0], [4, 3, -5, 0]]), 2)
    assert kept.tolist() == [[0, -3, 2, 0], [1, 0, 1, 0], [0, 0, 0, 0], [4, 0, -5, 0]]


def test_profiles_group_and_average_repeated_ratings():
    found = Profiles.of(
        3, 4, np.array([2, 0, 2, 2]), np.array([1, 3, 0, 1]), np.array([5.0, 4, 1, 2])
    )
    assert found.offsets.tolist() == [0, 1, 1, 3] and found.items.tolist() == [3, 0, 1]
    assert found.values.tolist() == [4, 1, 3.5] and found.users.tolist() == [0, 2, 2]
    means, mean = item_means(found)
    assert mean == pytest.approx(8.5 / 3) and means.tolist() == [1, 3.5, pytest.approx(mean), 4]


def test_profiles_are_cut_to_so_many_ratings_at_random(table):
    profiles = profiles_of(table)
    keys = np.random.default_rng(0).random((2, len(profiles.items)))
    cut = profiles.at_most(3, keys[0])
    assert np.array_equal(cut.counts, np.minimum(profiles.counts, 3))
    places = cut.users * ITEMS + cut.items
    assert np.isin(places, profiles.users * ITEMS + profiles.items).all()
    assert (np.diff(places) > 0).all()
    assert not np.array_equal(cut.items, profiles.at_most(3, keys[1]).items)
    assert (profiles.more_than(4).counts == np.where(profiles.counts > 4, profiles.counts, 0)).all()
