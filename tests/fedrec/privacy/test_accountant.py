# SPDX-License-Identifier: Apache-2.0
"""The ledger, and accountants of one's own."""

import importlib
import json
import math
import os
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from scipy.stats import binom, kstest, logistic

from fedrec.errors import ComponentError, ExperimentError, RunError
from fedrec.privacy.accounting.accountant import Accountant
from fedrec.privacy.accounting.events import (
    NoisyRound,
    NonPrivate,
    Release,
    Volunteered,
    from_record,
    to_record,
)
from fedrec.privacy.accounting.profile import Profile
from fedrec.privacy.accounting.rdp import gdp_delta, gdp_epsilon, smallest_epsilon
from fedrec.privacy.accounting.sampling import FixedSize, Full, Poisson, Scheduled
from fedrec.privacy.ledger import Charge, Ledger
from fedrec.privacy.mechanisms.banded import Banded
from fedrec.privacy.mechanisms.base import mechanism_of
from fedrec.privacy.mechanisms.blt import least_distance, refuse_understated
from fedrec.privacy.mechanisms.independent import Gaussian, GaussianPair
from fedrec.rng import Reproducible
from simulations import runner
from tests.component_checks import MechanismChecks

# The ledger: synced to disk before it counts, never refunded, intact after a crash.

EVENT = NoisyRound("gaussian", FixedSize(7, 90), "replace-one", 1.1, count_multiplier=1 / 3)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "privacy.jsonl"


def epsilon_of(count, *others):
    accountant = Accountant("autodp")
    accountant.step(EVENT, count)
    for event in others:
        accountant.step(event)
    return accountant.epsilon(1e-5).epsilon


def test_charges_are_kept_exactly(path):
    ledger = Ledger(path, "autodp")
    assert ledger.spent(1e-5).epsilon == 0 and not path.exists()
    for number in (1, 2, 3):
        ledger.charge(number, EVENT)
    ledger.charge(4, EVENT, 2)
    again = Ledger(path, "autodp")
    assert again.charges == [
        Charge(1, EVENT),
        Charge(2, EVENT),
        Charge(3, EVENT),
        Charge(4, EVENT, 2),
    ]
    assert again.spent(1e-5) == ledger.spent(1e-5)
    assert again.spent(1e-5).epsilon == pytest.approx(epsilon_of(5), rel=1e-12)


def test_a_round_that_is_run_again_is_charged_again(path):
    for _ in range(3):
        Ledger(path).charge(1, EVENT)
    assert [charge.round_number for charge in Ledger(path).charges] == [1, 1, 1]


def test_a_charge_is_synced_before_it_returns(path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda handle: (real(handle), synced.append(path.read_bytes() if path.exists() else b"")),
    )
    Ledger(path).charge(1, EVENT)
    assert synced[-1].endswith(b"\n") and json.loads(synced[-1])["round"] == 1


def test_a_last_line_that_was_cut_off_is_dropped_and_overwritten(path, caplog):
    ledger = Ledger(path)
    ledger.charge(1, EVENT)
    whole = path.read_bytes()
    # longer than the line that overwrites its rest
    ledger.charge(2, replace(EVENT, phase="long" * 100))
    line = path.read_bytes()[len(whole) :]
    for kept in (1, len(line) // 2, len(line) - 1):
        path.write_bytes(whole + line[:kept])
        torn = Ledger(path)
        assert torn.charges == [Charge(1, EVENT)] and "cut off" in caplog.text
        torn.charge(9, EVENT)
        assert Ledger(path).charges == [Charge(1, EVENT), Charge(9, EVENT)]
        assert path.read_bytes().endswith(b"\n") and path.read_bytes().count(b"\n") == 2


def test_damage_elsewhere_is_an_error(path):
    ledger = Ledger(path)
    ledger.charge(1, EVENT)
    ledger.charge(2, EVENT)
    lines = path.read_bytes().splitlines(keepends=True)
    for damaged in (b"{}\n" + lines[1], lines[0][:20] + b"\n" + lines[1], lines[0] + b"\x00\x01\n"):
        path.write_bytes(damaged)
        with pytest.raises(RunError, match="damaged"):
            Ledger(path)


def test_a_charge_that_cannot_be_written_is_an_error_and_counts(path, monkeypatch):
    ledger = Ledger(path)
    ledger.charge(1, EVENT)

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="No space left"):
        ledger.charge(2, EVENT)
    monkeypatch.undo()
    assert len(ledger.charges) == 2
    ledger.charge(3, EVENT)
    assert [charge.round_number for charge in Ledger(path).charges] == [1, 3]


