# SPDX-License-Identifier: Apache-2.0
"""Private systems trained by DP-SGD."""

import math

import numpy as np
import pytest
import torch

from fedrec.baselines.base import Histories
from fedrec.baselines.private.sgd import DpAe, _chosen_clip, _OuterGradients
from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.accountant import Accountant
from fedrec.privacy.accounting.events import NoisyRound, NonPrivate
from fedrec.privacy.accounting.sampling import FixedSize, Full, Poisson
from fedrec.privacy.optimal_clip import optimal_clip
from tests.fedrec.baselines.histories import made, spent

# Matrix factorization by DP-SGD: users' gradients equal autograd's, and an optimal clip norm has no
# guarantee.

SMALL = {"factors": 3, "steps": 4, "cohort": 10}


def drawn_pairs(users=6, seed=0) -> _OuterGradients:
    random = torch.Generator().manual_seed(seed)
    shapes = {"table": (5, 3), "bias": (5, 1)}
    return _OuterGradients(
        {
            name: tuple(torch.randn(users, width, generator=random) for width in widths)
            for name, widths in shapes.items()
        }
    )


def test_outer_gradients_are_what_they_stand_for():
    pairs = drawn_pairs()
    whole = pairs.dense().double()
    torch.testing.assert_close(pairs.norms(), whole.norm(dim=1))
    assert pairs.coordinates == whole.shape[1] == 20
    bound = float(whole.norm(dim=1).median())
    total = pairs.clipped_sum(bound)
    flat = torch.cat([total["table"].flatten(), total["bias"]])
    factors = (bound / whole.norm(dim=1, keepdim=True)).clamp(max=1)
    torch.testing.assert_close(flat, (whole * factors).sum(0).float(), atol=1e-5, rtol=1e-5)
    assert total["bias"].shape == (5,)


def test_a_user_who_fails_is_left_out():
    pairs = drawn_pairs()
    pairs.pairs["table"][0][2, 1] = torch.nan
    total = pairs.clipped_sum(0.5)
    assert all(bool(torch.isfinite(value).all()) for value in total.values())


@pytest.mark.parametrize("biases", [True, False])
def test_gradients_are_those_of_autograd(taste, biases):
    """Gradient of each user's squared error with the user's solved factors fixed."""
    model = made("dp-svd", **SMALL, biases=biases, user_regularisation=0.7)
    parameters = model.start(taste, torch.Generator().manual_seed(1))
    if biases:
        parameters["biases"] += torch.linspace(-1, 1, 20)
    rows = taste.matrix()
    found = model.gradients(parameters, rows, torch.Generator()).dense()
    for user in (0, 7):
        leaves = {
            name: value.clone().double().requires_grad_() for name, value in parameters.items()
        }
        items, shift = leaves["items"], leaves.get("biases", torch.zeros(20).double())
        with torch.no_grad():
            columns = torch.cat([items, torch.ones(20, 1)], 1) if biases else items
            ridge = 0.7 * torch.diag(torch.tensor([1.0, 1, 1, 0][: columns.shape[1]])).double()
            own = torch.linalg.solve(
                columns.T @ columns + ridge, columns.T @ (rows[user].double() - shift)
            )
        predicted = items @ own[:3] + shift + (own[3] if biases else 0)
        loss = (rows[user] - predicted).square().sum()
        expected = torch.autograd.grad(loss, list(leaves.values()))
        flat = torch.cat([gradient.flatten() for gradient in expected]).float()
        torch.testing.assert_close(found[user], flat, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            model._predicted(parameters, rows)[1][user], predicted.float().detach()
        )


@pytest.mark.parametrize("name", ["dp-svd", "dpae"])
def test_an_optimal_clip_is_charged_as_not_private(taste, name):
    told = []
    model = made(name, steps=2, cohort=10, clip="optimal")
    model.charge = lambda number, event: told.append(event)
    model.fit(taste)
    assert len(told) == 2 and all(isinstance(event, NonPrivate) for event in told)
    assert math.isinf(spent(model, 40).epsilon)


