# SPDX-License-Identifier: Apache-2.0
"""Neighbourhoods, predicted ratings and sequences."""

import numpy as np
import pytest
import torch

from fedrec.baselines.base import Histories, Ratings
from fedrec.baselines.neighbours import NeighbourConfig, _nearest_rows, _row_similarities
from fedrec.errors import ExperimentError
from fedrec.evaluation.central import evaluate_baselines
from tests.fedrec.baselines.histories import fitted, histories_of, made, published_fold


def planted(seed=0, users=60, items=20, share=0.6):
    """Two groups of items that users like or dislike together; training ratings, and held-out
    ones."""
    random = np.random.default_rng(seed)
    group = np.arange(items) % 2 * 2 - 1
    values = np.clip(
        3 + random.normal(size=(users, 1)) * group + 0.3 * random.normal(size=(users, items)), 1, 5
    )
    rows = np.array(list(np.ndindex(users, items)))
    train = random.random(len(rows)) < share
    columns = rows[:, 0], rows[:, 1], values.ravel()
    return [
        Ratings(users, items, *(column[part] for column in columns)) for part in (train, ~train)
    ]


def rmse(data, name, **settings):
    train, held = data
    model = made(name, **settings)
    model.fit_ratings(train)
    found = model.predict(train, held.users, held.items)
    return float(np.sqrt(np.square(found - held.values).mean()))


def test_planted_neighbourhoods_are_found():
    """Correlated items are found by correlation and by gradient descent, and improve on item
    means."""
    data = planted()
    floor = rmse(data, "item-mean")
    assert rmse(data, "pcc") < 0.5 * floor
    steps = {"epochs": 60, "batch": None, "learning_rate": 0.5, "regularisation": 0.0}
    assert rmse(data, "pnbm", **steps) < 0.5 * floor
    # items of the other group have negative weights
    assert rmse(data, "pcc") < rmse(data, "pcc", positive_only=True)


def test_without_noise_and_within_its_bounds_algorithm_one_is_plain_descent():
    """Step by step: the first K steps on all ratings; the scale is wide, so nothing is clamped."""
    train, _ = planted()
    for steps in (1, 2, 5):
        same = {"learning_rate": 0.3, "regularisation": 0.01}
        plain = made("pnbm", epochs=steps, batch=None, **same)
        wide = {"scale": [-1000.0, 1000.0], "floor": 0.0, "minimum_ratings": 0, "rescale": 1.0}
        exact = {"start": "constant", "epsilon": None, "iterations": steps}
        noisy = made("dpsgd-pnbm", **exact, **same, **wide)
        plain.fit_ratings(train)
        noisy.fit_ratings(train)
        np.testing.assert_allclose(noisy.similarity, plain.similarity, atol=1e-12)


def test_fallback_and_clipping_by_hand():
    """Two items without a common rater; one user far above the middle of the scale."""
    train = ratings([(0, 0, 5), (1, 0, 1), (1, 1, 5), (2, 1, 1)], 3, 3)
    user, item = np.array([0]), np.array([2])
    for scale, expected in (([1.0, 5.0], 3.0), ([1.0, 2.0], 2.0)):
        model = made("cos", scale=scale)
        model.fit_ratings(train)
        assert model.predict(train, user, item) == pytest.approx(expected)


def test_divergence_is_refused():
    train, _ = planted()
    model = made("pnbm", epochs=300, batch=10, learning_rate=1e300)
    with pytest.raises(ExperimentError, match="diverged"), np.errstate(all="ignore"):
        model.fit_ratings(train)


# scikit-learn's name of each distance, and the similarity that belongs to it.
SKLEARN = {
    "cosine": ("cosine", lambda distance: 1 - distance),
    "pearson": ("correlation", lambda distance: 1 - distance),
    "euclidean": ("euclidean", lambda distance: 1 / (1 + distance)),
}