def test_a_round_beyond_the_budget_is_known_before_it_is_run(path):
    budget = {"budget": (epsilon_of(3) + epsilon_of(4)) / 2, "delta": 1e-5}
    ledger = Ledger(path, "autodp", **budget)
    for number in (1, 2, 3):
        assert not ledger.would_exceed(EVENT)
        ledger.charge(number, EVENT)
    size = path.stat().st_size
    assert ledger.would_exceed(EVENT) and Ledger(path, "autodp", **budget).would_exceed(EVENT)
    assert not Ledger(path, "autodp").would_exceed(EVENT)
    assert path.stat().st_size == size


@pytest.mark.parametrize("n", [1, 4])
def test_a_charge_above_the_budget_is_refused_and_not_written(path, n):
    """One event, or one that covers several rounds."""
    budget = epsilon_of(n) * (1 - 1e-6)
    ledger = Ledger(path, "autodp", budget=budget, delta=1e-5)
    with pytest.raises(RunError, match="exceeds the privacy budget"):
        ledger.charge(1, EVENT, n)
    assert ledger.charges == [] and not path.exists()
    if n > 1:
        ledger.charge(1, EVENT, n - 1)
        assert ledger.spent(1e-5).epsilon <= budget


def test_what_was_not_private_is_remembered(path):
    Ledger(path).charge(0, NonPrivate("item sequences", "ssl"))
    ledger = Ledger(path, "autodp")
    ledger.charge(1, EVENT)
    report = ledger.spent(1e-5)
    assert report.epsilon == math.inf and report.phases["training"] == pytest.approx(epsilon_of(1))


def test_events_that_do_not_add_up_are_refused_before_anything_is_written(path):
    ledger = Ledger(path)
    ledger.charge(1, EVENT)
    before = path.read_bytes()
    with pytest.raises(ExperimentError, match="adjacencies"):
        ledger.charge(2, NoisyRound("gaussian", Poisson(0.1), "add-remove", 1.0))
    assert path.read_bytes() == before and len(ledger.charges) == 1


# as written when Gaussian and Laplace rounds were events of two kinds
_EARLIER = """\
{"round": 1, "count": 1, "event": {"kind": "gaussian-round", "sampling": {"name": "fixed-size", \
"cohort": 7, "clients": 90}, "adjacency": "replace-one", "noise_multiplier": 1.1, \
"count_multiplier": 0.3333333333333333, "phase": "training"}}
{"round": 2, "count": 2, "event": {"kind": "gaussian-round", "sampling": {"name": "full"}, \
"adjacency": "replace-one", "noise_multiplier": 2.0, "count_multiplier": null, "phase": "main"}}
{"round": 4, "count": 1, "event": {"kind": "laplace-round", "sampling": {"name": "full"}, \
"adjacency": "replace-one", "noise_multiplier": 3.5, "phase": "popularity"}}
{"round": 5, "count": 1, "event": {"kind": "volunteered", "who": "3 clients", "phase": "ssl"}}
{"round": 6, "count": 1, "event": {"kind": "non-private", "reason": "none", "phase": "ssl"}}
"""


def test_a_ledger_of_earlier_code_is_read(path):
    """Its charges are the same events, and the run goes on with the form of today."""
    path.parent.mkdir()
    path.write_text(_EARLIER)
    ledger = Ledger(path)
    laplace = NoisyRound("laplace", Full(), "replace-one", 3.5, phase="popularity")
    assert ledger.charges == [
        Charge(1, EVENT),
        Charge(2, NoisyRound("gaussian", Full(), "replace-one", 2.0, phase="main"), 2),
        Charge(4, laplace),
        Charge(5, Volunteered("3 clients", "ssl")),
        Charge(6, NonPrivate("none", "ssl")),
    ]
    ledger.charge(7, laplace)
    assert path.read_text().startswith(_EARLIER) and Ledger(path).charges == ledger.charges