@pytest.mark.parametrize("multiplier", [0.02, 0.3, 5.0])
def test_the_chosen_clip_is_that_of_algorithm_2(multiplier):
    pairs = drawn_pairs(users=9)
    assert _chosen_clip(pairs, multiplier) == pytest.approx(optimal_clip(pairs.dense(), multiplier))
    pairs.pairs["table"][0][4], pairs.pairs["bias"][0][4] = 0.0, 0.0
    assert _chosen_clip(pairs, multiplier) > 0
    nothing = _OuterGradients({"bias": (torch.zeros(3, 5), torch.zeros(3, 1))})
    assert _chosen_clip(nothing, multiplier) == 0


def test_an_optimal_clip_needs_noise():
    with pytest.raises(ExperimentError, match="noise"):
        made("dp-svd", clip="optimal", noise=False)


# The private autoencoder: each user's gradient equals autograd's and is clipped, and each step is
# charged.

ITEMS = 12
DPAE_SMALL = {"hidden": 6, "latent": 3, "steps": 4, "cohort": 10}


@pytest.fixture
def users():
    """Forty users in two groups, the last one without an item."""
    random = np.random.default_rng(1)
    lists = [random.choice(np.arange(6) + 6 * (user % 2), 4, replace=False) for user in range(39)]
    offsets = np.append(np.arange(0, 4 * 39 + 1, 4), 4 * 39)
    return Histories(ITEMS, offsets, np.concatenate(lists).astype(np.int64))


def one_by_one(model: DpAe, rows: torch.Tensor, bound: float) -> dict[str, torch.Tensor]:
    """Each user's gradient by autograd, clipped over all parameters together, and added up."""
    total = {name: torch.zeros_like(value) for name, value in model._parameters.items()}
    for row in rows:
        leaves = {
            name: value.clone().unsqueeze(0).requires_grad_()
            for name, value in model._parameters.items()
        }
        scores = model._model.history_scores(leaves, row.view(1, 1, -1))[0, 0]
        loss = -(torch.log_softmax(scores, -1) * row).sum()
        own = torch.autograd.grad(loss, list(leaves.values()))
        norm = torch.sqrt(sum((g.double() ** 2).sum() for g in own))
        for name, gradient in zip(leaves, own, strict=True):
            total[name] += gradient[0] * min(1.0, bound / max(float(norm), 1e-30))
    return total


@pytest.mark.parametrize("bound", [0.3, 2.0, 1e6])
def test_clipped_sums_are_those_of_users_one_by_one(users, bound):
    model = made("dpae", **DPAE_SMALL, dropout=0.0)
    model._parameters = model.start(users, torch.Generator().manual_seed(3))
    rows = users.matrix()
    found = model.gradients(model._parameters, rows, torch.Generator()).clipped_sum(bound)
    for name, value in one_by_one(model, rows, bound).items():
        np.testing.assert_allclose(found[name], value, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adjacency", "cohort", "sampling"),
    [
        ("replace-one", 10, FixedSize(10, 40)),
        ("add-remove", 10, Poisson(0.25)),
        ("replace-one", 500, Full()),
        ("add-remove", 500, Full()),
    ],
)
def test_steps_are_charged_with_the_sampling_that_was_done(users, adjacency, cohort, sampling):
    told = []
    model = made("dpae", **{**DPAE_SMALL, "cohort": cohort}, epsilon=6.0, adjacency=adjacency)
    model.charge = lambda number, event: told.append((number, event))
    model.fit(users)
    assert [number for number, _ in told] == [1, 2, 3, 4]
    accountant = Accountant("pld")
    for _, event in told:
        assert isinstance(event, NoisyRound) and event.release.sampling == sampling
        accountant.step(event)
    epsilons = [accountant.epsilon(1e-5).epsilon, spent(model, 40).epsilon]
    assert epsilons == pytest.approx([6.0, 6.0], rel=2e-3)


@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
def test_cohorts(users, adjacency):
    model = made("dpae", **DPAE_SMALL, adjacency=adjacency)
    cohorts = [model._cohort(40, step) for step in range(200)]
    sizes = {len(cohort) for cohort in cohorts}
    assert sizes == {10} if adjacency == "replace-one" else len(sizes) > 3
    assert np.mean([len(cohort) for cohort in cohorts]) == pytest.approx(10, abs=1.5)
    assert all(len(np.unique(cohort)) == len(cohort) for cohort in cohorts)
    assert len({tuple(cohort) for cohort in cohorts}) > 150
