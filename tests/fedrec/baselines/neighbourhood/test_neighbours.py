# SPDX-License-Identifier: Apache-2.0
"""Neighbourhoods of users and of items against scikit-learn's neighbours and `implicit`'s item
similarities."""

import numpy as np
import pytest
import torch
from scipy import sparse

from fedrec.baselines.base import Histories
from fedrec.baselines.neighbourhood._sparse_product import dense_product
from fedrec.baselines.neighbourhood.item_knn import ItemKnn, ItemKnnConfig
from fedrec.baselines.neighbourhood.similarity import NeighbourConfig, nearest, similarities
from fedrec.baselines.neighbourhood.user_knn import UserKnn, UserKnnConfig

# scikit-learn's name of each distance, and the similarity that belongs to it.
SKLEARN = {
    "cosine": ("cosine", lambda distance: 1 - distance),
    "pearson": ("correlation", lambda distance: 1 - distance),
    "euclidean": ("euclidean", lambda distance: 1 / (1 + distance)),
}


def fitted(baseline, config, liked):
    model = baseline(config)
    model.fit(liked)
    return model


@pytest.mark.parametrize("metric", SKLEARN)
def test_similarities_are_those_of_scikit_learn(metric, liked, others):
    distances = pytest.importorskip("sklearn.metrics").pairwise_distances
    rows, columns = others.csr(), liked.csr()
    name, of = SKLEARN[metric]
    expected = of(
        distances(rows.toarray().astype(float), columns.toarray().astype(float), metric=name)
    )
    np.testing.assert_allclose(similarities(rows, columns.T.tocsr(), metric), expected, atol=2e-6)


@pytest.mark.parametrize("metric", SKLEARN)
def test_neighbours_are_those_of_scikit_learn(metric, liked, others):
    """The same similarities from the nearest to the tenth; the choice between equally near users is
    arbitrary."""
    neighbours = pytest.importorskip("sklearn.neighbors")
    name, of = SKLEARN[metric]
    search = neighbours.NearestNeighbors(n_neighbors=10, metric=name, algorithm="brute")
    distances, _ = search.fit(liked.csr().toarray().astype(float)).kneighbors(
        others.csr().toarray().astype(float)
    )
    none = np.full(others.num_users, -1)
    found = nearest(
        others.csr(), liked.csr().T.tocsr(), NeighbourConfig(neighbours=10, metric=metric), none
    ).toarray()
    np.testing.assert_allclose(
        -np.sort(-found, axis=1)[:, :10], np.maximum(of(distances), 0), atol=2e-6
    )


def test_item_scores_are_those_of_implicit(liked, others):
    """implicit's nearest items include the item itself, ours do not."""
    nearest_items = pytest.importorskip("implicit.nearest_neighbours")
    from scipy.sparse import csr_matrix

    reference = nearest_items.CosineRecommender(K=9)
    reference.fit(csr_matrix(liked.csr(np.float64)), show_progress=False)
    similar = np.asarray(reference.similarity.todense())
    np.fill_diagonal(similar, 0.0)
    ours = fitted(ItemKnn, ItemKnnConfig(neighbours=8), liked)
    found = ours._similar.toarray()
    np.testing.assert_allclose(
        -np.sort(-found.T, 1)[:, :8], -np.sort(-similar, 1)[:, :8], atol=1e-6
    )
    both = (found > 0) & (similar.T > 0)
    assert both.sum() > 0.9 * (found > 0).sum()  # the rest are ties
    np.testing.assert_allclose(found[both], similar.T[both], atol=1e-6)


@pytest.mark.parametrize("metric", SKLEARN)
def test_user_scores_by_hand(metric, liked, others):
    """All users as neighbours: scores are plain sums of positive similarities."""
    ours = fitted(UserKnn, UserKnnConfig(neighbours=10_000, metric=metric), liked)
    weights = np.maximum(similarities(others.csr(), liked.csr().T.tocsr(), metric), 0)
    np.testing.assert_allclose(
        ours.scores(others).numpy(), weights @ liked.csr().toarray(), rtol=1e-5, atol=1e-5
    )


def test_shrinkage_prefers_similarities_that_rest_on_more():
    rows = Histories(6, np.array([0, 1, 4]), np.array([0, 1, 2, 3])).csr()
    others = Histories(6, np.array([0, 1, 5]), np.array([0, 1, 2, 3, 4])).csr()
    assert similarities(rows, others.T.tocsr(), "cosine", 0)[[0, 1], [0, 1]] == pytest.approx(
        [1, 3 / 12**0.5]
    )
    shrunk = similarities(rows, others.T.tocsr(), "cosine", 2)
    assert shrunk[[0, 1], [0, 1]] == pytest.approx([1 / 3, 3 / (12**0.5 + 2)])


def test_a_user_is_no_neighbour_of_itself(liked):
    """With one neighbour, a training user is scored by the most similar other user, if there is
    one."""
    model = fitted(UserKnn, UserKnnConfig(neighbours=1), liked)
    known = model.scores(liked)
    unknown = model.scores(Histories(liked.num_items, liked.offsets, liked.items))
    own = liked.matrix()
    # without ids, each user finds itself
    assert ((unknown - own).abs() < 1e-5).all(1).sum() > 0.9 * liked.num_users
    table = similarities(liked.csr(), liked.csr().T.tocsr(), "cosine")
    np.fill_diagonal(table, 0)
    np.testing.assert_allclose(known.max(1).values.numpy(), table.max(1), rtol=1e-6)
    backwards = Histories(liked.num_items, *_reversed(liked), liked.users[::-1])
    assert (model.scores(backwards).flip(0) == known).all()


def test_ties_go_to_the_lower_number():
    """Items 1 to 3 are equally similar to item 0."""
    liked = Histories(4, np.array([0, 4, 8]), np.array([0, 1, 2, 3, 0, 1, 2, 3]))
    model = fitted(ItemKnn, ItemKnnConfig(neighbours=1), liked)
    alone = Histories(4, np.array([0, 1]), np.array([0]))
    # item 0 is the nearest of each
    assert model.scores(alone).nonzero()[:, 1].tolist() == [1, 2, 3]
    assert model._similar.tocsc()[:, [0]].nonzero()[0].tolist() == [1]


def _reversed(liked: Histories) -> tuple[np.ndarray, np.ndarray]:
    lists = [
        liked.items[start:stop]
        for start, stop in zip(liked.offsets[:-1], liked.offsets[1:], strict=True)
    ][::-1]
    return np.concatenate([[0], np.cumsum([len(items) for items in lists])]), np.concatenate(lists)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_product_in_native_code_is_that_of_scipy(threads):
    random = np.random.default_rng(2)
    left, right = (
        sparse.random_array(size, density=0.2, rng=random, format="csr")
        for size in ((7, 30), (30, 11))
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = dense_product(left, right)
    finally:
        torch.set_num_threads(before)
    np.testing.assert_allclose(found, (left @ right).toarray(), rtol=1e-5)
    assert dense_product(left[:0], right).shape == (0, 11)
