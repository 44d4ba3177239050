# SPDX-License-Identifier: Apache-2.0
"""Matrix factorization by DP-SGD: users' gradients equal autograd's, and an optimal clip norm has
no guarantee."""

import math

import numpy as np
import pytest
import torch

from fedrec.baselines.private.dpsgd._outer import OuterGradients
from fedrec.baselines.private.dpsgd._sampled import chosen_clip, clipped_sum
from fedrec.baselines.private.dpsgd.dp_svd import DpSvd
from fedrec.baselines.private.dpsgd.dpae import DpAe
from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.accountant import Accountant
from fedrec.privacy.accounting.events import NoisyRound, NonPrivate
from fedrec.privacy.optimal_clip import noise_decides, optimal_clip

SMALL = {"factors": 3, "steps": 4, "cohort": 10}


def made(**options) -> DpSvd:
    return DpSvd(DpSvd.Config.parse({**SMALL, **options}))


def drawn_pairs(users=6, seed=0) -> OuterGradients:
    random = torch.Generator().manual_seed(seed)
    shapes = {"table": (5, 3), "bias": (5, 1)}
    return OuterGradients(
        {
            name: (torch.randn(users, a, generator=random), torch.randn(users, b, generator=random))
            for name, (a, b) in shapes.items()
        }
    )


def test_outer_gradients_are_what_they_stand_for():
    pairs = drawn_pairs()
    whole = pairs.whole().double()
    torch.testing.assert_close(pairs.norms(), whole.norm(dim=1))
    assert pairs.coordinates == whole.shape[1] == 20
    factors = torch.tensor([1.0, 0.5, 0, 2, 0, 0.1], dtype=torch.float64)
    total = pairs.weighted_sum(factors)
    flat = torch.cat([total["table"].flatten(), total["bias"]])
    torch.testing.assert_close(
        flat, (whole * factors[:, None]).sum(0).float(), atol=1e-5, rtol=1e-5
    )
    assert total["bias"].shape == (5,)


def test_a_user_who_fails_is_left_out():
    pairs = drawn_pairs()
    pairs.pairs["table"][0][2, 1] = torch.nan
    total = clipped_sum(pairs, 0.5)
    assert all(bool(torch.isfinite(value).all()) for value in total.values())


@pytest.mark.parametrize("biases", [True, False])
def test_gradients_are_those_of_autograd(taste, biases):
    """Gradient of each user's squared error with the user's solved factors fixed."""
    model = made(biases=biases, **{"user-regularisation": 0.7})
    parameters = model.start(taste, torch.Generator().manual_seed(1))
    if biases:
        parameters["biases"] += torch.linspace(-1, 1, 20)
    rows = taste.matrix()
    found = model.gradients(parameters, rows).whole()
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


def test_it_finds_each_users_own_half(taste):
    model = made(noise=False, steps=200, cohort=40, **{"clip-norm": 1e6, "learning-rate": 0.03})
    model.fit(taste)
    lower, upper = model.scores(taste).split(10, dim=1)
    assert (lower[0::2].mean(1) > upper[0::2].mean(1)).all()
    assert (lower[1::2].mean(1) < upper[1::2].mean(1)).all()


@pytest.mark.parametrize("clip", ["constant", "optimal"])
@pytest.mark.parametrize("baseline", [DpSvd, DpAe])
def test_what_each_step_is_charged(taste, baseline, clip):
    told = []
    model = baseline(
        baseline.Config.parse({"steps": 4, "cohort": 10, "epsilon": 6.0, "clip": clip})
    )
    model.charge = lambda number, event: told.append(event)
    model.fit(taste)
    assert len(told) == 4
    accountant = Accountant("pld")
    for event in told:
        assert isinstance(event, NonPrivate if clip == "optimal" else NoisyRound)
        accountant.step(event)
    expected = math.inf if clip == "optimal" else pytest.approx(6.0, rel=2e-3)
    assert accountant.epsilon(1e-5).epsilon == expected
    assert model.spent(40).epsilon == expected


@pytest.mark.parametrize("multiplier", [0.02, 0.3, 5.0])
def test_the_chosen_clip_is_that_of_algorithm_2(multiplier):
    pairs = drawn_pairs(users=9)
    assert chosen_clip(pairs, multiplier) == pytest.approx(optimal_clip(pairs.whole(), multiplier))
    pairs.pairs["table"][0][4], pairs.pairs["bias"][0][4] = 0.0, 0.0
    assert chosen_clip(pairs, multiplier) > 0
    assert (
        chosen_clip(OuterGradients({"bias": (torch.zeros(3, 5), torch.zeros(3, 1))}), multiplier)
        == 0
    )


def test_where_the_noise_decides_the_smallest_norm_wins():
    random = np.random.default_rng(0)
    for width in (4, 50, 400):
        multiplier = 3 / math.sqrt(width) / math.sqrt(2 / math.pi) * (1 + 1e-9)
        assert noise_decides(multiplier, width) and not noise_decides(multiplier * 0.9, width)
        rows = torch.from_numpy(random.standard_normal((7, width)) * random.exponential(2, (7, 1)))
        assert optimal_clip(rows, multiplier) == pytest.approx(float(rows.norm(dim=1).min()))


def test_an_optimal_clip_needs_noise():
    with pytest.raises(ExperimentError, match="noise"):
        DpSvd.Config.parse({"clip": "optimal", "noise": False}, at="baselines.dp-svd")
