# SPDX-License-Identifier: Apache-2.0
"""Fold-in on private embeddings: without noise it follows its equations, with noise it costs its
epsilon."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import logsumexp, softmax

from fedrec.baselines.base import Histories
from fedrec.baselines.private._clipped_sums import clipped_gram, clipped_row_sum
from fedrec.baselines.private.dp_fold_in import DpFoldIn, DpFoldInConfig
from fedrec.data.features import Feature, FeatureTable, Vectors
from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.evaluation.central import evaluate_baselines
from fedrec.experiment.loading import load
from fedrec.privacy.clipping import Clip
from tests.fedrec.baselines.histories import histories_of

ITEMS = 25
ragged = partial(histories_of, num_items=ITEMS)
KINDS = ["a", "b", "c"]
COVERS = np.random.default_rng(3).normal(size=(ITEMS, 4))
EXACT = {"noise": False, "clip_norm": 1e9, "count_clip": 1e9, "exponent": 0.0, "items": 100}


def histories(liked, low_rated) -> Histories:
    kind = Feature.single("kind", [KINDS[item % 3] for item in range(ITEMS)])
    title = Feature.words("title", [f"part {item // 3:02}" for item in range(ITEMS)])
    cover = Vectors("cover", COVERS.astype(np.float32), np.ones(ITEMS, dtype=bool))
    features = FeatureTable(ITEMS, (kind,), (title,), (cover,))
    return replace(ragged(liked), item_features=features, low_rated=ragged(low_rated))


@pytest.fixture(scope="module")
def users():
    """Users of two kinds of taste, one who likes nothing and one who likes everything."""
    random = np.random.default_rng(5)
    chances = np.stack([np.linspace(3, 1, ITEMS), np.linspace(1, 3, ITEMS)])
    chances /= chances.sum(1, keepdims=True)
    rated = [
        random.choice(ITEMS, 12, replace=False, p=chances[user % 2]).tolist() for user in range(90)
    ]
    liked = [[*items[:8], items[0]] for items in rated]
    return histories([*liked, [], list(range(ITEMS))], [*(own[8:] for own in rated), [3], []])


def fitted(users, **options) -> DpFoldIn:
    model = DpFoldIn(DpFoldInConfig(**options))
    model.fit(users)
    return model


def by_hand(users, low_rated, variance, factors, *, words=0.0, popularity=0.0, vectors=0.0):
    """The same without noise from its equations: dense matrices and a general optimiser."""
    rows = users.distinct().matrix().double().numpy()
    rows += low_rated * users.low_rated.matrix().double().numpy()
    gram, shares = rows.T @ rows, rows.sum(0) / rows.sum()
    public = variance**0.5 * np.array(
        [[float(item % 3 == kind) for kind in range(3)] for item in range(ITEMS)]
    )
    titles = np.array([[float(item // 3 == part) for part in range(8)] for item in range(ITEMS)])
    covers = COVERS - COVERS.mean(0)
    covers *= (vectors / (covers**2).sum(1).mean()) ** 0.5
    public = np.concatenate(
        [public, words**0.5 * titles, covers, popularity**0.5 * np.log(shares)[:, None]], 1
    )
    public -= shares @ public
    off = ~np.eye(ITEMS, dtype=bool)
    products = np.outer(shares, shares)
    profile = shares * np.sqrt((gram * products)[off].sum() / (products**2)[off].sum())
    rest = gram - np.outer(profile, profile) * (1 + public @ public.T)
    values, vectors = np.linalg.eigh(np.where(off, rest, 0))
    learned = (vectors * np.sqrt(values.clip(min=0)))[:, -factors:] / profile[:, None]
    embeddings = np.concatenate([public, learned], 1)
    found = []
    for own in rows:

        def loss(taste, own=own):
            utilities = embeddings @ taste + np.log(shares)
            value = own.sum() * logsumexp(utilities) - own @ embeddings @ taste + taste @ taste / 2
            return value, (own.sum() * softmax(utilities) - own) @ embeddings + taste

        taste = minimize(loss, np.zeros(embeddings.shape[1]), method="BFGS", jac=True).x
        found.append(embeddings @ taste + np.log(shares))
    return np.array(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "popularity", "vectors", "factors"),
    [
        (0.0, 0.0, 0.0, 4),
        (0.6, 0.0, 0.0, 4),
        (0.0, 0.3, 0.0, 5),
        (0.0, 0.0, 0.8, 4),
        (0.6, 0.3, 0.8, 5),
    ],
)
def test_without_noise_it_follows_its_equations(users, words, popularity, vectors, factors):
    expected = by_hand(
        users,
        0.4,
        0.5,
        factors - bool(popularity),
        words=words,
        popularity=popularity,
        vectors=vectors,
    )
    model = fitted(
        users,
        **EXACT,
        low_rated=0.4,
        feature_variance=0.5,
        word_variance=words,
        popularity_variance=popularity,
        vector_variance=vectors,
        factors=factors,
        damping=0.0,
    )
    difference = model.scores(users).numpy() - expected
    difference -= difference.mean(1, keepdims=True)
    np.testing.assert_allclose(difference, 0, atol=2e-2)
    assert np.ptp(expected - expected.mean(0)) > 0.5, "users differ"


def test_low_rated_items_have_their_weight_and_liked_ones_1(users):
    rows = users.csr(np.float64, 0.3).toarray()
    liked, other = users.distinct().matrix().numpy(), users.low_rated.matrix().numpy()
    np.testing.assert_allclose(rows, np.where(liked > 0, 1, 0.3 * other))
    np.testing.assert_array_equal(users.csr(np.float64).toarray(), liked)
    both = histories([[2]], [[2, 3]])
    np.testing.assert_allclose(both.csr(np.float64, 0.3).toarray()[0, [2, 3]], [1, 0.3])


@pytest.mark.parametrize("scale", [np.ones(ITEMS), np.linspace(0.2, 3, ITEMS)])
def test_exchanging_a_user_moves_both_sums_by_sqrt_2_of_the_clip_norm_at_most(scale):
    """Adversarial users: everything, nothing, disjoint halves, single heavy items, low ratings
    alone, and many copies of one item."""
    everything = list(range(ITEMS))
    liked = [
        everything,
        [],
        everything[:12],
        everything[12:],
        [24],
        [23],
        [],
        [24] * 50,
        everything[:12],
    ]
    lower = [[], everything, everything[12:], [], [], [24], everything[:12], [24] * 9, []]
    rest = [[1, 2, 3], [4]], [[5], [4]]
    clip = Clip(2.0, contributions="non-negative")
    counts, grams = [], []
    for one, other in zip(liked, lower, strict=True):
        rows = histories([*rest[0], one], [*rest[1], other]).csr(np.float64, 0.5)
        counts.append(clipped_row_sum(rows, clip))
        grams.append(clipped_gram(rows * scale, clip))
    for sums in (counts, grams):
        moves = [np.linalg.norm(one - other) for one in sums for other in sums]
        assert max(moves) <= clip.sensitivity("replace-one") * (1 + 1e-12)
        assert max(moves) > 0.99 * math.sqrt(2) * 2.0, "the bound is met"


def test_a_users_scores_depend_on_the_releases_and_its_own_rows_alone(users):
    model = fitted(users, epsilon=5.0, seed=1)
    together, alone = model.scores(users), model.scores(users.block(7, 8))
    torch.testing.assert_close(alone[0], together[7], atol=1e-3, rtol=0)


def test_an_ordered_feature_that_is_none_is_named(users):
    with pytest.raises(ExperimentError, match="no feature eras"):
        fitted(users, ordered={"eras": 2.0})


@pytest.mark.real_data
@pytest.mark.slow
def test_movielens_1m_at_epsilon_2():
    """Replace-one, delta 1e-5: Hits@20 of at least .262."""
    table = {
        "name": "fold-in",
        "rounds": 1,
        "positive-above": 3.0,
        "dataset": {"name": "ml-1m", "eras": True},
        "split": {"name": "user-holdout", "test-users": 0.2, "halves": "random"},
    }
    own = {"dp-fold-in": {"epsilon": 2.0, "items": 300, "ordered": {"eras": 2.4}}}
    found = evaluate_baselines(own, Population.of(load(table)), held_out="test", ks=(20,))
    assert found["dp-fold-in"]["hits@20"] > 0.262
