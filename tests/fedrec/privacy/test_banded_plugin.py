# SPDX-License-Identifier: Apache-2.0
"""Banded noise as a plug-in of two files, a mechanism and the sampler that it needs: the contracts
of both, whole runs, and figures against dense matrices in numpy."""

import itertools
import json
from typing import Any, ClassVar

import numpy as np
import pytest
from scipy.linalg import toeplitz
from scipy.special import binom, ndtr

from fedrec.data.population import Population
from fedrec.errors import ExperimentError, RunError
from fedrec.experiment.loading import load
from fedrec.privacy.accounting.events import CorrelatedRounds, CoveredRound, Release
from fedrec.privacy.accounting.sampling import Full, Scheduled
from fedrec.privacy.ledger import Ledger
from fedrec.privacy.mechanisms.base import mechanism_of
from fedrec.privacy.noise_source import Reproducible
from fedrec.protocol.orders import Presence
from fedrec.runs.folder import RunFolder
from fedrec.testing import MechanismContract, SamplerContract
from server.cohorts.roster import Roster
from server.cohorts.selection import SampledCohorts
from server.privacy.guard import Guard
from server.privacy.phase_plans import PhasePlans
from server.strategy_state import make_strategy
from simulations import runner
from tests.fedrec.privacy.banded_plugin.banded import Banded
from tests.fedrec.privacy.banded_plugin.separated import Separated
from tests.runs import assert_close, parameters_in

HERE = "tests.fedrec.privacy.banded_plugin"
BANDED = f"{HERE}.banded:Banded"
SAMPLER = f"sampler={{name='{HERE}.separated:Separated', cohort=3, separation=4}}"
MECHANISM = f"mechanism={{name='{BANDED}', bands=3}}"
PRIVATE = f"privacy={{clip-norm=1.0, noise-multiplier=2.0, delta=1e-5, {MECHANISM}}}"
CHEAP = "evaluation.fine-tune.epochs=0"


class TestBanded(MechanismContract):
    component = Banded
    settings: ClassVar[dict[str, Any]] = {"bands": 3}
    schedule = Scheduled(3, 4)
    experiment: ClassVar[dict[str, Any]] = {
        "sampler": {"name": f"{HERE}.separated:Separated", "separation": 4}
    }


class TestSeparated(SamplerContract):
    component = Separated


def banded(bands):
    return mechanism_of({"name": BANDED, "bands": bands})


def dense(rounds, bands):
    """C `[rounds, rounds]`."""
    column = np.zeros(rounds)
    column[:bands] = np.abs(binom(-0.5, np.arange(bands)))[:rounds]
    return toeplitz(column, np.zeros(rounds))


def moved(rounds, schedule, bands):
    """How far a client moves C x: the factor by which a run's multiplier is below a round's."""
    one = Release(BANDED, Full(), "add-remove", 1.0)
    (found,) = banded(bands).releases(one, rounds, schedule)
    assert found.mechanism == "gaussian"
    return 1 / found.noise_multiplier


def gdp_delta(mu, epsilon):
    return ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize(
    ("rounds", "bands", "separation", "participations"),
    [
        (1, 1, 1, None),
        (7, 1, 1, None),
        (9, 3, 3, None),
        (10, 3, 4, None),
        (10, 3, 4, 2),
        (6, 5, 8, 1),
    ],
)
def test_its_sensitivity_is_the_most_that_any_schedule_moves(
    rounds, bands, separation, participations
):
    """Over all sets of rounds that are far enough apart, with the same or opposite updates."""
    c = dense(rounds, bands)
    most = rounds if participations is None else participations
    found = 0.0
    for count in range(1, most + 1):
        for chosen in itertools.combinations(range(rounds), count):
            if count == 1 or np.diff(chosen).min() >= separation:
                columns = c[:, chosen]
                gram = columns.T @ columns
                # with update u_i of norm 1 in round i: the squared norm is sum_ij G_ij <u_i, u_j>
                found = max(found, float(np.abs(gram).sum()) ** 0.5)
    assert moved(rounds, Scheduled(3, separation, participations), bands) == pytest.approx(found)


