# SPDX-License-Identifier: Apache-2.0
"""Accountants against Google's dp-accounting, Opacus, and integration in 30 digits."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from fedrec.privacy.accounting import rdp
from fedrec.privacy.accounting.accountant import Accountant
from fedrec.privacy.accounting.backends.autodp import Autodp
from fedrec.privacy.accounting.backends.pld import attack_epsilon
from fedrec.privacy.accounting.events import NoisyRound
from fedrec.privacy.accounting.sampling import FixedSize, Full, Poisson

ADD_REMOVE, REPLACE = NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE
ORDERS = rdp.INTEGER_ORDERS.tolist()
CASES = [
    (0.00625, 1.0, 1000, 1e-5),
    (0.1, 2.0, 200, 1e-6),
    (0.02, 0.7, 50, 1e-8),
    (0.5, 4.0, 30, 1e-4),
]


def ours(backend, *events):
    accountant = Accountant(backend)
    for event, count in events:
        accountant.step(event, count)
    return lambda delta: accountant.epsilon(delta).epsilon


@pytest.mark.parametrize(
    ("cohort", "clients", "z", "rounds"), [(30, 4800, 1.0, 1000), (100, 943, 2.0, 200)]
)
def test_without_replacement_is_dp_accountings_on_the_same_orders(cohort, clients, z, rounds):
    theirs = RdpAccountant(ORDERS, REPLACE)
    event = dp_event.SampledWithoutReplacementDpEvent(clients, cohort, dp_event.GaussianDpEvent(z))
    theirs.compose(event, rounds)
    fixed = NoisyRound("gaussian", FixedSize(cohort, clients), "replace-one", z)
    assert ours("autodp", (fixed, rounds))(1e-5) == pytest.approx(
        theirs.get_epsilon(1e-5), rel=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "z", "rounds", "delta"), CASES)
def test_poisson_is_dp_accountings_and_opacus(rate, z, rounds, delta):
    from opacus.accountants.analysis import rdp as opacus_rdp

    event = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(z))
    by_rdp, by_pld = RdpAccountant(ORDERS, ADD_REMOVE), PLDAccountant(ADD_REMOVE)
    by_rdp.compose(event, rounds)
    by_pld.compose(event, rounds)
    poisson = (NoisyRound("gaussian", Poisson(rate), "add-remove", z), rounds)
    expected = by_rdp.get_epsilon(delta)
    assert ours("autodp", poisson)(delta) == pytest.approx(expected, rel=1e-6)
    assert ours("pld", poisson)(delta) == pytest.approx(by_pld.get_epsilon(delta), rel=1e-3)
    curve = opacus_rdp.compute_rdp(q=rate, noise_multiplier=z, steps=1, orders=ORDERS)
    assert Autodp().curve(poisson[0].release) == pytest.approx(curve, rel=1e-6, abs=1e-14)


def test_different_rounds_compose_as_in_dp_accounting():
    theirs = PLDAccountant(ADD_REMOVE)
    theirs.compose(dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(1.0)), 300)
    theirs.compose(dp_event.PoissonSampledDpEvent(0.05, dp_event.GaussianDpEvent(3.0)), 20)
    theirs.compose(dp_event.GaussianDpEvent(20.0), 2)
    parts = [(Poisson(0.01), 1.0, 300), (Poisson(0.05), 3.0, 20), (Full(), 20.0, 2)]
    found = ours(
        "pld",
        *(
            (NoisyRound("gaussian", sampling, "add-remove", z), count)
            for sampling, z, count in parts
        ),
    )(1e-6)
    assert found == pytest.approx(theirs.get_epsilon(1e-6), rel=1e-3)


@pytest.mark.parametrize(
    ("rate", "b", "rounds", "delta"),
    [(0.02, 1.0, 100, 1e-6), (0.3, 5.0, 40, 1e-5), (1.0, 2.0, 5, 1e-3)],
)
def test_laplace_is_dp_accountings(rate, b, rounds, delta):
    theirs = PLDAccountant(ADD_REMOVE)
    theirs.compose(dp_event.PoissonSampledDpEvent(rate, dp_event.LaplaceDpEvent(b)), rounds)
    event = NoisyRound("laplace", Poisson(rate), "add-remove", b)
    tightest = ours("pld", (event, rounds))(delta)
    assert tightest == pytest.approx(theirs.get_epsilon(delta), rel=1e-3)
    assert ours("autodp", (event, rounds))(delta) >= tightest * (1 - 1e-3)


@pytest.mark.parametrize("sampling", [Full(), FixedSize(30, 100), Poisson(0.3)], ids=str)
def test_laplace_without_delta_is_amplified_pure_privacy(sampling):
    adjacency = "add-remove" if isinstance(sampling, Poisson) else "replace-one"
    pure = 7 * math.log(1 + sampling.rate * (math.exp(1 / 1.5) - 1))
    for backend in ("autodp", "pld"):
        assert ours(backend, (NoisyRound("laplace", sampling, adjacency, 1.5), 7))(
            0.0
        ) == pytest.approx(pure, rel=1e-12)
        assert ours(backend, (NoisyRound("laplace", sampling, adjacency, 1.5), 7))(1e-6) <= pure * (
            1 + 1e-12
        )


@pytest.mark.slow
@pytest.mark.parametrize("delta", [1e-2, 1e-3, 1e-5])
def test_one_laplace_round_without_replacement_has_the_profile_of_its_pair(delta):
    rate, b = 0.2, 0.7

    def divergence(eps):  # H(mix || Q) at eps >= 0, integrated directly
        x = np.linspace(-30, 31, 4_000_001)
        q, p = np.exp(-np.abs(x) / b) / (2 * b), np.exp(-np.abs(x - 1) / b) / (2 * b)
        return np.trapezoid(np.maximum((1 - rate) * q + rate * p - math.exp(eps) * q, 0), x)

    found = ours("pld", (NoisyRound("laplace", FixedSize(20, 100), "replace-one", b), 1))(delta)
    assert divergence(found) <= delta < divergence(found - 2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("b", [0.06, 0.2, 1.0, 9.0])
@pytest.mark.parametrize("delta", [1e-8, 1e-5, 1e-2])
def test_one_laplace_round_of_all_clients_reaches_its_closed_form(b, delta):
    """Of two Laplace distributions 1 apart: delta = 1 - e^((epsilon - 1 / b) / 2)."""
    event = NoisyRound("laplace", Full(), "replace-one", b)
    exact = 1 / b + 2 * math.log1p(-delta)
    assert attack_epsilon({event.release: 1}, delta) == pytest.approx(exact, rel=1e-3)
    assert exact * (1 - 1e-9) <= ours("pld", (event, 1))(delta) <= exact * (1 + 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("z", "rounds"), [(0.05, 1), (0.2, 3), (1.0, 10), (1.0, 100)])
def test_the_attack_on_little_noise_is_just_below_its_closed_form(z, rounds):
    """Of normal distributions sqrt(rounds) / z apart (Balle and Wang 2018)."""
    mu, delta = math.sqrt(rounds) / z, 1e-5

    def excess(eps):
        high, low = norm.logcdf(mu / 2 - eps / mu), norm.logcdf(-mu / 2 - eps / mu)
        return math.exp(high) - math.exp(eps + low) - delta

    exact = brentq(excess, 0, mu**2 / 2 + 10 * mu)
    release = NoisyRound("gaussian", Full(), "replace-one", z).release
    assert exact * 0.995 <= attack_epsilon({release: rounds}, delta) <= exact


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "z", "rounds"), [(0.02, 0.2, 20), (0.1, 0.15, 5), (0.005, 0.3, 9)]
)
def test_the_attack_on_samples_with_little_noise_is_near_the_tight_bound(rate, z, rounds):
    event = NoisyRound("gaussian", Poisson(rate), "add-remove", z)
    bound = ours("pld", (event, rounds))(1e-5)
    assert bound * 0.98 <= attack_epsilon({event.release: rounds}, 1e-5) <= bound
