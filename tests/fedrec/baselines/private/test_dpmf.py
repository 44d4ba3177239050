# SPDX-License-Identifier: Apache-2.0
"""Private matrix factorization: without noise it is plain alternation, and no user moves a sum by
more than the sensitivity."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from fedrec.baselines.base import Histories
from fedrec.baselines.private.dpmf import DpMf
from tests.fedrec.baselines.histories import histories_of

ITEMS = 9
histories = partial(histories_of, num_items=ITEMS)
EXACT = {
    "noise": False,
    "clip-norm": 1e6,
    "user-norm": 1e6,
    "factors": 3,
    "steps": 4,
    "regularisation": 0.5,
}


@pytest.fixture
def users():
    """Fifty users, some with repeated items, one with none."""
    random = np.random.default_rng(2)
    return histories([*(random.integers(0, ITEMS, 4).tolist() for _ in range(50)), []])


def made(**options) -> DpMf:
    return DpMf(DpMf.Config.parse(options))


def started(model: DpMf, users: Histories) -> np.ndarray:
    """The initial item factors of a model."""
    step = "_descended" if model.config.reading == "posterior" else "_solved"
    once = DpMf(model.config.model_copy(update={"steps": 1}))
    setattr(once, step, lambda *given: once._items)
    once.fit(users)
    return once._items.numpy()


def test_without_noise_a_perturbed_objective_is_alternating_least_squares(users):
    model = made(**EXACT)
    items = started(model, users)
    liked = users.distinct().matrix().double().numpy()
    eye = 0.5 * np.eye(3)
    model.fit(users)
    for _ in range(4):
        factors = liked @ items @ np.linalg.inv(items.T @ items + eye)
        items = liked.T @ factors @ np.linalg.inv(factors.T @ factors + eye)
    # Releases are rounded to float32.
    np.testing.assert_allclose(model._items, items, atol=1e-5)
    np.testing.assert_allclose(
        model.scores(users),
        liked @ items @ np.linalg.inv(items.T @ items + eye) @ items.T,
        atol=1e-5,
    )


def test_without_noise_a_langevin_step_is_the_gradient_of_the_loss(users):
    model = made(**{**EXACT, "reading": "posterior", "steps": 1, "learning-rate": 0.01})
    first, liked = torch.from_numpy(started(model, users)), users.distinct().matrix().double()
    items = first.clone().requires_grad_()
    factors = liked @ first @ torch.linalg.inv(first.T @ first + 0.5 * torch.eye(3).double())
    loss = ((liked - factors @ items.T) ** 2).sum() + 0.5 * (items**2).sum()
    loss.backward()
    model.fit(users)
    np.testing.assert_allclose(model._items, first - 0.01 * items.grad, atol=1e-6)


@pytest.mark.parametrize("reading", ["objective", "posterior"])
def test_exchanging_a_user_moves_each_sum_by_what_is_accounted_at_most(reading):
    model = made(reading=reading, factors=3, **{"clip-norm": 1.5, "user-norm": 2.0})
    # so that a user with opposite factors has the opposite gradient
    model._items = torch.zeros(ITEMS, 3).double()
    axes = 2.0 * np.eye(3)
    choices = [[], [0], [1], list(range(ITEMS))], [axes[0], -axes[0], axes[1], 0 * axes[0]]
    found = []
    for items in choices[0]:
        for factor in choices[1]:
            pair = histories([[2, 3], items]), torch.from_numpy(np.stack([axes[2], factor]))
            total = model.gradient(*pair) if reading == "posterior" else model.linear(*pair)
            found.append((total, pair[1].T @ pair[1]))
    moved = max(float((one[0] - other[0]).norm()) for one in found for other in found)
    assert moved <= 2 * 1.5 * (1 + 1e-12) and moved == pytest.approx(2 * 1.5, rel=1e-5)
    if reading == "objective":
        moved = max(float((one[1] - other[1]).norm()) for one in found for other in found)
        assert moved <= math.sqrt(2) * 4 * (1 + 1e-12) and moved == pytest.approx(math.sqrt(2) * 4)
