# SPDX-License-Identifier: Apache-2.0
"""Plans of privacy, and properties of their epsilon."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrec.errors import ExperimentError
from fedrec.privacy.accounting import losses
from fedrec.privacy.accounting.accountant import Accountant, _rdp_curve, calibrate
from fedrec.privacy.accounting.events import (
    CorrelatedRounds,
    CoveredRound,
    NoisyRound,
    NonPrivate,
    Release,
    from_record,
    to_record,
)
from fedrec.privacy.accounting.rdp import gdp_epsilon
from fedrec.privacy.accounting.sampling import FixedSize, Full, Poisson
from fedrec.privacy.plan import Plan, PrivacyConfig

# The plan: sensitivity, noise and event are consistent, computed by hand; inconsistent settings are
# refused with the reason.


def plan(sampler="fixed-size", cohort=30, clients=4800, rounds=1000, **settings):
    noise = {} if "epsilon" in settings else {"noise_multiplier": 1.0}
    table = {"clip_norm": 40.0, **noise, **settings}
    table = {key.replace("_", "-"): value for key, value in table.items()}
    config = PrivacyConfig.parse(table, at="privacy")
    return Plan.of(config, sampler, {"cohort": cohort}, clients, rounds)


def test_privrecs_own_example():
    """S = 40, M = 30, z = 1: sigma = 2 S z / M = 2.667 (section 2.3.2), whose norm over 237,184
    coordinates is 1299."""
    found = plan()
    assert (found.sensitivity, found.noise_std, found.denominator) == (80.0, 80.0, 30.0)
    assert found.mean_noise_std == pytest.approx(8 / 3)
    assert found.mean_noise_std * (3706 * 64) ** 0.5 == pytest.approx(1298.7, abs=0.1)
    assert found.event() == NoisyRound("gaussian", FixedSize(30, 4800), "replace-one", 1.0)


def test_the_sensitivity_of_add_remove_is_half_of_that_of_replace_one():
    poisson = plan("poisson", adjacency="add-remove")
    numbers = poisson.sensitivity, poisson.noise_std, poisson.event().noise_multiplier
    assert numbers == (40.0, 40.0, 1.0)
    assert poisson.sampling == Poisson(30 / 4800) and poisson.denominator == 30.0


def test_phases_have_their_own_settings():
    phases = {"counts": {"clip-norm": 3.0, "noise-factor": 2.0}, "rest": {"parameters": ["item.*"]}}
    table = {"clip-norm": 40.0, "noise-multiplier": 1.5, "phases": phases}
    config = PrivacyConfig.parse(table, at="privacy")
    found = [config.in_phase(phase) for phase in ("counts", "rest", "main")]
    assert [one.clip_norm for one in found] == [3.0, 40.0, 40.0] and found[2] == config
    assert [one.parameters for one in found] == [("*",), ("item.*",), ("*",)]
    counts = Plan.of(found[0], "full", {}, 50, 4, factor=config.noise_factor("counts"))
    numbers = counts.noise_multiplier, counts.noise_std, counts.denominator
    assert numbers == (3.0, 2 * 3.0 * 3.0, 50.0)


def test_full_participation_needs_no_cohort_and_goes_with_both_adjacencies():
    for adjacency, sensitivity in (("replace-one", 80.0), ("add-remove", 40.0)):
        config = PrivacyConfig(clip_norm=40.0, noise_multiplier=1.0, adjacency=adjacency)
        found = Plan.of(config, "full", {}, 50, 4)
        assert (found.sampling, found.denominator, found.sensitivity) == (Full(), 50.0, sensitivity)
    assert plan(cohort=4800).sampling == Full()  # a cohort of everybody is not amplified
    whole = (FixedSize(9, 9), "add-remove"), (Poisson(1.0), "replace-one")
    assert all(Release("gaussian", *of, 1.0).sampling == Full() for of in whole)


def test_laplace_is_clipped_in_l1_and_has_its_own_event():
    found = plan(mechanism="laplace")
    assert found.clip.order == 1 and plan().clip.order == 2
    assert found.noise_scale == 80.0 and found.noise_std == pytest.approx(80 * math.sqrt(2))
    assert found.event() == NoisyRound("laplace", FixedSize(30, 4800), "replace-one", 1.0)


def test_distributed_shares_add_up_with_the_tolerated_dropouts_and_the_rest_is_known():
    found = plan(placement="distributed", max_dropouts=5)
    share = found.client_noise_scale
    assert math.sqrt(25) * share == pytest.approx(found.noise_scale)
    assert found.server_noise_scale == 0
    assert found.missing_noise_std(30) == found.missing_noise_std(25) == 0
    assert math.hypot(found.missing_noise_std(20), math.sqrt(20) * share) == pytest.approx(
        found.noise_scale
    )
    assert found.event() == plan().event()
    assert plan().client_noise_scale == 0
    assert plan().server_noise_scale == 80.0
    assert plan().missing_noise_std(3) == 0


def test_local_noise_is_not_amplified_and_adds_up():
    found = plan(placement="local")
    assert found.event() == NoisyRound("gaussian", Full(), "replace-one", 1.0)
    assert found.client_noise_scale == 80.0 and found.noise_std == pytest.approx(80 * math.sqrt(30))
    assert plan("poisson", placement="local").event() == found.event()


def test_clients_report_nothing_but_their_updates_in_mode_secure():
    silent = [plan(mode=mode).protection(["w"]).silent for mode in ("reproducible", "secure")]
    assert silent == [False, True]


def test_no_noise_is_not_private():
    event = plan(noise_multiplier=0.0).event("ssl")
    assert isinstance(event, NonPrivate) and event.phase == "ssl"


REFUSED = [
    ({"noise_multiplier": None}, "exactly one"),
    ({"epsilon": 1.0, "noise_multiplier": 1.0}, "exactly one"),
    ({"clip_norm": None}, "clip-norm"),
    ({"clip_norm": 0.0}, "greater than or equal to 0.000000001"),
    ({"noise_multiplier": -1.0}, "greater than or equal to 0"),
    ({"delta": 1.0}, "less than or equal to 0.1"),
    ({"delta": 0.0}, "delta > 0"),
    ({"backend": "paper"}, "autodp"),
    ({"max_dropouts": 3}, "distributed"),
    ({"placement": "distributed", "max_dropouts": 30}, "fewer than the 30"),
    ({"placement": "distributed", "mechanism": "laplace"}, "central or local"),
    ({"placement": "distributed", "sampler": "poisson", "adjacency": "add-remove"}, "known size"),
    ({"placement": "local", "adjacency": "add-remove"}, "sees who takes part"),
    ({"mechanism": "laplaec"}, "did you mean 'laplace'"),
    ({"mechanism": {"bands": 3}}, "privacy.mechanism.name"),
    ({"mechanism": {"name": "laplace", "bands": 3}}, "privacy.mechanism.bands"),
    ({"sampler": "poisson"}, "no privacy bound is proven"),
    ({"adjacency": "add-remove"}, "no privacy bound is proven"),
    ({"sampler": "pkg.mod:Mine"}, "no privacy amplification"),
    ({"cohort": 4801}, "1 to 4800"),
    ({"cohort": 2.5}, "whole number"),
    ({"rounds": 0}, "at least one"),
    ({"clip_nrom": 1.0}, "clip-norm"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_does_not_fit_is_refused_with_its_reason(settings, reason):
    with pytest.raises(ExperimentError, match=reason):
        plan(**settings)


# Properties for any number of rounds, sampling rate, noise and delta.

BACKENDS = ("autodp", "pld")
backends = st.sampled_from(BACKENDS)
rounds = st.integers(1, 2000)
multipliers = st.floats(0.4, 20)
deltas = st.floats(1e-9, 1e-2)


@st.composite
def samplings(draw):
    clients = draw(st.integers(2, 5000))
    cohort = draw(st.integers(1, clients))
    fixed = draw(st.booleans())
    return (
        (FixedSize(cohort, clients), "replace-one")
        if fixed
        else (Poisson(cohort / clients), "add-remove")
    )


@st.composite
def releases(draw):
    return NoisyRound(
        draw(st.sampled_from(["gaussian", "laplace"])),
        *draw(samplings()),
        draw(multipliers),
        phase=draw(st.sampled_from(["training", "ssl"])),
    )


@st.composite
def correlated(draw):
    """A whole phase that costs what two kinds of releases cost, or a further round of it."""
    if draw(st.booleans()):
        return CoveredRound("ssl")
    parts = {Release("gaussian", Full(), "replace-one", draw(multipliers)): 1}
    parts[Release("gaussian", FixedSize(3, 30), "replace-one", draw(multipliers))] = 4
    return CorrelatedRounds("banded", "replace-one", 5, tuple(parts.items()), "ssl")


events = st.one_of(
    releases(), correlated(), st.builds(NonPrivate, st.text(max_size=20), st.just("ssl"))
)


def epsilon(backend, delta, *counted):
    accountant = Accountant(backend)
    for event, count in counted:
        accountant.step(event, count)
    return accountant.epsilon(delta).epsilon


@settings(max_examples=15, deadline=None)
@given(backends, releases(), rounds, deltas, st.floats(1.05, 3))
def test_epsilon_grows_with_rounds_and_falls_with_noise_and_delta(
    backend, event, count, delta, factor
):
    less_noise = replace(event, noise_multiplier=event.noise_multiplier / factor)
    here = epsilon(backend, delta, (event, count))
    assert (
        0 <= here <= epsilon(backend, delta, (event, math.ceil(count * factor))) * (1 + 1e-9) + 1e-9
    )
    assert here <= epsilon(backend, delta, (less_noise, count)) * (1 + 1e-6) + 1e-9
    assert here <= epsilon(backend, delta / factor, (event, count)) * (1 + 1e-9) + 1e-9


@settings(max_examples=12, deadline=None)
@given(
    backends,
    st.integers(10, 5000),
    st.floats(0.01, 0.5),
    st.floats(1.1, 2),
    multipliers,
    rounds,
    st.booleans(),
)
def test_epsilon_grows_with_the_rate(backend, clients, rate, factor, z, count, fixed):
    def at(share):
        cohort = max(1, round(share * clients))
        sampling = FixedSize(cohort, clients) if fixed else Poisson(cohort / clients)
        return epsilon(
            backend,
            1e-6,
            (NoisyRound("gaussian", sampling, "replace-one" if fixed else "add-remove", z), count),
        )

    assert at(rate) <= at(rate * factor) * (1 + 1e-6) + 1e-9


@settings(max_examples=8, deadline=None)
@given(backends, releases(), st.integers(1, 300), st.integers(1, 300))
def test_ledgers_add_up(backend, event, first, second):
    """Accounted at once, in two steps, or as two phases: the same total, between each part and the
    sum of the parts."""
    other = replace(event, phase="later")
    whole = epsilon(backend, 1e-6, (event, first + second))
    assert epsilon(backend, 1e-6, (event, first), (event, second)) == whole
    assert epsilon(backend, 1e-6, (event, first), (other, second)) == pytest.approx(
        whole, rel=1e-12
    )
    parts = epsilon(backend, 5e-7, (event, first)), epsilon(backend, 5e-7, (event, second))
    assert (
        max(epsilon(backend, 1e-6, (event, n)) for n in (first, second))
        <= whole * (1 + 1e-9) + 1e-9
    )
    # basic composition: a tight accountant is never worse than adding epsilons and deltas
    if backend == "pld":
        assert whole <= sum(parts) * (1 + 1e-3) + 1e-6


def test_rdp_curves_add():
    """Two kinds of rounds cost what the sum of their curves costs: checked against the conversion
    written out."""
    orders = np.arange(2, 65)
    curve = orders / 2 * (5 / 9 + 40 / 49)
    expected = min(curve + np.log(1 - 1 / orders) - np.log(1e-5 * orders) / (orders - 1))
    first, second = (NoisyRound("gaussian", Full(), "replace-one", z) for z in (3.0, 7.0))
    assert epsilon("autodp", 1e-5, (first, 5), (second, 40)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(events)
def test_events_survive_json_exactly(event):
    assert from_record(json.loads(json.dumps(to_record(event)))) == event


@pytest.mark.parametrize("backend", BACKENDS)
def test_something_not_private_makes_the_total_infinite_and_leaves_the_phases(backend):
    accountant, alone = Accountant(backend), Accountant(backend)
    event = NoisyRound("gaussian", FixedSize(3, 30), "replace-one", 1.5)
    alone.step(event, 20)
    accountant.step(NonPrivate("item sequences", "ssl"))
    accountant.step(event, 20)
    report = accountant.epsilon(1e-5)
    assert report.epsilon == math.inf
    assert report.phases == {"ssl": math.inf, "training": alone.epsilon(1e-5).epsilon}
    assert accountant.would_exceed(event, 1e9, 1e-5)


def test_poisson_after_without_replacement_is_not_merged():
    """autodp caches both under one key; the order must not matter, and within one accountant they
    are refused."""
    fixed = NoisyRound("gaussian", FixedSize(30, 4800), "replace-one", 1.0)
    poisson = NoisyRound("gaussian", Poisson(30 / 4800), "add-remove", 1.0)
    accountant = Accountant("autodp")
    backend = accountant.backend
    before = [backend.epsilon({event.release: 1000}, 1e-5) for event in (fixed, poisson)]
    after = [
        Accountant("autodp").backend.epsilon({e.release: 1000}, 1e-5) for e in (poisson, fixed)
    ]
    assert before == after[::-1] == pytest.approx([2.158129, 1.410738], rel=1e-4)
    accountant.step(fixed)
    with pytest.raises(ExperimentError, match="adjacencies"):
        accountant.step(poisson)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_asked_before_changes_no_bit_of_an_answer(backend):
    """A backend's cache must not affect its results: a resumed run makes other calls before."""
    event = NoisyRound("gaussian", FixedSize(20, 500), "replace-one", 1.2)
    base = NoisyRound("gaussian", Full(), "replace-one", 9.0)
    numbers = [40, 1, 9, 10]
    asked = [epsilon(backend, 1e-5, (base, 2), (event, count)) for count in numbers]
    losses.composed_epsilon.cache_clear()
    for count, value in reversed(list(zip(numbers, asked, strict=True))):
        _rdp_curve.cache_clear()
        fresh = Accountant(backend)
        fresh.step(base, 2)
        fresh.step(event, count)
        assert fresh.epsilon(1e-5).epsilon == value


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "release",
    [
        Release("gaussian", FixedSize(100, 943), "replace-one", 1.0),
        Release("gaussian", Poisson(0.1), "add-remove", 1.0),
        Release("laplace", FixedSize(100, 943), "replace-one", 1.0),
    ],
    ids=lambda release: f"{release.mechanism}-{release.adjacency}",
)
def test_calibrated_noise_keeps_the_target_and_a_little_less_does_not(backend, release):
    def cost(multiplier):
        return {replace(release, noise_multiplier=multiplier): 100}

    def at(multiplier):
        return Accountant(backend).backend.epsilon(cost(multiplier), 1e-5)

    z = calibrate(2.0, 1e-5, cost, backend=backend)
    assert at(z) <= 2.0 < at(z * (1 - 1.1e-4))


