# SPDX-License-Identifier: Apache-2.0
"""The noisy Gram matrix: without noise it is EASE and PureSVD, with noise it costs its epsilon."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from scipy.sparse.linalg import svds
from scipy.stats import norm

from fedrec.baselines.factorisation.ease import Ease
from fedrec.baselines.private._private import Releases
from fedrec.baselines.private.dp_fold_in import DpFoldIn
from fedrec.baselines.private.dp_gram import DpGram, weighted_gram
from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.evaluation.central import evaluate_baselines
from fedrec.experiment.loading import load
from fedrec.privacy.accounting.events import NoisyRound, NonPrivate
from fedrec.privacy.clipping import Clip
from fedrec.privacy.config import PrivacyConfig
from fedrec.privacy.noise_source import Reproducible
from fedrec.privacy.plan import Plan
from tests.fedrec.baselines.histories import histories_of

ITEMS = 25
histories = partial(histories_of, num_items=ITEMS)
CPU = torch.device("cpu")
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
    assert found._scale.mean() == pytest.approx(1) and found._scale.min() < 0.9


@pytest.mark.parametrize("scale", [np.ones(ITEMS), np.linspace(0.2, 3, ITEMS)])
def test_exchanging_a_user_moves_the_gram_matrix_by_sqrt_2_of_the_clip_norm_at_most(scale):
    """Adversarial users: everything, nothing, disjoint halves, single heavy items, and many copies
    of one item."""
    extremes = [
        list(range(ITEMS)),
        [],
        list(range(12)),
        list(range(12, ITEMS)),
        [24],
        [23],
        [24] * 50,
    ]
    clip = Clip(2.0)
    rest = [[1, 2, 3], [4]]
    totals = [
        weighted_gram(histories([*rest, one]).distinct(), scale, clip, CPU) for one in extremes
    ]
    moves = [np.linalg.norm(one - other) for one in totals for other in totals]
    assert max(moves) <= math.sqrt(2) * 2.0 * (1 + 1e-12)
    assert max(moves) == pytest.approx(math.sqrt(2) * 2.0, rel=1e-5)


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
    total = np.arange(250_000.0).reshape(500, 500)
    total += total.T
    noise = Releases({"gram": plan}, Reproducible(1), None).symmetric("gram", total) - total
    assert np.array_equal(noise, noise.T)
    above = noise[np.triu_indices(500, 1)]
    assert above.std() == pytest.approx(
        plan.noise_scale / math.sqrt(2), rel=5 / math.sqrt(2 * len(above))
    )
    assert np.diagonal(noise).std() == pytest.approx(plan.noise_scale, rel=5 / math.sqrt(1000))
    assert np.linalg.eigvalsh(noise.astype(np.float64))[-1] == pytest.approx(
        plan.noise_scale * math.sqrt(1000), rel=0.05
    ), "the noise edge"


@pytest.mark.parametrize("system", [DpGram, DpFoldIn])
@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
def test_both_releases_together_cost_epsilon(adjacency, system):
    """Gaussian parameters mu = sensitivity / sigma add in squares; delta is that of one release of
    their sum."""
    shared = {"epsilon": 2.0, "count_share": 0.2, "clip_norm": 5.0, "count_clip": 3.0}
    model = system(system.Config(adjacency=adjacency, **shared))
    plans, factor = model.plans(1000), math.sqrt(2) if adjacency == "replace-one" else 1.0
    squares = [
        (factor * clip / plans[name].noise_scale) ** 2
        for name, clip in (("counts", 3.0), ("gram", 5.0))
    ]
    assert squares[0] / sum(squares) == pytest.approx(0.2)
    mu = math.sqrt(sum(squares))
    delta = norm.cdf(mu / 2 - 2 / mu) - math.exp(2) * norm.cdf(-mu / 2 - 2 / mu)
    assert delta == pytest.approx(1e-5, rel=0.02)
    report = model.spent(1000)
    assert report.epsilon == pytest.approx(2.0, rel=1e-3) and report.events == 2
    assert set(report.phases) == {"counts", "gram"}
    assert len(set(report.caveats)) == len(report.caveats)


def test_each_release_is_charged_before_its_noise_is_drawn(users, monkeypatch):
    told = []
    model = DpGram(DpGram.Config(seed=3))
    model.charge = lambda number, event: told.append((number, event))
    draw = Reproducible.gaussian
    monkeypatch.setattr(
        Reproducible, "gaussian", lambda *given: told.append("noise") or draw(*given)
    )
    model.fit(users)
    assert [one if one == "noise" else one[0] for one in told] == [1, "noise", 2, "noise"]
    events = [one[1] for one in told if one != "noise"]
    assert [event.phase for event in events] == ["counts", "gram"]
    assert all(
        isinstance(event, NoisyRound) and event.adjacency == "replace-one" for event in events
    )


def test_without_noise_epsilon_is_infinite_and_reported(users):
    told = []
    model = DpGram(DpGram.Config(noise=False, items=5))
    model.charge = lambda number, event: told.append(event)
    model.fit(users)
    assert len(told) == 2 and all(isinstance(event, NonPrivate) for event in told)
    assert math.isinf(model.spent(100).epsilon)


def test_items_that_were_not_chosen_come_last_by_their_counts(users):
    model = fitted(users, noise=False, items=6)
    scores, chosen = model.scores(users), model._chosen
    others = np.setdiff1d(np.arange(ITEMS), chosen)
    assert bool((scores[:, others].amax(1) < scores[:, chosen].amin(1)).all())
    counts = users.distinct().matrix().sum(0).numpy()
    assert set(chosen) == set(np.argsort(-counts, kind="stable")[:6])


def test_noise_follows_the_seed(users):
    first, same, other = (fitted(users, seed=seed).scores(users) for seed in (1, 1, 2))
    assert torch.equal(first, same) and not torch.equal(first, other)
    secure = [fitted(users, mode="secure").scores(users) for _ in range(2)]
    assert not torch.equal(*secure)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"epsilon": 0}, "epsilon"),
        ({"count-share": 1.0}, "count-share"),
        ({"items": 0}, "items"),
        ({"model": "svd"}, "model"),
        ({"clip": 3}, "clip"),
    ],
)
def test_wrong_settings_are_named(settings, key):
    with pytest.raises(ExperimentError, match=rf"baselines\.dp-gram\.{key}"):
        DpGram.Config.parse(settings, at="baselines.dp-gram")


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
