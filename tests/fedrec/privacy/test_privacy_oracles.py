# SPDX-License-Identifier: Apache-2.0
"""Accounting against independent oracles and published values."""

import math
from collections import Counter

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import RdpAccountant
from scipy.linalg import toeplitz
from scipy.optimize import brentq
from scipy.special import binom
from scipy.stats import norm

from fedrec.errors import ExperimentError
from fedrec.privacy.accounting import rdp
from fedrec.privacy.accounting.accountant import Accountant, attack_epsilon, rdp_total
from fedrec.privacy.accounting.events import NoisyRound
from fedrec.privacy.accounting.sampling import FixedSize, Full, Poisson, Scheduled
from fedrec.privacy.plan import Plan, PrivacyConfig

# Accountants against Google's dp-accounting, Opacus, and integration in 30 digits.

ADD_REMOVE, REPLACE = NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE
ORDERS = rdp.INTEGER_ORDERS.tolist()
CASES = [
    (0.00625, 1.0, 1000, 1e-5),
    (0.1, 2.0, 200, 1e-6),
    (0.02, 0.7, 50, 1e-8),
    (0.5, 4.0, 30, 1e-4),
]


def epsilon(backend, delta, *counted):
    """Epsilon of events, each with its number of times."""
    accountant = Accountant(backend)
    for event, count in counted:
        accountant.step(event, count)
    return accountant.epsilon(delta).epsilon


def exact_gaussian(mu, delta):
    """Epsilon of normal distributions mu apart (Balle and Wang 2018)."""

    def excess(eps):
        high, low = norm.logcdf(mu / 2 - eps / mu), norm.logcdf(-mu / 2 - eps / mu)
        return math.exp(high) - math.exp(eps + low) - delta

    return brentq(excess, 0, mu**2 / 2 + 10 * mu, xtol=1e-12)


@pytest.mark.parametrize(
    ("cohort", "clients", "z", "rounds"), [(30, 4800, 1.0, 1000), (100, 943, 2.0, 200)]
)
def test_without_replacement_is_dp_accountings_on_the_same_orders(cohort, clients, z, rounds):
    theirs = RdpAccountant(ORDERS, REPLACE)
    event = dp_event.SampledWithoutReplacementDpEvent(clients, cohort, dp_event.GaussianDpEvent(z))
    theirs.compose(event, rounds)
    fixed = NoisyRound("gaussian", FixedSize(cohort, clients), "replace-one", z)
    found = epsilon("autodp", 1e-5, (fixed, rounds))
    assert found == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-4)


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
    assert epsilon("autodp", delta, poisson) == pytest.approx(expected, rel=1e-6)
    assert epsilon("pld", delta, poisson) == pytest.approx(by_pld.get_epsilon(delta), rel=1e-3)
    curve = opacus_rdp.compute_rdp(q=rate, noise_multiplier=z, steps=1, orders=ORDERS)
    assert rdp_total({poisson[0].release: 1})[:-1] == pytest.approx(curve, rel=1e-6, abs=1e-14)


def test_different_rounds_compose_as_in_dp_accounting():
    theirs = PLDAccountant(ADD_REMOVE)
    theirs.compose(dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(1.0)), 300)
    theirs.compose(dp_event.PoissonSampledDpEvent(0.05, dp_event.GaussianDpEvent(3.0)), 20)
    theirs.compose(dp_event.GaussianDpEvent(20.0), 2)
    parts = [(Poisson(0.01), 1.0, 300), (Poisson(0.05), 3.0, 20), (Full(), 20.0, 2)]
    rounds = [(NoisyRound("gaussian", how, "add-remove", z), count) for how, z, count in parts]
    found = epsilon("pld", 1e-6, *rounds)
    assert found == pytest.approx(theirs.get_epsilon(1e-6), rel=1e-3)


@pytest.mark.parametrize(
    ("rate", "b", "rounds", "delta"),
    [(0.02, 1.0, 100, 1e-6), (0.3, 5.0, 40, 1e-5), (1.0, 2.0, 5, 1e-3)],
)
def test_laplace_is_dp_accountings(rate, b, rounds, delta):
    theirs = PLDAccountant(ADD_REMOVE)
    theirs.compose(dp_event.PoissonSampledDpEvent(rate, dp_event.LaplaceDpEvent(b)), rounds)
    event = NoisyRound("laplace", Poisson(rate), "add-remove", b)
    tightest = epsilon("pld", delta, (event, rounds))
    assert tightest == pytest.approx(theirs.get_epsilon(delta), rel=1e-3)
    assert epsilon("autodp", delta, (event, rounds)) >= tightest * (1 - 1e-3)