def test_an_event_of_earlier_code_that_is_no_more_is_refused_by_its_name(path):
    """A count of a cohort of its own; left out, the run would have cost less than it did."""
    path.parent.mkdir()
    count = '{"kind": "quantile-estimate", "sampling": {"name": "full"}, "phase": "training"}'
    path.write_text(f'{{"round": 1, "count": 1, "event": {count}}}\n')
    with pytest.raises(RunError, match="unknown kind 'quantile-estimate'"):
        Ledger(path)


_ROUND = {
    "kind": "gaussian-round",
    "sampling": {"name": "poisson", "rate": 0.5},
    "adjacency": "add-remove",
    "noise_multiplier": 2.0,
    "phase": "training",
}
_RELEASE = {"mechanism": "gaussian", "adjacency": "add-remove", "noise_multiplier": 2.0}


@pytest.mark.parametrize(
    "line",
    [
        "null",
        "[1]",
        "7",
        *(
            json.dumps({"round": 1, "count": count, "event": _ROUND})
            for count in (-1, 0, 0.5, 1.5, "x", None, True, [1], 10**400)
        ),
        *(
            json.dumps({"round": number, "count": 1, "event": _ROUND})
            for number in (-1, "1", 1.5, None)
        ),
        *(
            json.dumps({"round": 1, "count": 1, "event": _ROUND | change})
            for change in (
                {"noise_multiplier": "x"},
                {"noise_multiplier": [2.0]},
                {"noise_multiplier": math.nan},
                {"noise_multiplier": -2.0},
                {"count_multiplier": 0.0},
                {"count_multiplier": 1e-200},
                {"adjacency": "other"},
                {"phase": 3},
                {"own": 1},
                {"sampling": None},
                {"sampling": {"name": "poisson", "rate": 2.0}},
                {"sampling": {"name": "poisson", "rate": "x"}},
                {"sampling": {"name": "fixed-size", "cohort": 9, "clients": 4}},
                {"sampling": {"name": "scheduled", "cohort": 9, "separation": 0}},
                {"kind": 3},
            )
        ),
        *(
            json.dumps(
                {
                    "round": 1,
                    "count": 1,
                    "event": {
                        "kind": "correlated-rounds",
                        "mechanism": "banded",
                        "adjacency": "add-remove",
                        "rounds": rounds,
                        "counted": [[_RELEASE | {"sampling": {"name": "full"}}, count]],
                        "phase": "training",
                    },
                }
            )
            for rounds, count in ((3, -5), (3, "x"), (-3, 1))
        ),
    ],
)
def test_a_line_that_is_no_charge_is_damage(path, line):
    path.parent.mkdir()
    path.write_text(f"{line}\n")
    with pytest.raises(RunError, match=r"line 1 of .* is damaged"):
        Ledger(path)


def test_charges_under_another_adjacency_are_damage(path):
    Ledger(path).charge(1, EVENT)
    line = json.dumps({"round": 2, "count": 1, "event": _ROUND})
    path.write_bytes(path.read_bytes() + line.encode() + b"\n")
    with pytest.raises(RunError, match=r"line 2 of .* is damaged"):
        Ledger(path)


def test_a_line_that_breaks_within_is_not_dropped(path):
    """Only the end of the file can be cut off; a carriage return elsewhere is damage."""
    ledger = Ledger(path)
    ledger.charge(1, EVENT)
    ledger.charge(2, EVENT)
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first[:20] + b"x\r" + first[20:] + second)
    with pytest.raises(RunError, match=r"line 1 of .* is damaged"):
        Ledger(path)


# Mechanisms that bring their own accountant, against closed forms; those that claim too little are
# refused. The example of docs/plugins.md, as two files of an outsider.

DELTA = 1e-5
PAGE = Path(__file__).resolve().parents[3] / "docs" / "plugins.md"


class GaussianProfile(Profile):
    """The exact profile of Gaussian noise."""

    def delta(self, epsilon):
        return np.array([gdp_delta(one, 1 / self.multiplier) for one in epsilon])