@pytest.mark.parametrize("bands", [1, 3, 9])
def test_its_noise_is_that_of_the_dense_matrix(bands):
    source = Reproducible(3)
    white = np.array([source.gaussian(50, "x", number) for number in range(1, 13)])
    memory: dict[str, np.ndarray] = {}
    drawn = [banded(bands).draw("x", 50, memory, source, number) for number in range(1, 13)]
    assert np.allclose(drawn, np.linalg.solve(dense(12, bands), white), rtol=0, atol=1e-12)
    assert memory["x"].shape == (bands - 1, 50)
    rows = np.linalg.norm(np.linalg.inv(dense(400, bands)), axis=1)
    assert banded(bands).std == pytest.approx(rows.max(), rel=1e-9)


@pytest.mark.parametrize(("rounds", "expected"), [(60, 2.7), (300, 4.1)])
def test_running_sums_have_less_noise_than_independent_noise_gives(rounds, expected):
    """The same epsilon for clients 48 rounds apart; the root mean square over all running sums."""
    schedule = Scheduled(100, 48)
    sums = np.tril(np.ones((rounds, rounds)))
    correlated = moved(rounds, schedule, 48) * np.linalg.norm(
        sums @ np.linalg.inv(dense(rounds, 48))
    )
    independent = moved(rounds, schedule, 1) * np.linalg.norm(sums)
    assert independent / correlated == pytest.approx(expected, abs=0.05)


def test_a_run_is_charged_once_for_all_its_rounds_and_the_forecast_knows_it(
    run_tiny, tiny_experiment
):
    """Each client takes part in two of 8 rounds; mu is the norm of the two columns over z."""
    overrides = (PRIVATE, SAMPLER, "rounds=8", CHEAP)
    result = run_tiny(*overrides)
    first, *others = Ledger(result.folder / "privacy.jsonl").charges
    assert isinstance(first.event, CorrelatedRounds) and first.event.rounds == 8
    assert [line.round_number for line in others] == [2, 3, 4, 5, 6, 7, 8]
    assert all(line.event == CoveredRound("main") for line in others)
    columns = dense(8, 3)[:, [0, 4]]
    epsilon = result.rounds["epsilon"]
    mu = np.linalg.norm(columns) / 2.0
    assert gdp_delta(mu, epsilon.iloc[-1]) == pytest.approx(1e-5, rel=1e-3)
    assert epsilon.nunique() == 1  # it is all spent with the first round

    experiment = load(tiny_experiment(), overrides)
    clients = Population.of(experiment).partition.training_clients
    plans = PhasePlans.before_a_run(experiment, clients)
    assert plans.forecast().epsilon == pytest.approx(epsilon.iloc[-1])
    assert plans.forecast().events == 8


class Crash(BaseException):
    """Stands for a power failure."""


@pytest.fixture
def crash_in_round_4(monkeypatch):
    """After the round was charged, and before its noise is used; once."""
    healthy = Banded.draw
    crashed = []

    def draw(self, name, size, memory, source, *address):
        if address == (4,) and not crashed:
            crashed.append(address)
            raise Crash
        return healthy(self, name, size, memory, source, *address)

    monkeypatch.setattr(Banded, "draw", draw)


@pytest.mark.parametrize("mode", ["reproducible", "secure"])
def test_a_repeated_round_costs_the_whole_again_only_if_its_noise_is_another(
    run_tiny, tmp_path, crash_in_round_4, mode
):
    """Rounds that follow keep the noise of those before, so that they are covered; the same bits
    again are no further release."""
    settings = (PRIVATE, f"privacy.mode={mode}", SAMPLER, "rounds=6", CHEAP)
    with pytest.raises(Crash):
        run_tiny(*settings, output="broken")
    runner.resume(tmp_path / "broken")
    lines = Ledger(tmp_path / "broken" / "privacy.jsonl").charges
    assert [line.round_number for line in lines] == [1, 2, 3, 4, 4, 5, 6]
    whole = [isinstance(line.event, CorrelatedRounds) for line in lines]
    assert whole == [True, False, False, False, mode == "secure", False, False]
    if mode == "reproducible":
        run_tiny(*settings, output="whole")
        assert_close(parameters_in(tmp_path / "broken"), parameters_in(tmp_path / "whole"))