@pytest.mark.parametrize("sampling", [Full(), FixedSize(30, 100), Poisson(0.3)], ids=str)
def test_laplace_without_delta_is_amplified_pure_privacy(sampling):
    adjacency = "add-remove" if isinstance(sampling, Poisson) else "replace-one"
    pure = 7 * math.log(1 + sampling.rate * (math.exp(1 / 1.5) - 1))
    rounds = NoisyRound("laplace", sampling, adjacency, 1.5), 7
    for backend in ("autodp", "pld"):
        assert epsilon(backend, 0.0, rounds) == pytest.approx(pure, rel=1e-12)
        assert epsilon(backend, 1e-6, rounds) <= pure * (1 + 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("delta", [1e-2, 1e-3, 1e-5])
def test_one_laplace_round_without_replacement_has_the_profile_of_its_pair(delta):
    rate, b = 0.2, 0.7

    def divergence(eps):  # H(mix || Q) at eps >= 0, integrated directly
        x = np.linspace(-30, 31, 4_000_001)
        q, p = np.exp(-np.abs(x) / b) / (2 * b), np.exp(-np.abs(x - 1) / b) / (2 * b)
        return np.trapezoid(np.maximum((1 - rate) * q + rate * p - math.exp(eps) * q, 0), x)

    event = NoisyRound("laplace", FixedSize(20, 100), "replace-one", b)
    found = epsilon("pld", delta, (event, 1))
    assert divergence(found) <= delta < divergence(found - 2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("b", [0.06, 0.2, 1.0, 9.0])
@pytest.mark.parametrize("delta", [1e-8, 1e-5, 1e-2])
def test_one_laplace_round_of_all_clients_reaches_its_closed_form(b, delta):
    """Of two Laplace distributions 1 apart: delta = 1 - e^((epsilon - 1 / b) / 2)."""
    event = NoisyRound("laplace", Full(), "replace-one", b)
    exact = 1 / b + 2 * math.log1p(-delta)
    assert attack_epsilon({event.release: 1}, delta) == pytest.approx(exact, rel=1e-3)
    assert exact * (1 - 1e-9) <= epsilon("pld", delta, (event, 1)) <= exact * (1 + 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("z", "rounds"), [(0.05, 1), (0.2, 3), (1.0, 10), (1.0, 100)])
def test_the_attack_on_all_clients_reaches_its_closed_form(z, rounds):
    release = NoisyRound("gaussian", Full(), "replace-one", z).release
    exact = exact_gaussian(math.sqrt(rounds) / z, 1e-5)
    assert attack_epsilon({release: rounds}, 1e-5) == pytest.approx(exact, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "z", "rounds"), [(0.02, 0.2, 20), (0.1, 0.15, 5), (0.005, 0.3, 9)]
)
def test_the_attack_on_samples_with_little_noise_is_near_the_tight_bound(rate, z, rounds):
    event = NoisyRound("gaussian", Poisson(rate), "add-remove", z)
    bound = epsilon("pld", 1e-5, (event, rounds))
    assert bound * 0.98 <= attack_epsilon({event.release: rounds}, 1e-5) <= bound


# PrivRec's tables 4 and 5: all 36 finite cells as printed, and the smaller cost of the actual
# releases.

DELTAS = (1e-8, 1e-6, 1e-4)
CELLS = {
    (5, 4800): (1.7439, 1.3602, 0.9764),
    (10, 4800): (3.2117, 2.7511, 2.2535),
    (15, 4800): (5.9705, 5.2030, 4.3074),
    (20, 4800): (9.4736, 8.3223, 6.9235),
    (25, 4800): (13.7047, 12.1696, 10.2052),
    (30, 4800): (18.9107, 16.6081, 14.3056),
    (2, 760): (2.2994, 1.8388, 1.3783),
    (5, 760): (7.4618, 6.5408, 5.3932),
    (8, 760): (16.2853, 14.3169, 12.0143),
    (10, 760): (23.7651, 21.4626, 18.6182),
    (12, 760): (34.5025, 30.0690, 25.4638),
    (15, 760): (50.1537, 45.5485, 40.9433),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CELLS, ids=str)
def test_cells_come_out_as_printed_and_the_releases_cost_less(case):
    rounds = NoisyRound("gaussian", FixedSize(*case), "replace-one", 1.0), 1000
    assert all(math.isinf(epsilon(name, 0.0, rounds)) for name in ("paper", "autodp", "pld"))
    for delta, printed in zip(DELTAS, CELLS[case], strict=True):
        assert epsilon("paper", delta, rounds) == printed
        assert all(epsilon(name, delta, rounds) < printed for name in ("autodp", "pld"))


@pytest.mark.parametrize(
    "event",
    [
        NoisyRound("laplace", FixedSize(5, 50), "replace-one", 1.0),
        NoisyRound("gaussian", Poisson(0.1), "add-remove", 1.0),
    ],
    ids=["laplace", "poisson"],
)
def test_the_papers_arithmetic_is_for_its_own_case_only(event):
    with pytest.raises(ExperimentError, match="accountant 'paper' supports only"):
        epsilon("paper", 1e-5, (event, 1000))


# Every accountant against values of other implementations, and the order of the bounds.
#
# The values were computed once with autodp 0.2.3 and dp-accounting 0.6.0 and with an independent
# numerical integration.

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
PRIVACY_REFERENCE_CELLS = {
    (5, 4800): ((0.336, 0.227, 0.147), (0.318, 0.194, 0.118)),
    (30, 4800): ((1.936, 1.524, 1.097), (1.725, 1.298, 0.894)),
    (2, 760): ((0.845, 0.610, 0.417), (0.788, 0.523, 0.338)),
    (15, 760): ((6.286, 5.235, 4.016), (5.375, 4.382, 3.257)),
}


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_bounds_have_their_reference_values_and_order(case):
    cohort, clients, z, rounds, delta = case
    autodp, pld, attack, poisson, get_eps = TABLE[case]
    fixed = NoisyRound("gaussian", FixedSize(cohort, clients), "replace-one", z)
    sampled = NoisyRound("gaussian", Poisson(cohort / clients), "add-remove", z)
    a, d = (epsilon(name, delta, (fixed, rounds)) for name in ("autodp", "pld"))
    e = attack_epsilon({fixed.release: rounds}, delta)
    assert a == pytest.approx(autodp, rel=1e-4)
    assert d == pytest.approx(pld, rel=1e-3)
    assert e == pytest.approx(attack, rel=1e-3)
    assert epsilon("autodp", delta, (sampled, rounds)) == pytest.approx(poisson, rel=1e-4)
    assert epsilon("pld", delta, (sampled, rounds)) == pytest.approx(attack, rel=1e-3)
    assert e <= d * (1 + 1e-6) and d <= a <= get_eps


@pytest.mark.parametrize("case", PRIVACY_REFERENCE_CELLS, ids=str)
def test_cells_of_the_papers_tables_by_a_tighter_accountant(case):
    event = NoisyRound("gaussian", FixedSize(*case), "replace-one", 1.0)
    for delta, *values in zip((1e-8, 1e-6, 1e-4), *PRIVACY_REFERENCE_CELLS[case], strict=True):
        attack = attack_epsilon({event.release: 1000}, delta)
        found = epsilon("pld", delta, (event, 1000)), attack
        assert found == pytest.approx(values, abs=6e-4)


@pytest.mark.parametrize(("backend", "slack"), [("autodp", 1.25), ("pld", 1 + 1e-4)])
@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
@pytest.mark.parametrize(
    ("z", "rounds", "delta"), [(1.0, 1, 1e-5), (5.0, 100, 1e-6), (0.5, 3, 1e-8), (30.0, 50, 1e-4)]
)
def test_full_participation_is_the_analytic_gaussian(backend, slack, adjacency, z, rounds, delta):
    exact = exact_gaussian(math.sqrt(rounds) / z, delta)
    found = epsilon(backend, delta, (NoisyRound("gaussian", Full(), adjacency, z), rounds))
    assert exact * (1 - 1e-9) <= found <= exact * slack


# 200 random plans, of every mechanism, sampler, adjacency, number of phases and placement that fit
# together, against dp-accounting or a closed form.

DELTA = 1e-5
MECHANISMS = ("gaussian", "laplace", "banded")


def drawn(random):
    """The settings of a random run: its table and its phases' samplers."""
    mechanism = str(random.choice(MECHANISMS))
    table = {"name": mechanism} | {"banded": {"bands": int(random.integers(1, 6))}}.get(
        mechanism, {}
    )
    placement = str(random.choice(["central", "distributed", "local"]))
    return {
        "mechanism": table,
        "adjacency": str(random.choice(["replace-one", "add-remove"])),
        "placement": placement,
        "phases": [
            (
                str(random.choice(["full", "fixed-size", "poisson", "scheduled"])),
                int(random.integers(1, 15)),
                int(random.integers(1, 6)),
                float(random.choice([1.0, 2.0])),
            )
            for _ in range(random.integers(1, 3))
        ],
        "z": float(random.uniform(0.7, 6.0)),
    }


def plans_of(run):
    """The plan of each phase, or an error that says why there is none."""
    rounds = sum(count for _, count, _, _ in run["phases"])
    for number, (sampler, count, separation, factor) in enumerate(run["phases"]):
        own = {key: run[key] for key in ("mechanism", "adjacency", "placement")}
        config = PrivacyConfig.parse(
            {"clip-norm": 2.0, "noise-multiplier": run["z"], "delta": DELTA, **own}
        )
        schedule = Scheduled(20, separation) if sampler == "scheduled" else None
        plan = Plan.of(
            config,
            sampler,
            {"cohort": 20},
            400,
            rounds,
            schedule=schedule,
            phase_rounds=count,
            factor=factor,
        )
        yield f"phase-{number}", plan, count, (sampler, separation, factor * run["z"])


def dense(run, rounds):
    """C, with square-root bands by binomials."""
    root = np.abs(binom(-0.5, np.arange(run["mechanism"]["bands"])))
    column = np.pad(root, (0, rounds))[:rounds]
    return toeplitz(column, np.zeros(rounds))


def expected(run, phases):
    """Epsilon by dp-accounting's loss distributions, whose Gaussian event is for a sensitivity of 1
    under add-remove; pure epsilon adds up for Laplace without delta."""
    accountant = PLDAccountant()
    squares = 0.0
    for _, _, count, (sampler, separation, z) in phases:
        local = run["placement"] == "local"
        if run["mechanism"]["name"] == "banded":
            apart = separation if sampler == "scheduled" else 1
            columns = dense(run, count)[:, ::apart]
            squares += float(np.abs(columns.T @ columns).sum()) / z**2
        else:
            gaussian = run["mechanism"]["name"] == "gaussian"
            one = dp_event.GaussianDpEvent(z) if gaussian else dp_event.LaplaceDpEvent(z)
            if sampler == "poisson" and not local:
                one = dp_event.PoissonSampledDpEvent(20 / 400, one)
            accountant.compose(one, count)
    if squares:  # Gaussian releases of squared norms / noise add up
        accountant.compose(dp_event.GaussianDpEvent(squares**-0.5))
    return accountant.get_epsilon(DELTA)


@pytest.mark.slow
def test_200_random_plans():
    random = np.random.default_rng(20)
    checked: Counter[tuple[str, str, str]] = Counter()
    refused = 0
    total = 0
    while total < 200:
        run = drawn(random)
        try:
            phases = list(plans_of(run))
        except ExperimentError as error:
            assert error.fix or error.expected
            refused += 1
            continue
        if any(where[0] == "fixed-size" and run["placement"] != "local" for *_, where in phases):
            continue  # dp-accounting has no loss distribution without replacement
        accountant = Accountant("pld")
        for phase, plan, count, _ in phases:
            accountant.step_rounds(plan.event(phase), count)
        found = accountant.epsilon(DELTA).epsilon
        assert math.isfinite(found)
        assert found == pytest.approx(expected(run, phases), rel=1e-2, abs=2e-3), run
        total += 1
        checked[run["mechanism"]["name"], run["adjacency"], run["placement"]] += 1
    assert refused > 100  # what does not fit together is refused in words
    assert {name for name, _, _ in checked} == set(MECHANISMS)
    assert {adjacency for _, adjacency, _ in checked} == {"replace-one", "add-remove"}
    assert {placement for *_, placement in checked} == {"central", "distributed", "local"}
