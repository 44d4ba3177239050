# SPDX-License-Identifier: Apache-2.0
"""Every accountant against values of other implementations, and the order of the bounds.

The values were computed once with autodp 0.2.3 and dp-accounting 0.6.0 and with an independent
numerical integration.
"""

import math

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from fedrec.privacy.accounting.accountant import Accountant
from fedrec.privacy.accounting.backends.pld import attack_epsilon
from fedrec.privacy.accounting.events import NoisyRound, Release
from fedrec.privacy.accounting.sampling import FixedSize, Full, Poisson

# (M, N, z, T, delta): autodp, PLD without replacement, PLD Poisson, RDP Poisson,
# autodp's own get_eps
TABLE = {
    (30, 4800, 1.0, 1000, 1e-5): (2.158129, 1.318277, 1.099601, 1.410738, 2.550565),
    (30, 760, 1.0, 40, 1e-5): (3.416644, 2.101700, 1.992160, 2.473650, 4.042148),
    (100, 943, 2.0, 200, 1e-5): (8.565494, 3.971139, 3.587502, 3.932785, 10.002722),
    (50, 6040, 0.8, 300, 1e-5): (2.909765, 1.851279, 1.718924, 2.479184, 3.535269),
    (943, 943, 10.0, 100, 1e-5): (4.752728, 4.377178, 4.377179, 4.752728, 5.298526),
    (1, 100, 3.0, 1, 1e-5): (0.102668, 0.012931, 0.012931, 0.101390, 0.146104),
    (64, 1000, 0.5, 10, 1e-5): (13.823408, 9.830950, 9.685683, 12.111352, 15.209724),
}
# delta 1e-8, 1e-6, 1e-4 at z = 1, T = 1000: PLD without replacement, best attack,
# printed with 3 decimals
CELLS = {
    (5, 4800): ((0.336, 0.227, 0.147), (0.318, 0.194, 0.118)),
    (30, 4800): ((1.936, 1.524, 1.097), (1.725, 1.298, 0.894)),
    (2, 760): ((0.845, 0.610, 0.417), (0.788, 0.523, 0.338)),
    (15, 760): ((6.286, 5.235, 4.016), (5.375, 4.382, 3.257)),
}


def epsilon(backend, event, rounds, delta):
    accountant = Accountant(backend)
    accountant.step(event, rounds)
    return accountant.epsilon(delta).epsilon


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_bounds_have_their_reference_values_and_order(case):
    cohort, clients, z, rounds, delta = case
    autodp, pld, attack, poisson, get_eps = TABLE[case]
    fixed = NoisyRound("gaussian", FixedSize(cohort, clients), "replace-one", z)
    sampled = NoisyRound("gaussian", Poisson(cohort / clients), "add-remove", z)
    a, d = (epsilon(name, fixed, rounds, delta) for name in ("autodp", "pld"))
    e = attack_epsilon({fixed.release: rounds}, delta)
    assert a == pytest.approx(autodp, rel=1e-4)
    assert d == pytest.approx(pld, rel=1e-3)
    assert e == pytest.approx(attack, rel=1e-3)
    assert epsilon("autodp", sampled, rounds, delta) == pytest.approx(poisson, rel=1e-4)
    assert epsilon("pld", sampled, rounds, delta) == pytest.approx(attack, rel=1e-3)
    assert e <= d * (1 + 1e-6) and d <= a <= get_eps


@pytest.mark.parametrize("case", CELLS, ids=str)
def test_cells_of_the_papers_tables_by_a_tighter_accountant(case):
    event = NoisyRound("gaussian", FixedSize(*case), "replace-one", 1.0)
    pld = Accountant("pld")
    pld.step(event, 1000)
    for delta, *values in zip((1e-8, 1e-6, 1e-4), *CELLS[case], strict=True):
        found = (
            pld.epsilon(delta).epsilon,
            attack_epsilon({event.release: 1000}, delta),
        )
        assert found == pytest.approx(values, abs=6e-4)


@pytest.mark.parametrize(("backend", "slack"), [("autodp", 1.25), ("pld", 1 + 1e-4)])
@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
@pytest.mark.parametrize(
    ("z", "rounds", "delta"), [(1.0, 1, 1e-5), (5.0, 100, 1e-6), (0.5, 3, 1e-8), (30.0, 50, 1e-4)]
)
def test_full_participation_is_the_analytic_gaussian(backend, slack, adjacency, z, rounds, delta):
    mu = math.sqrt(rounds) / z

    def excess(eps):
        return norm.cdf(mu / 2 - eps / mu) - math.exp(eps + norm.logcdf(-mu / 2 - eps / mu)) - delta

    exact = brentq(excess, 0, 200, xtol=1e-12)
    found = epsilon(backend, NoisyRound("gaussian", Full(), adjacency, z), rounds, delta)
    assert exact * (1 - 1e-9) <= found <= exact * slack


def test_a_whole_cohort_is_full_participation():
    assert Release("gaussian", FixedSize(9, 9), "add-remove", 1.0) == Release(
        "gaussian", Full(), "add-remove", 1.0
    )
    assert Release("gaussian", Poisson(1.0), "replace-one", 1.0) == Release(
        "gaussian", Full(), "replace-one", 1.0
    )
