# SPDX-License-Identifier: Apache-2.0
"""Factorisations: iALS, BPR, GF-CF, PureSVD, SVD and WARP, and triples."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from fedrec.baselines.base import Histories, Ratings
from fedrec.baselines.closed_form import CentralIalsConfig, _solved
from fedrec.baselines.pairwise import _epoch
from fedrec.baselines.training import _ranked_others
from fedrec.data.client_data import nth_outside
from fedrec.data.interactions import Feature, FeatureTable
from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.evaluation.central import evaluate_baselines
from fedrec.experiment.schema import load
from fedrec.rng import stream
from tests.fedrec.baselines.histories import drawn_histories, fitted, histories_of, made

# Implicit alternating least squares against its normal equations and `implicit`.


def test_rows_of_all_lengths_and_none():
    """Groups of rows are padded; a row without likes is zero."""
    histories = histories_of([[], [3], list(range(40)), [5, 6], list(range(9)), []], 40)
    fixed = torch.randn(40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    config = CentralIalsConfig(factors=6)
    together = _solved(histories.csr(), fixed, config)
    for user in range(6):
        alone = _solved(histories.block(user, user + 1).csr(), fixed, config)[0]
        torch.testing.assert_close(alone, together[user], rtol=1e-12, atol=1e-14)
    assert not together[[0, 5]].any() and together[[1, 2, 3, 4]].any(1).all()


def test_a_sweep_gives_the_factors_of_implicit(liked):
    """In double precision, from the same item factors, with its c = alpha r."""
    als = pytest.importorskip("implicit.cpu.als")
    config = CentralIalsConfig(factors=6, weight=5.0, regularisation=0.2)
    start = np.random.default_rng(0).normal(size=(50, 6))
    same = {"factors": 6, "alpha": 5.0, "regularization": 0.2, "iterations": 1}
    reference = als.AlternatingLeastSquares(**same, use_cg=False, dtype=np.float64, num_threads=1)
    reference.user_factors, reference.item_factors = np.zeros((80, 6)), start.copy()
    reference.fit(csr_matrix(liked.csr(np.float64)), show_progress=False)
    users = _solved(liked.csr(), torch.from_numpy(start), config)
    items = _solved(liked.csr().T.tocsr(), users, config)
    np.testing.assert_allclose(users.numpy(), reference.user_factors, rtol=0, atol=1e-10)
    np.testing.assert_allclose(items.numpy(), reference.item_factors, rtol=0, atol=1e-10)


# Items that a user does not like: their ranks, and that all are equally likely.


def test_a_rank_is_that_among_the_other_items():
    """Forty users of 25 items; user 0 has none, user 1 all but one."""
    liked = np.random.default_rng(0).random((40, 25)) < 0.4
    liked[0], liked[1] = False, np.arange(25) != 7
    table = csr_matrix(liked.astype(np.float32))
    for user in range(40):
        own = table.indices[table.indptr[user] : table.indptr[user + 1]]
        ranks = np.arange(25 - len(own))
        found = _ranked_others(table.indptr, table.indices, np.full(len(ranks), user), ranks)
        assert found.tolist() == nth_outside(own, ranks).tolist()
        assert found.tolist() == np.setdiff1d(np.arange(25), own).tolist()


OFFICE = {
    "name": "office",
    "rounds": 1,
    "dataset": {"name": "amazon-upc"},
    "split": {"name": "published"},
    "sampler": {"name": "fixed-size", "cohort": 10},
}


@pytest.mark.parametrize("epoch", [_epoch, _epoch.py_func], ids=["compiled", "python"])
def test_a_step_is_the_gradient_of_the_objective(epoch):
    """One triple after the other, against autograd."""
    random = np.random.default_rng(1)
    users, items = (random.normal(0, 1, size).astype(np.float32) for size in ((2, 5), (6, 5)))
    triples = np.array([1, 0, 0]), np.array([0, 1, 3]), np.array([5, 2, 5])
    expected = [torch.tensor(table, dtype=torch.float64) for table in (users, items)]
    for u, i, j in zip(*triples, strict=True):
        leaves = [table.clone().requires_grad_() for table in expected]
        p, q_i, q_j = leaves[0][u], leaves[1][i], leaves[1][j]
        squares = p.square().sum() + q_i.square().sum() + q_j.square().sum()
        loss = -torch.nn.functional.logsigmoid(p @ (q_i - q_j)) + 0.3 / 2 * squares
        slopes = torch.autograd.grad(loss, leaves)
        expected = [table - 0.1 * slope for table, slope in zip(expected, slopes, strict=True)]
    epoch(users, items, *triples, np.float32(0.1), np.float32(0.3))
    for table, values in zip((users, items), expected, strict=True):
        assert np.allclose(table, values.numpy(), atol=1e-5)


OF_BPR = {"k": 8, "max_iter": 40, "lambda_reg": 0.01, "use_bias": False, "learning_rate": 0.05}
OF_NCF = {"num_factors": 8, "num_epochs": 30, "batch_size": 256, "num_neg": 4, "lr": 0.003}
TOWER = [64, 32, 16, 8]
NCF = {"factors": 8, "epochs": 30, "batch_size": 256, "learning_rate": 0.003}


@pytest.mark.parametrize(
    ("name", "own", "cls", "theirs"),
    [
        ("bprmf", {"factors": 8, "epochs": 40, "regularisation": 0.01}, "BPR", OF_BPR),
        pytest.param("gmf", NCF, "GMF", OF_NCF, marks=pytest.mark.slow),
        pytest.param(
            "neumf", NCF | {"tower": TOWER},
            "NeuMF", OF_NCF | {"layers": TOWER, "act_fn": "relu"}, marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_it_ranks_as_well_as_cornac(name, own, cls, theirs, planted, monkeypatch):
    """Recall over five seeds with the same settings: of NCF more epochs and larger steps than by
    default, because the data are small. BPR of cornac draws pairs with replacement."""
    models = pytest.importorskip("cornac.models")
    from cornac.data import Dataset

    monkeypatch.setattr("fedrec.baselines.pairwise._BPR_INIT_STD", 0.036)
    users, rated = planted.known.rows().tolist(), planted.known.items.tolist()
    data = Dataset.from_uir([*zip(users, rated, [1.0] * len(rated), strict=True)])
    items = [data.iid_map[item] for item in range(200)]
    recalls = []
    for seed in range(5):
        scores = fitted(name, planted.known, **own, seed=seed).scores(planted.known)
        reference = getattr(models, cls)(**theirs, seed=seed, verbose=False).fit(data)
        others = np.stack([reference.score(data.uid_map[user])[items] for user in range(600)])
        recalls.append([planted.recall(table) for table in (scores, torch.from_numpy(others))])
    assert planted.agrees(*map(list, zip(*recalls, strict=True))), recalls


def test_random_hits_are_their_closed_form():
    """2,000 users of thirty items with five known each: any other item is in the first ten with 10
    / 25."""
    histories = Histories(30, np.arange(0, 10_001, 5), np.tile(np.arange(5), 2000), np.arange(2000))
    scores = made("random").scores(histories)[:, 5:]
    rank = (scores > scores[:, :1]).sum(1)
    assert (rank < 10).float().mean().item() == pytest.approx(10 / 25, abs=4 * np.sqrt(0.24 / 2000))
    again = made("random").scores(histories.block(3, 5))[:, 5:]
    assert torch.equal(again, scores[3:5])


@pytest.mark.real_data
@pytest.mark.slow
def test_office_at_twenty():
    """Published: BPRMF .1254 Recall@20; Random 20 / (M - n) per user, about .0083."""
    found = evaluate_baselines(
        ("bprmf", "random"), Population.of(load(OFFICE)), held_out="test", ks=(20,)
    )
    assert found["bprmf"]["recall@20"] >= 0.120
    assert found["random"]["recall@20"] == pytest.approx(0.0083, abs=0.002)


# GF-CF against its formula in plain numpy.


def by_hand(rows: np.ndarray, own: np.ndarray, factors: int) -> np.ndarray:
    """Scores of users `own` `[n, items]` after fitting to `rows`."""
    users = rows.sum(1)
    items = rows.sum(0)
    with np.errstate(divide="ignore"):
        left = np.where(users > 0, users**-0.5, 0)
        right = np.where(items > 0, items**-0.5, 0)
    shares = left[:, None] * rows * right
    vectors = np.linalg.svd(shares, full_matrices=False)[2][:factors]
    ideal = np.diag(right) @ vectors.T @ vectors @ np.diag(items**0.5)
    return own @ (shares.T @ shares + 0.3 * ideal)


@pytest.mark.parametrize(("factors", "low_rated"), [(5, 0.4), (5, 0.0), (500, 0.4)])
def test_scores_are_those_of_the_formula(liked, others, factors, low_rated):
    """Of users who were fitted and of others; one item is nobody's, and one user has nothing."""

    def rated(histories: Histories, seed: int) -> tuple[Histories, np.ndarray]:
        ends = np.append(histories.offsets, histories.offsets[-1])
        both = Histories(51, ends, histories.items)
        low = drawn_histories(histories.num_users, 50, 9, seed=seed)
        low = Histories(51, np.append(low.offsets, low.offsets[-1]), low.items)
        rows = np.maximum(both.matrix().numpy(), low_rated * low.matrix().numpy())
        return replace(both, low_rated=low), rows.astype(np.float64)

    training, rows = rated(liked, 3)
    new, own = rated(others, 4)
    model = fitted("gf-cf", training, factors=factors, low_rated=low_rated)
    for histories, table in ((training, rows), (new, own)):
        expected = by_hand(rows, table, factors)
        assert np.ptp(expected) > 0.1
        np.testing.assert_allclose(model.scores(histories).numpy(), expected, atol=2e-5)


