# SPDX-License-Identifier: Apache-2.0
"""Personal budgets against reference values, scipy's quadrature of the hockey-stick divergence, and
the RDP bound."""

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.gdp import gdp_delta, gdp_epsilon, gdp_parameter
from fedrec.privacy.personal.budgets import PersonalBudget, drawn_budget
from fedrec.privacy.personal.noise import PersonalNoise


# Computed by another implementation: MovieLens-100K, delta 1 / 80,000, 30 uploads per user.
@pytest.mark.parametrize(
    ("adjacency", "nominal", "true"),
    [
        ("add-remove", 0.5, 2.28),
        ("add-remove", 1.0, 5.05),
        ("add-remove", 1.5, 8.18),
        ("replace-one", 0.5, 5.05),
        ("replace-one", 1.0, 11.66),
        ("replace-one", 1.5, 19.65),
    ],
)
def test_thirty_uploads_with_the_papers_noise_cost_far_more_than_stated(adjacency, nominal, true):
    noise = PersonalNoise(budgets="equal", epsilon=nominal, delta=1 / 80_000)
    mu = math.sqrt(noise.cost(3, adjacency, 30))
    assert gdp_epsilon(mu, 1 / 80_000) == pytest.approx(true, abs=0.006)


@pytest.mark.parametrize(("epsilon", "mu"), [(0.0, 0.5), (0.7, 0.5), (3.0, 2.0), (8.0, 2.5)])
def test_delta_is_the_hockey_stick_divergence_of_two_gaussians(epsilon, mu):
    def excess(x):
        return max(0.0, norm.pdf(x, mu) - math.exp(epsilon) * norm.pdf(x))

    start = epsilon / mu + mu / 2
    assert gdp_delta(epsilon, mu) == pytest.approx(
        quad(excess, start, start + 30, epsabs=1e-13)[0], rel=1e-6
    )


@pytest.mark.parametrize("mu", [0.05, 0.5, 3.0, 20.0])
def test_epsilon_inverts_delta_and_is_below_the_rdp_bound(mu):
    epsilon = gdp_epsilon(mu, 1e-5)
    assert gdp_delta(epsilon, mu) == pytest.approx(1e-5, rel=1e-4)
    assert gdp_parameter(epsilon, 1e-5) == pytest.approx(mu, rel=1e-6)
    orders = np.geomspace(1.01, 1e4, 4000)
    rdp = (
        orders * mu**2 / 2
        + np.log1p(-1 / orders)
        - (math.log(1e-5) + np.log(orders)) / (orders - 1)
    )
    assert epsilon <= rdp.min()


def test_a_large_delta_costs_nothing_and_no_guarantee_everything():
    assert gdp_epsilon(0.1, 0.5) == 0
    paper = PersonalNoise(mode="paper")
    assert paper.cost(1, "replace-one", 1) == math.inf and paper.cost(1, "replace-one", 0) == 0


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_calibrated_noise_spends_the_budget_and_no_more(adjacency):
    multiplier = PersonalBudget(0.8, 1e-5).multiplier(7, adjacency)
    moved = {"add-remove": 1.0, "replace-one": 2.0}[adjacency]  # clip norms
    mu = math.sqrt(7 * (moved / multiplier) ** 2)
    assert gdp_epsilon(mu, 1e-5) == pytest.approx(0.8, rel=1e-6)


def test_budgets_are_drawn_from_zero_to_the_largest():
    drawn = [drawn_budget(3, client, 1.5, 1e-5).epsilon for client in range(2000)]
    # 4 standard deviations
    assert min(drawn) > 0 and max(drawn) <= 1.5 and abs(np.mean(drawn) - 0.75) < 0.04
    assert (
        drawn[7] == drawn_budget(3, 7, 1.5, 1e-5).epsilon != drawn_budget(4, 7, 1.5, 1e-5).epsilon
    )


@pytest.mark.parametrize(("epsilon", "delta"), [(0, 1e-5), (math.inf, 1e-5), (1, 0), (1, 1)])
def test_impossible_budgets_are_refused(epsilon, delta):
    with pytest.raises(ExperimentError, match="invalid budget"):
        PersonalBudget(epsilon, delta)