@pytest.mark.parametrize("metric", SKLEARN)
def test_neighbours_are_those_of_scikit_learn(metric, liked, others):
    """The same similarities from the nearest to the tenth; the choice between equally near users is
    arbitrary."""
    neighbours = pytest.importorskip("sklearn.neighbors")
    name, of = SKLEARN[metric]
    search = neighbours.NearestNeighbors(n_neighbors=10, metric=name, algorithm="brute")
    tables = [histories.csr().toarray().astype(float) for histories in (liked, others)]
    distances, _ = search.fit(tables[0]).kneighbors(tables[1])
    config, none = NeighbourConfig(neighbours=10, metric=metric), np.full(others.num_users, -1)
    found = _nearest_rows(others.csr(), liked.csr().T.tocsr(), config, none).toarray()
    expected = np.maximum(of(distances), 0)
    np.testing.assert_allclose(-np.sort(-found, axis=1)[:, :10], expected, atol=2e-6)


def test_item_scores_are_those_of_implicit(liked, others):
    """implicit's nearest items include the item itself, ours do not."""
    nearest_items = pytest.importorskip("implicit.nearest_neighbours")
    from scipy.sparse import csr_matrix

    reference = nearest_items.CosineRecommender(K=9)
    reference.fit(csr_matrix(liked.csr(np.float64)), show_progress=False)
    similar = np.asarray(reference.similarity.todense())
    np.fill_diagonal(similar, 0.0)
    found = fitted("item-knn", liked, neighbours=8)._similar.toarray()
    best = (-np.sort(-table, 1)[:, :8] for table in (found.T, similar))
    np.testing.assert_allclose(*best, atol=1e-6)
    both = (found > 0) & (similar.T > 0)
    assert both.sum() > 0.9 * (found > 0).sum()  # the rest are ties
    np.testing.assert_allclose(found[both], similar.T[both], atol=1e-6)


def test_shrinkage_prefers_similarities_that_rest_on_more():
    rows = histories_of([[0], [1, 2, 3]], 6).csr()
    columns = histories_of([[0], [1, 2, 3, 4]], 6).csr().T.tocsr()
    for shrinkage, expected in ((0, [1, 3 / 12**0.5]), (2, [1 / 3, 3 / (12**0.5 + 2)])):
        found = _row_similarities(rows, columns, "cosine", shrinkage)
        assert found.diagonal() == pytest.approx(expected)


def test_a_user_is_no_neighbour_of_itself(liked):
    """With one neighbour, a training user is scored by the most similar other user, if there is
    one."""
    model = fitted("user-knn", liked, neighbours=1)
    known = model.scores(liked)
    unknown = model.scores(Histories(liked.num_items, liked.offsets, liked.items))
    own = liked.matrix()
    # without ids, each user finds itself
    assert ((unknown - own).abs() < 1e-5).all(1).sum() > 0.9 * liked.num_users
    table = _row_similarities(liked.csr(), liked.csr().T.tocsr(), "cosine")
    np.fill_diagonal(table, 0)
    np.testing.assert_allclose(known.max(1).values.numpy(), table.max(1), rtol=1e-6)
    backwards = liked.take(np.arange(liked.num_users)[::-1])
    assert (model.scores(backwards).flip(0) == known).all()


def test_ties_go_to_the_lower_number():
    """Items 1 to 3 are equally similar to item 0."""
    model = fitted("item-knn", histories_of([[0, 1, 2, 3]] * 2, 4), neighbours=1)
    # item 0 is the nearest of each
    assert model.scores(histories_of([[0]], 4)).nonzero()[:, 1].tolist() == [1, 2, 3]
    assert model._similar.tocsc()[:, [0]].nonzero()[0].tolist() == [1]


# Rating baselines by hand, against other solvers, and on published folds.


def ratings(rows, num_users=4, num_items=5):
    users, items, values = (np.array(column) for column in zip(*rows, strict=True))
    return Ratings(num_users, num_items, users, items, values.astype(np.float64))


ROWS = [(0, 0, 5), (0, 1, 3), (1, 0, 4), (1, 2, 1), (2, 0, 3), (2, 1, 5), (2, 2, 2), (3, 3, 4)]