def test_a_target_that_cannot_be_proven_is_refused():
    def cost(multiplier):
        return {Release("gaussian", Full(), "replace-one", multiplier): 10}

    with pytest.raises(ExperimentError, match="target epsilon is not reachable") as error:
        calibrate(0.05, 1e-5, cost, backend="autodp")
    assert "use the backend pld" in str(error.value.fix)
    with pytest.raises(ExperimentError, match="target epsilon is not reachable") as error:
        calibrate(1e-9, 1e-9, cost, backend="pld")
    assert "pld" not in str(error.value) and "Rényi" not in str(error.value)
    assert calibrate(0.05, 1e-5, cost, backend="pld") > 100
    assert calibrate(1e9, 1e-5, cost, backend="autodp") == 0.05


SIDES = {
    "fixed": (FixedSize(10, 100), "replace-one"),
    "poisson": (Poisson(0.1), "add-remove"),
    "full": (Full(), "replace-one"),
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
@pytest.mark.parametrize("side", SIDES)
def test_hardly_any_noise_and_too_much_of_it(backend, mechanism, side):
    """Bounds exist, fall with the noise, and are above what can be told from one round: a client
    is in it with a probability of a tenth and more, and its loss is then above 1 / z - 50, and with
    Gaussian noise above 1 / (2 z^2) - 5 / z."""
    found = []
    for multiplier in (1e-9, 1e-4, 0.05, 1e3, 1e9):
        accountant = Accountant(backend)
        accountant.step(NoisyRound(mechanism, *SIDES[side], multiplier), 3)
        found.append(accountant.epsilon(1e-5).epsilon)
        loss = 1 / multiplier
        least = loss - 50 if mechanism == "laplace" else loss**2 / 2 - 5 * loss
        assert math.isfinite(found[-1]) and found[-1] >= max(0.0, least) * (1 - 1e-6)
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("multiplier", [0.0, 1e-10, 1e10, math.inf, math.nan, -1.0])
def test_noise_beyond_what_accountants_can_count_is_refused(multiplier):
    with pytest.raises(ExperimentError, match="noise multiplier from"):
        Release("gaussian", FixedSize(10, 100), "replace-one", multiplier)


@pytest.mark.parametrize(("count", "looser"), [(10**5, 1.2), (10**9, 1.2)])
@pytest.mark.parametrize("side", SIDES)
def test_very_many_releases(count, looser, side):
    """Against the limit of many releases of little information, a Gaussian one with mu = q sqrt(n
    (e^(1 / z^2) - 1)) (Bu et al. 2020): rounding makes the bound looser and never smaller."""
    sampling, adjacency = SIDES[side]
    multiplier = sampling.rate * math.sqrt(count) if side != "full" else math.sqrt(count)
    accountant = Accountant("pld")
    accountant.step(NoisyRound("gaussian", sampling, adjacency, multiplier), count)
    limit = gdp_epsilon(1.0, 1e-5)
    assert limit * (1 - 1e-3) <= accountant.epsilon(1e-5).epsilon <= limit * looser
