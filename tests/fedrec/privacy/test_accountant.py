# SPDX-License-Identifier: Apache-2.0
"""The ledger, and accountants of one's own."""

import json
import math
import os
from dataclasses import replace

import pytest

from fedrec.errors import ComponentError, ExperimentError, RunError
from fedrec.privacy.accounting.accountant import Accountant, Charge, Ledger
from fedrec.privacy.accounting.events import NoisyRound, Release
from fedrec.privacy.accounting.losses import dp_event, of_rounds
from fedrec.privacy.accounting.rdp import gdp_epsilon
from fedrec.privacy.accounting.sampling import FixedSize, Full, Poisson
from fedrec.privacy.mechanisms import Gaussian, Laplace, cost_of

# The ledger: synced to disk before it counts, never refunded, intact after a crash.

EVENT = NoisyRound("gaussian", FixedSize(7, 90), "replace-one", 1.1)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "privacy.jsonl"


def epsilon_of(count):
    accountant = Accountant("autodp")
    accountant.step(EVENT, count)
    return accountant.epsilon(1e-5).epsilon


def test_charges_are_kept_exactly(path):
    ledger = Ledger(path, "autodp")
    assert ledger.spent(1e-5).epsilon == 0 and not path.exists()
    for number in (1, 2, 3):
        ledger.charge(number, EVENT)
    again = Ledger(path, "autodp")
    assert again.charges == [Charge(number, EVENT) for number in (1, 2, 3)]
    assert again.spent(1e-5) == ledger.spent(1e-5)
    assert again.spent(1e-5).epsilon == pytest.approx(epsilon_of(3), rel=1e-12)


