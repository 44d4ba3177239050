# SPDX-License-Identifier: Apache-2.0
"""Private alternating least squares: without noise it is iALS; no user moves a sum by more than its
accounted sensitivity."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import norm

from fedrec.baselines.private.dp_als import DpAls
from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.events import NonPrivate
from tests.fedrec.baselines.histories import histories_of

ITEMS, FACTORS = 14, 4
histories = partial(histories_of, num_items=ITEMS)
EXACT = {
    "noise": False,
    "clip-norm": 1e6,
    "count-clip": 1e6,
    "item-budget": 1e12,
    "exponent": 0.0,
    "gram-clip": 1e6,
}


@pytest.fixture
def users():
    """Sixty users in two groups, some items repeated, one user without any."""
    random = np.random.default_rng(2)
    lists = [random.choice(np.arange(ITEMS)[user % 2 :: 2], 5).tolist() for user in range(60)]
    return histories([*lists, []])


def made(**options) -> DpAls:
    return DpAls(DpAls.Config.parse({"factors": FACTORS, **options}))


def ials(liked, items, unobserved, penalty, sweeps):
    """Dense iALS: minimise the sum over liked pairs of (1 - xy)^2, over all pairs of a0 (xy)^2, and
    lambda |.|^2."""
    eye = penalty * np.eye(items.shape[1])
    for _ in range(sweeps):
        users = np.stack([solve(row, items, unobserved, eye) for row in liked])
        items = np.stack([solve(row, users, unobserved, eye) for row in liked.T])
    return np.stack([solve(row, items, unobserved, eye) for row in liked]), items


def solve(row, fixed, unobserved, eye):
    own = fixed[row > 0]
    return np.linalg.solve(own.T @ own + unobserved * fixed.T @ fixed + eye, own.sum(0))


@pytest.mark.parametrize("start", ["random", "gram"])
def test_without_noise_it_is_ials(users, start):
    model = made(**EXACT, start=start, steps=3, unobserved=0.3, regularisation=0.7)
    first = []
    step = model._step
    model._step = lambda *given: (first.append(model._items.clone()), step(*given))[1]
    model.fit(users)
    liked = users.distinct().matrix().double().numpy()
    factors, items = ials(liked, first[0].numpy(), 0.3, 0.7, 3)
    np.testing.assert_allclose(model._items, items, atol=1e-6)
    np.testing.assert_allclose(model.scores(users), factors @ items.T, atol=1e-6)


def test_the_start_is_the_eigenvectors_of_the_gram_matrix(users):
    model = made(**EXACT, steps=1)
    started = []
    model._step = lambda *given: started.append(model._items) or model._items
    model.fit(users)
    liked = users.distinct().matrix().double().numpy()
    vectors = np.linalg.svd(liked)[2][:FACTORS]
    np.testing.assert_allclose(started[0] @ started[0].T, vectors.T @ vectors, atol=1e-5)


def test_exchanging_a_user_moves_each_sum_by_what_is_accounted_at_most():
    """Users with arbitrary factors and items, also opposite ones, through the sums of a step."""
    bound, budget = 2.0, 3.0
    model = made(**{"clip-norm": bound, "item-budget": budget, "items": ITEMS})
    weights = torch.from_numpy(np.linspace(0.3, 2, ITEMS))
    e = np.eye(FACTORS) * bound
    lists = [list(range(ITEMS)), list(range(7)), list(range(7, ITEMS)), [0], [ITEMS - 1], []]
    extremes = [
        (items, factor)
        for items in lists
        for factor in (e[0], -e[0], e[1], (e[0] + e[1]) / 2, 0 * e[0])
    ]
    found = []
    for items, factor in extremes:
        pair = histories([[1, 4], items]), torch.from_numpy(np.stack([e[2], factor]))
        matrices, vectors = model._sums(*pair, weights)
        found.append((pair[1].T @ pair[1], matrices, vectors))
    parts = {part.name: part for part in model.parts()}
    for place, name in enumerate(("gram", "matrices", "vectors")):
        moved = max(float((one[place] - other[place]).norm()) for one in found for other in found)
        factor = 2 if parts[name].contributions == "signed" else math.sqrt(2)
        assert moved <= factor * parts[name].clip_norm * (1 + 1e-12)
        assert moved == pytest.approx(factor * parts[name].clip_norm, rel=1e-5), name


@pytest.mark.parametrize("start", ["random", "gram"])
@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
def test_all_releases_together_cost_epsilon(adjacency, start):
    """Gaussian parameters mu = sensitivity / sigma add in squares, over kinds and steps."""
    model = made(epsilon=3.0, adjacency=adjacency, start=start, steps=2)
    plans, total = model.plans(1000), 0.0
    for part in model.parts():
        factor = (
            1.0 if adjacency == "add-remove" else 2.0 if part.name == "vectors" else math.sqrt(2)
        )
        total += part.releases * (factor * part.clip_norm / plans[part.name].noise_scale) ** 2
    assert sum(part.share for part in model.parts()) == pytest.approx(1)
    mu = math.sqrt(total)
    delta = norm.cdf(mu / 2 - 3 / mu) - math.exp(3) * norm.cdf(-mu / 2 - 3 / mu)
    assert delta == pytest.approx(1e-5, rel=0.03)
    report = model.spent(1000)
    assert report.epsilon == pytest.approx(3.0, rel=1e-3)
    assert report.events == (8 if start == "gram" else 7)


def test_charges_are_made_in_the_order_of_the_releases(users):
    told = []
    model = made(steps=2, items=6)
    model.charge = lambda number, event: told.append((number, event.phase))
    model.fit(users)
    kinds = ["counts", "start", *["gram", "matrices", "vectors"] * 2]
    assert told == list(enumerate(kinds, 1))


def test_without_noise_this_is_reported(users):
    told = []
    model = made(noise=False)
    model.charge = lambda number, event: told.append(event)
    model.fit(users)
    assert told
    assert all(isinstance(event, NonPrivate) for event in told)
    assert math.isinf(model.spent(60).epsilon)


def test_blocks_of_users_do_not_matter(users, monkeypatch):
    whole = made(**EXACT)
    whole.fit(users)
    monkeypatch.setattr("fedrec.baselines.private.dp_als._NUMBERS_AT_ONCE", 100)
    parts = made(**EXACT)
    parts.fit(users)
    np.testing.assert_allclose(whole.scores(users), parts.scores(users), atol=1e-6)


@pytest.mark.parametrize("key", ["clip-norm", "item-budget", "steps", "start-share", "start"])
def test_wrong_settings_are_named(key):
    with pytest.raises(ExperimentError, match=rf"baselines\.dp-als\.{key}"):
        DpAls.Config.parse({key: 0}, at="baselines.dp-als")
