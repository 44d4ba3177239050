# SPDX-License-Identifier: Apache-2.0
"""The cost of the best of a random number of trials, against dp-accounting, and against exact
divergences of small mechanisms."""

import math

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import geom, logser, poisson

from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.private_choice import LAWS, RandomTrials
from fedrec.privacy.accounting.rdp import INTEGER_ORDERS

SHAPES = {"geometric": 1.0, "logarithmic": 0.0, "poisson": math.inf}


def gaussian(z):
    return INTEGER_ORDERS / (2 * z * z)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("mean", "z"), [(2.0, 3.0), (20.0, 1.5), (300.0, 8.0)])
def test_its_curve_and_epsilon_are_those_of_dp_accounting(law, mean, z):
    event = pytest.importorskip("dp_accounting.dp_event")
    rdp = pytest.importorskip("dp_accounting.rdp")
    trials = RandomTrials(law, mean)
    accountant = rdp.RdpAccountant(INTEGER_ORDERS.tolist())
    accountant.compose(event.RepeatAndSelectDpEvent(event.GaussianDpEvent(z), mean, SHAPES[law]))
    assert trials.epsilon(gaussian(z), 1e-5) == pytest.approx(
        accountant.get_epsilon(1e-5), rel=1e-6
    )


@pytest.mark.parametrize("law", LAWS)
def test_the_number_of_trials_has_its_distribution(law):
    trials = RandomTrials(law, 7.0)
    random = np.random.default_rng(0)
    drawn = np.array([trials.draw(random) for _ in range(20_000)])
    exact = {
        "geometric": geom(1 / 7),
        "logarithmic": logser(1 - trials.gamma),
        "poisson": poisson(7),
    }
    assert exact[law].mean() == pytest.approx(7.0, rel=1e-6)
    for count in (0, 1, 2, 5, 10):
        share = exact[law].cdf(count)
        assert np.mean(drawn <= count) == pytest.approx(share, abs=0.02)


def best_of(chances, law, trials):
    """Chances that each of some ordered results is the best one, and that there is none: the
    distribution function of the best is the generating function of K."""
    gamma = 1.0 if law == "poisson" else trials.gamma
    generating = {
        "geometric": lambda x: gamma * x / (1 - (1 - gamma) * x),
        "logarithmic": lambda x: np.log1p(-(1 - gamma) * x) / np.log(gamma),
        "poisson": lambda x: np.exp(trials.mean * (x - 1)),
    }
    below = np.append(0.0, np.cumsum(chances))
    steps = generating[law](np.minimum(below, 1.0))
    return np.append(np.diff(steps), steps[0])


def divergence(p, q):
    """Rényi divergence at the integer orders, the larger one of both directions."""
    orders = INTEGER_ORDERS[:, None].astype(float)
    with np.errstate(divide="ignore"):
        pair = np.log(p), np.log(q)
    return np.max(
        [
            logsumexp(orders * one + (1 - orders) * other, axis=1) / (INTEGER_ORDERS - 1)
            for one, other in (pair, pair[::-1])
        ],
        axis=0,
    )


@pytest.mark.parametrize("law", LAWS)
def test_no_mechanism_costs_more(law):
    """On random pairs of distributions over results, in the order of their scores."""
    random = np.random.default_rng(1)
    nearest = 0.0
    for _ in range(300):
        p = 0.8 * random.dirichlet(np.ones(6)) + 0.2 / 6
        q = p * np.exp(random.uniform(0.05, 1.0) * random.choice([-1.0, 1.0], 6))
        q /= q.sum()
        trials = RandomTrials(law, float(random.uniform(1.1, 20)))
        curve = divergence(p, q)
        ends = best_of(p, law, trials), best_of(q, law, trials)
        used = np.maximum(*ends) > 0
        exact = divergence(ends[0][used], ends[1][used])
        bound = trials.curve(curve)
        assert (exact <= bound * (1 + 1e-9) + 1e-9).all()
        nearest = max(nearest, float((exact / bound).max()))
    assert nearest > 0.3  # else it could not fail


def test_a_number_of_trials_without_a_bound_is_refused():
    with pytest.raises(ExperimentError, match="random number of trials"):
        RandomTrials("geometric", 0.5)
    with pytest.raises(ExperimentError, match="random number of trials"):
        RandomTrials("binomial", 5)  # type: ignore[arg-type]