def test_a_charge_is_synced_before_it_returns(path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda handle: synced.append(path.read_bytes() if path.exists() else b"")
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


def test_a_round_beyond_the_budget_is_known_before_it_is_run_and_its_charge_is_refused(path):
    budget = {"budget": epsilon_of(4) * (1 - 1e-6), "delta": 1e-5}
    ledger = Ledger(path, "autodp", **budget)
    for number in (1, 2, 3):
        assert not ledger.would_exceed(EVENT)
        ledger.charge(number, EVENT)
    before = path.read_bytes()
    assert ledger.would_exceed(EVENT) and Ledger(path, "autodp", **budget).would_exceed(EVENT)
    assert not Ledger(path, "autodp").would_exceed(EVENT)
    with pytest.raises(RunError, match="exceeds the privacy budget"):
        ledger.charge(4, EVENT)
    assert path.read_bytes() == before and len(ledger.charges) == 3


def test_events_that_do_not_add_up_are_refused_before_anything_is_written(path):
    ledger = Ledger(path)
    ledger.charge(1, EVENT)
    before = path.read_bytes()
    with pytest.raises(ExperimentError, match="adjacencies"):
        ledger.charge(2, NoisyRound("gaussian", Poisson(0.1), "add-remove", 1.0))
    assert path.read_bytes() == before and len(ledger.charges) == 1


def test_an_event_of_earlier_code_that_is_no_more_is_refused_by_its_name(path):
    """A count of a cohort of its own; left out, the run would have cost less than it did."""
    path.parent.mkdir()
    count = '{"kind": "quantile-estimate", "sampling": {"name": "full"}, "phase": "training"}'
    path.write_text(f'{{"round": 1, "event": {count}}}\n')
    with pytest.raises(RunError, match="quantile-estimate"):
        Ledger(path)


_ROUND = {
    "kind": "noisy-round",
    "mechanism": "gaussian",
    "sampling": {"name": "poisson", "rate": 0.5},
    "adjacency": "add-remove",
    "noise_multiplier": 2.0,
    "phase": "training",
}
_RELEASE = {"mechanism": "gaussian", "adjacency": "add-remove", "noise_multiplier": 2.0}
_PHASE = {"kind": "correlated-rounds", "mechanism": "banded", "adjacency": "add-remove"}


def written(**changes):
    return json.dumps({"round": 1, "event": _ROUND} | changes)


def phase(rounds, count):
    counted = [[_RELEASE | {"sampling": {"name": "full"}}, count]]
    return written(event={**_PHASE, "rounds": rounds, "counted": counted, "phase": "training"})


CHANGES = [
    {"noise_multiplier": "x"},
    {"noise_multiplier": [2.0]},
    {"noise_multiplier": math.nan},
    {"noise_multiplier": -2.0},
    {"count_multiplier": 1.0},  # of earlier versions
    {"adjacency": "other"},
    {"adjacency": "replace-one"},  # no bound is proven for it with coin flips
    {"phase": 3},
    {"own": 1},
    {"sampling": None},
    {"sampling": {"name": "poisson", "rate": 2.0}},
    {"sampling": {"name": "poisson", "rate": "x"}},
    {"sampling": {"name": "fixed-size", "cohort": 9, "clients": 4}},
    {"sampling": {"name": "scheduled", "cohort": 9, "separation": 0}},
    {"sampling": {"name": "scheduled", "cohort": 9, "rate": 0.5}},
    {"kind": 3},
]
LINES = ["null", "[1]", "7", phase(3, -5), phase(3, "x"), phase(-3, 1)]
LINES += [written(round=n) for n in (-1, "1", 1.5, None, True, [1])] + [written(count=2)]
LINES += [written(event=_ROUND | change) for change in CHANGES]


@pytest.mark.parametrize("line", LINES)
def test_a_line_that_is_no_charge_is_damage(path, line):
    path.parent.mkdir()
    path.write_text(f"{line}\n")
    with pytest.raises(RunError, match=r"line 1 of .* is damaged"):
        Ledger(path)


# Mechanisms of outsiders, accounted by their events of dp-accounting.

DELTA = 1e-5


class Fading(Gaussian):
    """Gaussian noise of which each round has less than the one before."""

    def dp_event(self, noise_multiplier, rounds, sampling):
        return dp_event.ComposedDpEvent(
            [
                of_rounds(dp_event.GaussianDpEvent(noise_multiplier * 0.9**number), 1, sampling)
                for number in range(rounds)
            ]
        )


class Doubled(Laplace):
    """Laplace noise of twice the scale, with a cost by the round."""

    def dp_event(self, noise_multiplier, rounds, sampling):
        return super().dp_event(2 * noise_multiplier, rounds, sampling)


def named(mechanism):
    return mechanism(mechanism.Config(), f"{__name__}:{mechanism.__name__}")


def test_a_mechanism_is_accounted_by_its_event():
    sampling = FixedSize(5, 100)
    cost = cost_of(named(Fading), 2.0, 3, sampling, "replace-one")
    kind = "gaussian", sampling, "replace-one"
    assert cost == {Release(*kind, 2.0 * 0.9**number): 1 for number in range(3)}
    cost = cost_of(named(Doubled), 1.5, 7, Full(), "add-remove")
    assert cost == {Release("laplace", Full(), "add-remove", 3.0): 7}


@pytest.mark.parametrize("mechanism", [Fading, Doubled])
def test_an_outsiders_run_is_charged_by_its_event(run_tiny, mechanism):
    order = f"mechanism='{__name__}:{mechanism.__name__}'"
    table = f"privacy={{clip-norm=1.0, noise-multiplier=2.0, delta=1e-5, {order}}}"
    result = run_tiny(table, "sampler={name='full'}", "rounds=3", "evaluation.every=0")
    ledger = Ledger(result.folder / "privacy.jsonl")
    assert [line.round_number for line in ledger.charges] == [1, 2, 3]
    if mechanism is Fading:
        mu = math.sqrt(sum((2.0 * 0.9**number) ** -2 for number in range(3)))
        assert ledger.spent(DELTA).epsilon == pytest.approx(gdp_epsilon(mu, DELTA), rel=1e-6)
    else:
        assert ledger.spent(0.0).epsilon == pytest.approx(3 / 4.0)


class Unknown(Gaussian):
    """States a cost that has no loss distribution."""

    def dp_event(self, noise_multiplier, rounds, sampling):
        return dp_event.ZCDpEvent(0.5 / noise_multiplier**2)


class Both(Gaussian):
    """Samples two releases together."""

    def dp_event(self, noise_multiplier, rounds, sampling):
        one = dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(noise_multiplier), rounds)
        return dp_event.PoissonSampledDpEvent(0.1, one)


@pytest.mark.parametrize("mechanism", [Unknown, Both])
def test_events_that_cannot_be_accounted_are_refused(mechanism):
    with pytest.raises(ComponentError, match="cannot be accounted"):
        cost_of(named(mechanism), 2.0, 3, Full(), "add-remove")