class Answers(Profile):
    """One answer of randomised response with delta, (1 / multiplier, own)-private."""

    def delta(self, epsilon):
        (failing,) = self.own or (0.0,)
        pure = 1 / self.multiplier
        rest = np.maximum(0.0, math.exp(pure) - np.exp(epsilon)) / (1 + math.exp(pure))
        return failing + (1 - failing) * rest


class OnePoint(Profile):
    """The one thing that is known of randomised response: (1 / multiplier, 0)-private."""

    def delta(self, epsilon):
        return np.where(epsilon >= 1 / self.multiplier, 0.0, 1.0)


class Known(Gaussian):
    """Gaussian noise by its profile."""

    pair = GaussianProfile


class Answering(Gaussian):
    """As private as answers."""

    pair = Answers


class Pointed(Gaussian):
    """As private as at one epsilon."""

    pair = OnePoint


class Large(GaussianPair):
    """Noise of 20 times the multiplier."""

    def __init__(self, multiplier, *own):
        super().__init__(20 * multiplier)


class Loud(Gaussian):
    """Noise that is less than is accounted."""

    pair = Large


def cost(mechanism, z, rounds, sampling=None, adjacency="add-remove", own=(), delta=DELTA):
    name = f"{__name__}:{mechanism.__name__}"
    release = Release(name, sampling or Full(), adjacency, z, own)
    return Accountant("pld").backend.epsilon({release: rounds}, delta).epsilon


def answered(rounds, pure, failing=0.0):
    """Epsilon of some answers (Kairouz, Oh and Viswanath 2015, theorem 3.3)."""
    true = np.arange(rounds + 1)
    losses = (2 * true - rounds) * pure
    odds = binom.pmf(true, rounds, 1 / (1 + math.exp(-pure)))

    def delta(epsilon):
        private = sum(odds * np.maximum(0, 1 - np.exp(epsilon - losses)))
        return 1 - (1 - failing) ** rounds * (1 - private)

    return smallest_epsilon(delta, DELTA)


@pytest.mark.parametrize(("z", "rounds"), [(1.0, 1), (5.0, 60), (0.3, 1)])
def test_a_profile_of_gaussian_noise_costs_what_the_noise_costs(z, rounds):
    found = cost(Known, z, rounds)
    exact = gdp_epsilon(math.sqrt(rounds) / z, DELTA)
    assert exact <= found <= exact * 1.001


@pytest.mark.parametrize(
    ("sampling", "adjacency"),
    [(Poisson(0.01), "add-remove"), (FixedSize(30, 4800), "replace-one")],
)
def test_a_profile_is_amplified_by_sampling_like_noise(sampling, adjacency):
    one = Release("gaussian", sampling, adjacency, 1.0)
    noise = Accountant("pld").backend.epsilon({one: 300}, DELTA).epsilon
    assert cost(Known, 1.0, 300, sampling, adjacency) == pytest.approx(noise, rel=1e-3)


@pytest.mark.parametrize("mechanism", [Answering, Pointed])
@pytest.mark.parametrize("rounds", [1, 8, 40])
def test_pure_rounds_compose_as_randomised_response(mechanism, rounds):
    """A bound at one epsilon proves the whole profile of randomised response."""
    found = cost(mechanism, 4.0, rounds)
    exact = answered(rounds, 0.25)
    assert exact * 0.9999 <= found <= exact + rounds * 2e-4


def test_what_fails_adds_up():
    failing = 2e-7
    found = cost(Answering, 4.0, 20, own=(failing,))
    assert found == pytest.approx(answered(20, 0.25, failing), rel=1e-3)
    assert cost(Answering, 4.0, 20, own=(failing,), delta=1e-6) == math.inf


@pytest.mark.parametrize(
    ("deltas", "expected"),
    [
        (lambda e: np.full(len(e), np.nan), "probabilities"),
        (lambda e: 2 * np.exp(-e), "probabilities"),
        (lambda e: 0.5 - e, "probabilities"),
        (lambda e: 0.5 * e / (1 + e), "does not rise"),
        (lambda e: np.zeros(len(e)), "positive delta at epsilon 0"),
        (lambda e: np.ones(1), "of shape"),
    ],
)
def test_what_is_no_profile_is_refused(deltas, expected):
    class Wrong(Profile):
        def delta(self, epsilon):
            return deltas(epsilon)

    with pytest.raises(ComponentError, match=expected):
        Wrong(1.0).above(np.zeros(1), 1.0)