def test_nothing_is_liked():
    model = fitted("puresvd", histories_of([[], [], []], 5), factors=2)
    assert model.scores(histories_of([[3]], 5)).isfinite().all()


def test_svd_by_hand():
    """Rating by rating in plain Python; the last user has none."""
    random = np.random.default_rng(1)
    columns = np.nonzero(random.random((6, 5)) < 0.7)
    values = random.normal(3, 1, len(columns[0]))
    ratings = Ratings(7, 5, *columns, values)
    model = made("svd", factors=2, seed=4)
    model.fit_ratings(ratings)
    drawn = stream(4, "baseline-svd")
    p, q = drawn.normal(0, 0.1, (7, 2)), drawn.normal(0, 0.1, (5, 2))
    of_user, of_item, mean = np.zeros(7), np.zeros(5), values.mean()
    for _ in range(20):
        for u, i, value in zip(*columns, values, strict=True):
            error = value - mean - of_user[u] - of_item[i] - p[u] @ q[i]
            of_user[u] += 0.005 * (error - 0.02 * of_user[u])
            of_item[i] += 0.005 * (error - 0.02 * of_item[i])
            both = error * q[i] - 0.02 * p[u], error * p[u] - 0.02 * q[i]
            p[u], q[i] = p[u] + 0.005 * both[0], q[i] + 0.005 * both[1]
    p[6] = 0.0
    expected = mean + of_user[:, None] + of_item + p @ q.T
    found = model.predict(ratings, *np.divmod(np.arange(35), 5))
    np.testing.assert_allclose(found, expected.clip(values.min(), values.max()).ravel())