def test_rounds_that_are_added_to_a_run_are_charged(run_tiny, tmp_path):
    """The first charge is for the rounds that were planned then; the second, for all of them."""
    run_tiny(PRIVATE, SAMPLER, "rounds=4", CHEAP)
    result = runner.resume(tmp_path / "run", ["rounds=8"])
    lines = Ledger(tmp_path / "run" / "privacy.jsonl").charges
    planned = [
        line.event.rounds if isinstance(line.event, CorrelatedRounds) else 0 for line in lines
    ]
    assert planned == [4, 0, 0, 0, 8, 0, 0, 0]
    mu = np.linalg.norm(dense(8, 3)[:, [0, 4]]) / 2.0
    assert gdp_delta(mu, result.rounds["epsilon"].iloc[-1]) <= 1e-5


def test_noise_for_a_target_epsilon(load_tiny):
    experiment = load_tiny(
        f"privacy={{clip-norm=1.0, epsilon=2.0, delta=1e-5, {MECHANISM}}}", SAMPLER, "rounds=8"
    )
    clients = Population.of(experiment).partition.training_clients
    (plan,) = PhasePlans.before_a_run(experiment, clients).plans.values()
    mu = np.linalg.norm(dense(8, 3)[:, [0, 4]]) / plan.noise_multiplier
    assert gdp_delta(mu, 2.0) == pytest.approx(1e-5, rel=5e-3) and gdp_delta(mu, 2.0) <= 1e-5


@pytest.mark.parametrize(
    "sampler",
    [
        SAMPLER.replace("separation=4", "separation=2"),
        "sampler={name='fixed-size', cohort=3}",
        "sampler={name='full'}",
    ],
)
def test_cohorts_that_are_too_near_are_refused(run_tiny, sampler, tmp_path):
    """Columns of two of a client's rounds would overlap, and move the release further."""
    with pytest.raises(ExperimentError, match="no cost") as refused:
        run_tiny(PRIVATE, sampler)
    assert "separates a client's rounds by 3" in str(refused.value)
    assert not (tmp_path / "run" / "privacy.jsonl").exists()


def test_noise_with_a_memory_is_refused_on_clients(run_tiny):
    with pytest.raises(ExperimentError, match="placement"):
        run_tiny(PRIVATE, SAMPLER, "privacy.placement=local")


def test_clients_that_join_are_refused(load_tiny, tmp_path):
    """They change the groups: a client of an early round may come again too soon."""
    run = RunFolder.create(load_tiny(PRIVATE, SAMPLER), tmp_path / "run")

    def roster(clients):
        return Roster((0,), (Presence(0, np.arange(clients), np.arange(0)),))

    cohorts = SampledCohorts(run.experiment, roster(18))
    guard = Guard(run, run.experiment.privacy, make_strategy(run.experiment, cohorts))
    guard.before_upload(1)
    cohorts.joined(roster(20))
    with pytest.raises(RunError, match="for other clients") as refused:
        guard.before_upload(2)
    assert "18 clients" in str(refused.value) and "20" in str(refused.value)


class Hasty(Separated):
    """Draws from a group again after two rounds."""

    def sample(self, round_number):
        return super().sample(round_number % 2 + 1)


def test_the_contract_finds_a_schedule_that_is_not_kept():
    class TestHasty(SamplerContract):
        component = Hasty

    with pytest.raises(AssertionError, match="after 2 rounds, not 4"):
        TestHasty().test_its_schedule_is_kept()


def test_commands_explain_and_calibrate_it(fedrec, tiny_file):
    sets = [part for text in (PRIVATE, SAMPLER, "rounds=8") for part in ("-s", text)]
    _, out, _ = fedrec("privacy", "explain", tiny_file, *sets)
    said = " ".join(out.split())
    assert "a client that takes part every 4 rounds" in said
    assert "at most 3 of 18 clients in each" in said
    assert "Amplification by sampling assumes" not in said

    numbers = ("--clients", 18, "--cohort", 3, "--rounds", 8, "--delta", 1e-5)
    numbers += ("--sampler", "scheduled", "--separation", 4)
    numbers += ("--mechanism", f"{{name='{BANDED}', bands=3}}")
    found = json.loads(fedrec("privacy", "calibrate", *numbers, "--epsilon", 2, "--json")[1])
    mu = np.linalg.norm(dense(8, 3)[:, [0, 4]]) / found["noise_multiplier"]
    assert gdp_delta(mu, 2.0) == pytest.approx(1e-5, rel=5e-3)
    _, again, _ = fedrec(
        "privacy", "epsilon", *numbers, "--noise-multiplier", found["noise_multiplier"], "--json"
    )
    assert json.loads(again)["epsilon"] == pytest.approx(2.0, rel=1e-3)
