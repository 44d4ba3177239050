# SPDX-License-Identifier: Apache-2.0
"""Private alternating least squares: without noise it is iALS; no user moves a sum by more than its
accounted sensitivity."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from fedrec.baselines.private.dp_als import DpAls
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


def test_blocks_of_users_do_not_matter(users, monkeypatch):
    whole = made(**EXACT)
    whole.fit(users)
    monkeypatch.setattr("fedrec.baselines.private.dp_als._NUMBERS_AT_ONCE", 100)
    parts = made(**EXACT)
    parts.fit(users)
    np.testing.assert_allclose(whole.scores(users), parts.scores(users), atol=1e-6)