# WARP against `lightfm-next`, its weights by formula, side features, and users who are folded in.


def test_one_step_by_hand():
    """One user, two items, of which it likes the first: every step is on items 0 and 1, by
    Adagrad's rule."""
    short, longer = (Histories(n, np.array([0, 1]), np.array([0]), np.array([0])) for n in (2, 40))
    model = fitted("warp", short, factors=2, epochs=1)
    assert model._biases.tolist() == [0, 0]  # the rank is 1, and the weight ln 1
    # which does not draw item 0 itself
    biases = fitted("warp", longer, factors=2, epochs=1, max_sampled=1, seed=1)._biases
    moved = np.flatnonzero(biases)
    assert len(moved) == 2 and moved[0] == 0
    np.testing.assert_allclose(biases[moved], [0.05 * np.log(39), -0.05 * np.log(39)], rtol=1e-6)


def test_folded_in_users_are_served_alike(planted):
    """Half of the users do not train: from their items they are served nearly as well as the
    others."""
    known = planted.known
    half = known.take(np.arange(0, 600, 2))
    model = fitted("warp", half, unseen_users="fold-in")
    assert not model.transductive and made("warp").transductive
    found = model.scores(known)
    first = found.masked_fill(known.matrix() > 0, -torch.inf).topk(10).indices
    hit = first == torch.from_numpy(planted.held_out)[:, None]
    seen, unseen = hit[0::2].any(1).double().mean(), hit[1::2].any(1).double().mean()
    assert unseen > 0.7 * seen > 0.7 * 2 * 10 / 200
    torch.testing.assert_close(model.scores(known.take(np.array([5]))), found[[5]])


def test_an_unknown_feature_is_named(taste):
    with pytest.raises(ExperimentError, match="unknown side feature 'genre'"):
        fitted("warp", taste, features=["genre"])


@pytest.mark.parametrize("featured", [False, True])
def test_it_ranks_as_well_as_lightfm(featured, planted):
    """Recall over five seeds, with ids alone and with two side features."""
    lightfm = pytest.importorskip("lightfm")
    from scipy.sparse import coo_matrix, eye, hstack

    random = np.random.default_rng(3)
    codes = [random.integers(0, 6, 600), random.integers(0, 5, 200)]
    features = zip(("age", "genre"), codes, strict=True)
    tables = [FeatureTable(len(own), (Feature.single(name, own),)) for name, own in features]
    known = planted.known
    histories = Histories(200, known.offsets, known.items, known.users, *tables)
    described = [
        csr_matrix(hstack([eye(len(own)), np.eye(own.max() + 1)[own]]), dtype=np.float32)
        for own in codes
    ]
    features = (
        dict(zip(("user_features", "item_features"), described, strict=True)) if featured else {}
    )
    pairs = known.rows().astype(np.int32), known.items.astype(np.int32)
    liked = coo_matrix((np.ones(len(known.items), np.float32), pairs), (600, 200))
    ours, theirs = [], []
    for seed in range(5):
        names = ["age", "genre"] if featured else []
        ours.append(
            planted.recall(fitted("warp", histories, seed=seed, features=names).scores(histories))
        )
        model = lightfm.LightFM(no_components=10, loss="warp", random_state=seed)
        model.fit(liked, epochs=30, num_threads=1, **features)
        (biases, items) = model.get_item_representations(features.get("item_features"))
        (_, users) = model.get_user_representations(features.get("user_features"))
        theirs.append(planted.recall(torch.from_numpy(users @ items.T + biases)))
    assert planted.agrees(ours, theirs), (ours, theirs)