def test_own_numbers_survive_the_ledger_and_are_not_in_others():
    event = NoisyRound("own", Full(), "add-remove", 2.0, own=(3.0, 0.5))
    assert from_record(json.loads(json.dumps(to_record(event)))) == event
    assert event.release.own == (3.0, 0.5)
    assert "own" not in to_record(replace(event, own=()))


class Claiming(Gaussian):
    """Gaussian noise whose cost is stated as `claim(rounds)` rounds."""

    def __init__(self, claim):
        super().__init__(Gaussian.Config(), "gaussian")
        self.claim = claim

    def releases(self, one, rounds, sampling):
        return {replace(one, noise_multiplier=one.noise_multiplier / self.claim(rounds) ** 0.5): 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("claim", "sampling", "expected"),
    [
        (lambda rounds: 8 / rounds, Full(), "at least the epsilon"),
        (lambda rounds: 0.01, Full(), "any noise"),
        (lambda rounds: rounds / 16, Full(), "any noise"),
        (lambda rounds: 0.01, Scheduled(3, 4, rate=0.5), "any noise"),
    ],
)
def test_claims_below_what_rounds_reveal_are_refused(claim, sampling, expected):
    with pytest.raises(ComponentError, match=expected):
        refuse_understated(Claiming(claim), sampling, "add-remove", 2.0, 40, DELTA)
    refuse_understated(Claiming(lambda rounds: rounds), sampling, "add-remove", 2.0, 40, DELTA)


def named(mechanism):
    return mechanism(mechanism.Config(), f"{__name__}:{mechanism.__name__}")


def test_no_finite_epsilon_is_refused():
    class Failing(Answering):
        own = (1e-4,)

        def releases(self, one, rounds, sampling):
            return {one: rounds}

    made = Failing(Failing.Config(), f"{__name__}:Answering")
    refuse_understated(made, Full(), "add-remove", 1.0, 3, 1e-3)
    with pytest.raises(ComponentError, match="finite epsilon"):
        refuse_understated(made, Full(), "add-remove", 1.0, 3, DELTA)


def test_one_round_below_any_noise_is_refused():
    refuse_understated(named(Known), Poisson(0.1), "add-remove", 1.7, 5, DELTA)
    with pytest.raises(ComponentError, match="any noise"):
        refuse_understated(named(Loud), Poisson(0.1), "add-remove", 1.7, 5, DELTA)


