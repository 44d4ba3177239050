# SPDX-License-Identifier: Apache-2.0
"""Properties for any number of rounds, sampling rate, noise and delta."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrec.errors import ExperimentError, RunError
from fedrec.privacy.accounting.accountant import Accountant
from fedrec.privacy.accounting.calibration import calibrate
from fedrec.privacy.accounting.events import (
    CorrelatedRounds,
    CoveredRound,
    NoisyRound,
    NonPrivate,
    Release,
    Volunteered,
    from_record,
    to_record,
)
from fedrec.privacy.accounting.gdp import gdp_epsilon
from fedrec.privacy.accounting.sampling import FixedSize, Full, Poisson
from fedrec.privacy.config import PrivacyConfig
from fedrec.privacy.ledger import Ledger
from fedrec.privacy.plan import Plan
from fedrec.privacy.question import Question

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


unprotected = st.sampled_from([NonPrivate, Volunteered])
events = st.one_of(
    releases(),
    correlated(),
    unprotected.flatmap(lambda kind: st.builds(kind, st.text(max_size=20), st.just("ssl"))),
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
    one = Release("gaussian", Full(), "replace-one", 3.0)
    two = Release("gaussian", Full(), "replace-one", 7.0)
    orders = np.arange(2, 65)
    curve = orders / 2 * (5 / 9 + 40 / 49)
    expected = min(curve + np.log(1 - 1 / orders) - np.log(1e-5 * orders) / (orders - 1))
    first = NoisyRound("gaussian", one.sampling, "replace-one", 3.0)
    second = NoisyRound("gaussian", two.sampling, "replace-one", 7.0)
    assert epsilon("autodp", 1e-5, (first, 5), (second, 40)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(events)
def test_events_survive_json_exactly(event):
    assert from_record(json.loads(json.dumps(to_record(event)))) == event


def test_the_same_events_by_another_method():
    accountant = Accountant("autodp")
    accountant.step(NoisyRound("gaussian", FixedSize(30, 4800), "replace-one", 1.0), 1000)
    assert accountant.by("pld").epsilon(1e-5).epsilon == pytest.approx(1.318277, rel=1e-4)
    assert accountant.epsilon(1e-5).epsilon == pytest.approx(2.158129, rel=1e-4)


def test_what_is_no_event_is_refused():
    good = to_record(NoisyRound("gaussian", Full(), "replace-one", 1.0))
    for bad in (
        {},
        {"kind": "other"},
        {**good, "extra": 1},
        {k: v for k, v in good.items() if k != "adjacency"},
    ):
        with pytest.raises(RunError, match="not a privacy event"):
            from_record(bad)


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_volunteers_cost_the_others_nothing(backend):
    accountant, alone = Accountant(backend), Accountant(backend)
    event = NoisyRound("gaussian", FixedSize(3, 30), "replace-one", 1.5)
    agreed = Volunteered("3 clients who agreed", "ssl")
    accountant.step(agreed, 7)
    assert accountant.epsilon(1e-5, attack=True).epsilon == 0.0
    assert accountant.epsilon(1e-5).phases == {}
    alone.step(event, 20)
    accountant.step(event, 20)
    assert accountant.epsilon(1e-5).epsilon == alone.epsilon(1e-5).epsilon
    assert accountant.epsilon(1e-5).phases == {"training": alone.epsilon(1e-5).epsilon}
    assert accountant.epsilons(agreed, [0, 5], 1e-5).tolist() == [alone.epsilon(1e-5).epsilon] * 2
    accountant.step(NonPrivate("item sequences", "other"))
    assert accountant.epsilon(1e-5).epsilon == math.inf


def test_poisson_after_without_replacement_is_not_merged():
    """autodp caches both under one key; the order must not matter, and within one accountant they
    are refused."""
    fixed = NoisyRound("gaussian", FixedSize(30, 4800), "replace-one", 1.0)
    poisson = NoisyRound("gaussian", Poisson(30 / 4800), "add-remove", 1.0)
    accountant = Accountant("autodp")
    backend = accountant.backend
    before = [backend.epsilon({event.release: 1000}, 1e-5).epsilon for event in (fixed, poisson)]
    after = [
        Accountant("autodp").backend.epsilon({e.release: 1000}, 1e-5).epsilon
        for e in (poisson, fixed)
    ]
    assert before == after[::-1] == pytest.approx([2.158129, 1.410738], rel=1e-4)
    accountant.step(fixed)
    with pytest.raises(ExperimentError, match="adjacencies"):
        accountant.step(poisson)


@pytest.mark.parametrize(
    ("sampling", "adjacency"),
    [(Poisson(0.5), "replace-one"), (FixedSize(2, 9), "add-remove")],
    ids=str,
)
def test_sampler_and_adjacency_without_a_bound_are_refused(sampling, adjacency):
    accountant = Accountant()
    accountant.step(NoisyRound("gaussian", sampling, adjacency, 1.0))
    with pytest.raises(ExperimentError, match="no proven bound"):
        accountant.epsilon(1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_rounds_at_once_are_the_rounds_one_by_one(backend):
    event = NoisyRound("gaussian", FixedSize(20, 500), "replace-one", 1.2)
    base = NoisyRound("gaussian", Full(), "replace-one", 9.0)
    accountant = Accountant(backend)
    accountant.step(base, 2)
    several = accountant.epsilons(event, [0, 1, 7, 30], 1e-5)
    for count, value in zip([0, 1, 7, 30], several, strict=True):
        assert value == pytest.approx(epsilon(backend, 1e-5, (base, 2), (event, count)), rel=1e-12)
    assert not accountant.would_exceed(event, several[2], 1e-5, 7)
    assert accountant.would_exceed(event, several[2] * (1 - 1e-9), 1e-5, 7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_asked_before_changes_no_bit_of_an_answer(backend):
    """A backend's cache must not affect its results: a resumed run makes other calls before."""
    event = NoisyRound("gaussian", FixedSize(20, 500), "replace-one", 1.2)
    base = NoisyRound("gaussian", Full(), "replace-one", 9.0)
    used = Accountant(backend)
    used.step(base, 2)
    asked = used.epsilons(event, [40, 1, 9, 40, 9, 10], 1e-5)
    for count, value in zip([40, 1, 9, 40, 9, 10], asked, strict=True):
        assert value == epsilon(backend, 1e-5, (base, 2), (event, count))


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
        return Accountant(backend).backend.epsilon(cost(multiplier), 1e-5).epsilon

    z = calibrate(2.0, 1e-5, cost, backend=backend, tolerance=1e-2)
    assert at(z) <= 2.0 < at(z * (1 - 1.1e-2))


