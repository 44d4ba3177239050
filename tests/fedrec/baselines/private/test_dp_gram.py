# SPDX-License-Identifier: Apache-2.0
"""The noisy Gram matrix: without noise it is EASE and PureSVD, with noise it costs its epsilon."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from scipy.sparse.linalg import svds

from fedrec.baselines.factorisation.ease import Ease
from fedrec.baselines.private._private import NoisyReleases
from fedrec.baselines.private.dp_gram import DpGram
from fedrec.data.population import Population
from fedrec.evaluation.central import evaluate_baselines
from fedrec.experiment.loading import load
from fedrec.privacy.config import PrivacyConfig
from fedrec.privacy.noise_source import Reproducible
from fedrec.privacy.plan import Plan
from tests.fedrec.baselines.histories import histories_of

ITEMS = 25
histories = partial(histories_of, num_items=ITEMS)
EXACT = {"noise": False, "clip-norm": 1e9, "count-clip": 1e9, "exponent": 0.0, "items": 100}


@pytest.fixture
def users():
    """Users with repeated items, one with none and one with all; two kinds of taste."""
    random = np.random.default_rng(5)
    chances = np.stack([np.linspace(3, 1, ITEMS), np.linspace(1, 3, ITEMS)])
    chances /= chances.sum(1, keepdims=True)
    lists = [random.choice(ITEMS, 9, p=chances[user % 2]).tolist() for user in range(120)]
    return histories([*lists, [], list(range(ITEMS))])


def fitted(users, **options) -> DpGram:
    model = DpGram(
        DpGram.Config.parse({key.replace("_", "-"): value for key, value in options.items()})
    )
    model.fit(users)
    return model


def test_without_noise_it_is_ease(users):
    ease = Ease(Ease.Config(regularisation=20.0))
    ease.fit(users)
    found = fitted(users, **EXACT, model="ease", regularisation=20.0)
    np.testing.assert_allclose(found.scores(users), ease.scores(users), atol=2e-5)


@pytest.mark.parametrize("factors", [3, 7])
def test_without_noise_it_is_puresvd(users, factors):
    once = users.distinct()
    matrix = csr_matrix(
        (np.ones(len(once.items)), once.items, once.offsets), (users.num_users, ITEMS)
    )
    vectors = svds(matrix, factors)[2]
    expected = matrix @ vectors.T @ vectors
    found = fitted(users, **EXACT, model="puresvd", factors=factors)
    np.testing.assert_allclose(found.scores(users), expected, atol=2e-5)


def test_items_are_weighted_and_the_weights_taken_back(users):
    """With all eigenvectors nothing is lost, for any weights: scores equal the history."""
    found = fitted(users, **{**EXACT, "exponent": 0.4}, model="puresvd", factors=ITEMS)
    np.testing.assert_allclose(found.scores(users), users.distinct().matrix(), atol=1e-4)
    assert found.chosen.weights.mean() == pytest.approx(1) and found.chosen.weights.min() < 0.9


def test_a_gram_matrix_has_noise_in_coordinates_of_its_frobenius_norm():
    plan = Plan.of(
        PrivacyConfig(clip_norm=3.0, noise_multiplier=2.0),
        "full",
        {},
        5,
        1,
        contributions="non-negative",
    )
    assert plan.noise_scale == pytest.approx(2 * math.sqrt(2) * 3)
    total = torch.arange(250_000.0, dtype=torch.float64).view(500, 500)
    total = total + total.T
    releases = NoisyReleases({"gram": plan}, Reproducible(1), None)
    noise = (releases.symmetric("gram", total) - total).numpy()
    assert np.array_equal(noise, noise.T)
    above = noise[np.triu_indices(500, 1)]
    assert above.std() == pytest.approx(
        plan.noise_scale / math.sqrt(2), rel=5 / math.sqrt(2 * len(above))
    )
    assert np.diagonal(noise).std() == pytest.approx(plan.noise_scale, rel=5 / math.sqrt(1000))
    assert np.linalg.eigvalsh(noise)[-1] == pytest.approx(
        plan.noise_scale * math.sqrt(1000), rel=0.05
    ), "the noise edge"


def test_items_that_were_not_chosen_come_last_by_their_counts(users):
    model = fitted(users, noise=False, items=6)
    scores, chosen = model.scores(users), model.chosen.places
    others = np.setdiff1d(np.arange(ITEMS), chosen)
    assert bool((scores[:, others].amax(1) < scores[:, chosen].amin(1)).all())
    counts = users.distinct().matrix().sum(0).numpy()
    assert set(chosen) == set(np.argsort(-counts, kind="stable")[:6])


@pytest.mark.slow
@pytest.mark.real_data
def test_movielens_1m_is_far_above_private_popularity():
    """Replace-one, epsilon 5, delta 1e-5: Hits@20 of at least .252 where DP popularity has .16."""
    split = {"name": "user-holdout", "test-users": 0.2, "halves": "random"}
    table = {
        "name": "gram",
        "rounds": 1,
        "positive-above": 3.0,
        "dataset": {"name": "ml-1m"},
        "split": split,
    }
    found = evaluate_baselines(
        ["dp-gram", "dp-popularity"], Population.of(load(table)), held_out="test", ks=(20,)
    )
    hits = {name: metrics["hits@20"] for name, metrics in found.items()}
    assert hits["dp-gram"] > 0.252 and 0.15 < hits["dp-popularity"] < 0.17