def test_item_means():
    model = made("item-mean")
    model.fit_ratings(ratings(ROWS))
    got = model.predict(ratings(ROWS), np.zeros(5, dtype=np.int64), np.arange(5))
    assert got.tolist() == [4.0, 4.0, 1.5, 4.0, 27 / 8]


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
    columns = (random.integers(low, high, 60) for low, high in ((0, 6), (0, 8), (1, 6)))
    data = ratings(np.stack(list(columns), axis=1), 6, 8)
    model = made("biased-mf", factors=2, regularisation=0.1)
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


def test_ranking_is_refused():
    with pytest.raises(ExperimentError, match="does not rank items"):
        fitted("item-mean", histories_of([[1]], 2))


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
def test_published_folds_of_rating_baselines():
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


# SASRec and GRU4Rec trained in one place, beside `cornac`: people who walk from item to item.

USERS, ITEMS, LENGTH = 200, 40, 12


@pytest.fixture(scope="module")
def walks():
    """Sequences `[users, length + 1]`: mostly one or two items on, else anywhere."""
    random = np.random.default_rng(0)
    places = [random.integers(ITEMS, size=USERS)]
    for _ in range(LENGTH):
        on = (places[-1] + random.integers(1, 3, USERS)) % ITEMS
        places.append(np.where(random.random(USERS) < 0.8, on, random.integers(ITEMS, size=USERS)))
    return np.stack(places, 1)


RATES = {"sasrec": 0.005, "gru4rec": 0.01}


def hits(scores, walks):
    """Share of the users whose last item is among the first two."""
    first = torch.as_tensor(scores).topk(2).indices
    return float((first == torch.from_numpy(walks[:, -1:])).any(1).double().mean())


def ours(walks, name, seed=0):
    model = {"name": name, "width": 16, "longest": LENGTH, "dropout": 0.1}
    steps = {"epochs": 20, "batch_size": 32, "learning_rate": RATES[name], "seed": seed}
    offsets = np.arange(0, USERS * LENGTH + 1, LENGTH)
    known = Histories(ITEMS, offsets, walks[:, :LENGTH].ravel(), np.arange(USERS))
    return hits(fitted("central", known, model=model, **steps).scores(known), walks)


@pytest.mark.parametrize("name", ["sasrec", pytest.param("gru4rec", marks=pytest.mark.slow)])
def test_next_items_are_learned_in_one_place(walks, name):
    """The two likely ones are .8 of all, by chance two of forty hit .05; shuffled sequences have
    nothing to learn."""
    assert ours(walks, name) > 0.4
    assert ours(np.random.default_rng(1).permuted(walks, axis=1), name) < 0.2


THEIRS = {
    "sasrec": {
        "embedding_dim": 16, "loss": "ce", "learning_rate": 0.005, "max_len": LENGTH,
        "dropout": 0.1,
    },
    "gru4rec": {"layers": [16], "learning_rate": 0.05, "dropout_p_embed": 0.1},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "theirs"), [("sasrec", "SASRec"), ("gru4rec", "GRU4Rec")])
def test_it_ranks_as_well_as_cornac(walks, name, theirs):
    """Hits over three seeds of equal sizes, after as many epochs as both need to stop gaining;
    cornac's losses draw items, ours does not."""
    kind = getattr(pytest.importorskip("cornac.models"), theirs)
    from cornac.data import SequentialDataset

    known = list(enumerate(walks[:, :LENGTH].tolist()))
    rows = [(str(u), str(u), str(item), n) for u, own in known for n, item in enumerate(own)]
    data = SequentialDataset.build(rows, fmt="USIT")
    items = [data.iid_map[str(item)] for item in range(ITEMS)]
    shared = {"batch_size": 32, "n_sample": 200, "sample_alpha": 0.0, "n_epochs": 20}
    found, reference = [], []
    for seed in range(3):
        found.append(ours(walks, name, seed))
        model = kind(**THEIRS[name], **shared, seed=seed)
        model.fit(data)
        lists = ((data.uid_map[str(u)], [items[item] for item in own]) for u, own in known)
        scores = np.stack([model.score(*given) for given in lists])
        reference.append(hits(scores[:, items], walks))
    apart = abs(np.mean(found) - np.mean(reference))
    assert min(*found, *reference) > 0.5
    assert apart <= 2 * max(np.std(found, ddof=1), np.std(reference, ddof=1)), (found, reference)