@pytest.mark.parametrize("z", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("rounds", [1, 12])
def test_the_least_distance_is_below_that_of_gaussian_noise(z, rounds):
    """The total variation of N(0, 1) and N(mu, 1) is that of the norm of C x (2 Phi(mu/2) - 1)."""
    mechanism = mechanism_of({"name": "banded", "bands": 3})
    column = np.pad(mechanism.column(rounds), (0, max(0, rounds - 3)))
    c = np.array([[column[i - j] if i >= j else 0.0 for j in range(rounds)] for i in range(rounds)])
    mu = np.linalg.norm(c.sum(axis=1)) / z
    least = least_distance(mechanism, Full(), z, rounds)
    assert least == pytest.approx(mu**2 / (4 + mu**2))
    assert least <= gdp_delta(0.0, mu)


@pytest.mark.slow
def test_built_in_noise_is_not_refused():
    for mechanism in map(mechanism_of, ("gaussian", "laplace", "banded")):
        for z in (1e-6, 1e9):
            refuse_understated(mechanism, Full(), "replace-one", z, 30, DELTA)
    assert isinstance(mechanism, Banded)


@pytest.fixture
def outsider(tmp_path, monkeypatch, tiny_experiment):
    """Two files of an outsider, the module of the page and an experiment; the experiment's path."""
    (source,) = re.findall(r"```python accountant\n(.*?)```", PAGE.read_text(), re.S)
    (tmp_path / "their_noise.py").write_text(source)
    table = {
        **tiny_experiment(),
        "sampler": {"name": "full"},
        "rounds": 4,
        "privacy": {
            "clip-norm": 1.0,
            "noise-multiplier": 2.0,
            "delta": DELTA,
            "mechanism": "their_noise:Logistic",
        },
    }
    file = tmp_path / "theirs.toml"
    file.write_text(tomli_w.dumps(table))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield file
    sys.modules.pop("their_noise", None)


@pytest.mark.slow
def test_the_example_keeps_the_contract(outsider, tmp_path):
    class TestTheirs(MechanismChecks):
        component = importlib.import_module("their_noise").Logistic
        experiment = {"sampler": {"name": "full"}}  # noqa: RUF012

    made = TestTheirs()
    for name in [name for name in dir(made) if name.startswith("test_")]:
        folder = tmp_path / name
        folder.mkdir()
        method = getattr(made, name)
        method(folder) if "tmp_path" in method.__code__.co_varnames else method()
    drawn = made._drawn(Reproducible(0)).ravel()
    assert kstest(drawn, logistic.cdf).pvalue > 1e-3


def test_the_example_is_charged_forecast_and_explained(outsider, fedrec, tmp_path):
    exact = answered(4, 0.5)
    code, out, err = fedrec("privacy", "explain", outsider)
    assert code == 0, err
    assert f"epsilon {exact:.3g}" in out and "attack reaches" not in out
    result = runner.run(tomllib.loads(outsider.read_text()), output=tmp_path / "run")
    ledger = Ledger(tmp_path / "run" / "privacy.jsonl")
    assert [line.round_number for line in ledger.charges] == [1, 2, 3, 4]
    assert ledger.spent(DELTA, attack=True).attack is None
    assert ledger.spent(DELTA).epsilon == pytest.approx(exact, rel=1e-3)
    assert result.rounds["epsilon"].iloc[-1] == pytest.approx(exact, rel=1e-3)


def test_the_example_keeps_a_budget_and_is_calibrated(outsider, fedrec, tmp_path):
    tight = f"privacy.budget={0.9 * answered(4, 0.5)}"
    table = tomllib.loads(outsider.read_text())
    result = runner.run(table, [tight], output=tmp_path / "none")
    assert len(result.rounds) == 0
    question = ["--clients", 18, "--cohort", 18, "--rounds", 4, "--delta", 1e-5]
    question += ["--sampler", "scheduled"]
    asked = [*question, "--adjacency", "add-remove", "--mechanism", "their_noise:Logistic"]
    code, _, err = fedrec("privacy", "calibrate", "--epsilon", 1, *asked)
    assert code and "'full'" in err
    epsilon = ["privacy={clip-norm=1.0, epsilon=1.0, delta=1e-5, mechanism='their_noise:Logistic'}"]
    runner.run(table, epsilon, output=tmp_path / "run")
    spent = Ledger(tmp_path / "run" / "privacy.jsonl").spent(DELTA).epsilon
    assert 0.999 <= spent <= 1.0


def test_the_example_composes_with_other_noise(outsider):
    """As three releases of randomised response beside Gaussian noise: the better of two bounds is
    not below either alone."""
    kind = Full(), "add-remove"
    theirs = Release("their_noise:Logistic", *kind, 4.0, (3,))
    accountant = Accountant("pld").backend
    both = accountant.epsilon({theirs: 1, Release("gaussian", *kind, 2.0): 1}, DELTA).epsilon
    assert max(answered(3, 0.25), gdp_epsilon(0.5, DELTA)) < both
    assert both < answered(3, 0.25) + gdp_epsilon(0.5, DELTA)


def test_an_example_that_claims_too_little_is_refused(outsider, fedrec, tmp_path):
    source = (outsider.parent / "their_noise.py").read_text()
    claims = source.replace("own=(rounds,)", "noise_multiplier=99.0")
    (outsider.parent / "their_claim.py").write_text(claims)
    name = ["privacy.mechanism='their_claim:Logistic'"]
    code, _, err = fedrec("run", outsider, "-o", tmp_path / "run", sets=name)
    assert code == ComponentError.exit_code and "cannot be true" in err
    assert not (tmp_path / "run" / "privacy.jsonl").exists()