def test_a_target_that_cannot_be_proven_is_refused():
    def cost(multiplier):
        return {Release("gaussian", Full(), "replace-one", multiplier): 10}

    with pytest.raises(ExperimentError, match="cannot prove that epsilon") as error:
        calibrate(0.05, 1e-5, cost, backend="autodp")
    assert "use the backend pld" in str(error.value.fix)
    with pytest.raises(ExperimentError, match="cannot prove that epsilon") as error:
        calibrate(1e-9, 1e-9, cost, backend="pld")
    assert "pld" not in str(error.value) and "Rényi" not in str(error.value)
    assert calibrate(0.05, 1e-5, cost, backend="pld") > 100
    assert calibrate(1e9, 1e-5, cost, backend="autodp") == 0.05


@pytest.mark.parametrize("delta", [-0.1, 1.0, 2.0, math.nan])
def test_delta_out_of_range_is_refused(delta):
    with pytest.raises(ExperimentError, match="delta"):
        Accountant().epsilon(delta)


def test_python_experiments_and_command_line_have_the_same_default_accountant(tmp_path):
    release = Release("gaussian", FixedSize(30, 4800), "replace-one", 1.0)
    question = Question(clients=4800, cohort=30, rounds=500, epsilon=2.0, delta=1e-5)
    config = PrivacyConfig(clip_norm=1.0, epsilon=2.0, delta=1e-5)
    plan = Plan.of(config, "fixed-size", {"cohort": 30}, 4800, 500)
    asked = calibrate(2.0, 1e-5, lambda z: {replace(release, noise_multiplier=z): 500})
    assert asked == plan.noise_multiplier == question.plan().noise_multiplier
    ledger, accountant = Ledger(tmp_path / "privacy.jsonl"), Accountant()
    for one in (ledger.accountant, accountant):
        one.step(plan.event(), 500)
    reported = question.answer(plan)
    assert reported.epsilon == accountant.epsilon(1e-5).epsilon
    assert reported.epsilon == ledger.accountant.epsilon(1e-5).epsilon
    assert reported.method == accountant.backend.method


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


def test_more_releases_than_can_be_counted_are_refused():
    accountant = Accountant("pld")
    accountant.step(NoisyRound("gaussian", FixedSize(10, 1000), "replace-one", 1e9), 2**62)
    with pytest.raises(ExperimentError, match=r"at most 1,000,000,000 in all"):
        accountant.epsilon(1e-5)
