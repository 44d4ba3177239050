# SPDX-License-Identifier: Apache-2.0
"""FedAdam against torch's Adam on the same gradients, and through a resumed run."""

import numpy as np
import pytest
import torch

from strategies.base import Aggregate
from strategies.fed_adam import FedAdam, FedAdamConfig

GRADIENTS = np.random.default_rng(0).standard_normal((6, 4, 3))


def strategy(**settings):
    return FedAdam(FedAdamConfig(**settings), None, {"name": "sgd"})


def applied(made, rounds, theta):
    for place in rounds:
        total = {"w": -5.0 * GRADIENTS[place]}
        theta = made.apply(theta, Aggregate(total, 5, 5.0, place + 1))
    return theta


def test_with_one_local_step_it_is_adam_on_the_cohort():
    weight = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([weight], lr=0.1, betas=(0.8, 0.95), eps=1e-3)
    for gradient in GRADIENTS:
        weight.grad = torch.from_numpy(gradient)
        adam.step()
    made = strategy(server_lr=0.1, beta1=0.8, beta2=0.95, tau=1e-3)
    theta = applied(made, range(6), {"w": np.zeros((4, 3))})
    np.testing.assert_allclose(theta["w"], weight.detach().numpy(), rtol=1e-10)


def test_a_falling_rate_is_that_of_torchs_schedule():
    weight = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([weight], lr=0.1, eps=1e-8)
    falling = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.0, total_iters=4)
    for gradient in GRADIENTS:
        weight.grad = torch.from_numpy(gradient)
        adam.step()
        falling.step()
    theta = applied(strategy(server_lr=0.1, anneal_rounds=4), range(6), {"w": np.zeros((4, 3))})
    np.testing.assert_allclose(theta["w"], weight.detach().numpy(), rtol=1e-10)


def test_without_correction_the_first_step_is_that_of_algorithm_2():
    made = strategy(server_lr=0.1, beta1=0.9, beta2=0.99, tau=0.01, bias_correction=False)
    theta = applied(made, [0], {"w": np.zeros((4, 3))})
    update = -GRADIENTS[0]
    expected = 0.1 * 0.1 * update / (np.sqrt(0.99 * 0.01**2 + 0.01 * update**2) + 0.01)
    np.testing.assert_allclose(theta["w"], expected, rtol=1e-12)


@pytest.mark.parametrize("corrected", [True, False])
def test_a_restored_strategy_continues_as_if_uninterrupted(corrected):
    unbroken = applied(strategy(bias_correction=corrected), range(6), {"w": np.zeros((4, 3))})
    first, second = strategy(bias_correction=corrected), strategy(bias_correction=corrected)
    half = applied(first, range(3), {"w": np.zeros((4, 3))})
    second.restore(first.state())
    np.testing.assert_array_equal(applied(second, range(3, 6), half)["w"], unbroken["w"])
