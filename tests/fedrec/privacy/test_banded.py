# SPDX-License-Identifier: Apache-2.0
"""Banded noise and the sampler that it needs: whole runs, and figures against dense matrices in
numpy."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from scipy.linalg import toeplitz
from scipy.special import binom, ndtr

from fedrec.data.population import Population
from fedrec.errors import ExperimentError, RunError
from fedrec.experiment.schema import load
from fedrec.privacy.accounting.accountant import Accountant, Ledger
from fedrec.privacy.accounting.events import CorrelatedRounds, CoveredRound
from fedrec.privacy.accounting.sampling import Full, Scheduled
from fedrec.privacy.mechanisms import (
    Banded,
    _sensitivity,
    _square_root,
    cost_of,
    has_memory,
    inverse,
    mechanism_of,
)
from fedrec.protocol.messages import Presence, TrainSum
from fedrec.rng import Reproducible, source_of
from fedrec.runs.folder import RunFolder
from server.callbacks import Callback
from server.checkpoint import make_strategy
from server.cohort import SampledCohorts
from server.nodes import Roster
from server.privacy import guard
from server.privacy.guard import Guard, PhasePlans
from server.samplers import MinSeparation
from simulations import runner
from strategies.dp import DpFedAvg
from strategies.phases import TwoStage
from tests.runs import Interrupt, assert_close, assert_same_run, parameters_in

SAMPLER = "sampler={name='min-separation', cohort=3, separation=4}"
MECHANISM = "mechanism={name='banded', bands=3}"
BY_CLIENT = "split.stream=client"
PRIVATE = f"privacy={{clip-norm=1.0, noise-multiplier=2.0, delta=1e-5, {MECHANISM}}}"
CHEAP = "evaluation.fine-tune.epochs=0"


def banded(bands):
    return mechanism_of({"name": "banded", "bands": bands})


def dense(rounds, bands):
    """C `[rounds, rounds]`."""
    column = np.zeros(rounds)
    column[:bands] = np.abs(binom(-0.5, np.arange(bands)))[:rounds]
    return toeplitz(column, np.zeros(rounds))


def moved(rounds, schedule, bands):
    """How far a client moves C x: the factor by which a run's multiplier is below a round's."""
    (release,) = cost_of(banded(bands), 1.0, rounds, schedule, "add-remove")
    assert release.mechanism == "gaussian" and release.sampling == Full()
    return 1 / release.noise_multiplier


def gdp_delta(mu, epsilon):
    return ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize(
    ("rounds", "bands", "separation"), [(1, 1, 1), (7, 1, 1), (9, 3, 3), (10, 3, 4), (6, 5, 8)]
)
def test_its_sensitivity_is_the_most_that_any_schedule_moves(rounds, bands, separation):
    """Over all sets of rounds that are far enough apart, with the same or opposite updates."""
    c = dense(rounds, bands)
    found = 0.0
    for count in range(1, rounds + 1):
        for chosen in itertools.combinations(range(rounds), count):
            if count == 1 or np.diff(chosen).min() >= separation:
                columns = c[:, chosen]
                gram = columns.T @ columns
                # with update u_i of norm 1 in round i: the squared norm is sum_ij G_ij <u_i, u_j>
                found = max(found, float(np.abs(gram).sum()) ** 0.5)
    assert moved(rounds, Scheduled(3, separation), bands) == pytest.approx(found)


JAX = json.loads(
    (Path(__file__).parent / "factorisation" / "jax_privacy.json").read_text(encoding="utf-8")
)
"""Figures of jax-privacy 2.0.0, by `factorisation/write_jax_privacy.py`."""


@pytest.mark.parametrize("case", JAX, ids=lambda case: f"{case['bands']}-{case['rounds']}")
def test_coefficients_and_sensitivities_are_those_of_jax_privacy(case):
    root = _square_root(case["bands"])
    assert root == pytest.approx(case["coefficients"], rel=1e-12)
    column = dense(30, case["bands"])[:, 0]
    assert inverse(column, 30) == pytest.approx(
        np.linalg.inv(dense(30, case["bands"]))[:, 0], abs=1e-12
    )

    for schedule, expected in case["sensitivities"].items():
        separation, most = schedule.removeprefix("banded ").split()
        if most == "None":
            found = _sensitivity(root, case["rounds"], Scheduled(1, int(separation)))
            assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("bands", [1, 3, 9])
def test_its_noise_is_that_of_the_dense_matrix(bands):
    source = Reproducible(3)
    white = np.array([source.gaussian(50, "x", number) for number in range(1, 13)])
    memory: dict[str, np.ndarray] = {}
    drawn = [banded(bands).draw("x", 50, memory, source, number) for number in range(1, 13)]
    assert np.allclose(drawn, np.linalg.solve(dense(12, bands), white), rtol=0, atol=1e-12)
    assert has_memory(banded(bands)) == (bands > 1)
    assert sum(value.shape == (50,) for value in memory.values()) == bands - 1
    rows = np.linalg.norm(np.linalg.inv(dense(400, bands)), axis=1)
    assert banded(bands).std == pytest.approx(rows.max(), rel=1e-9)


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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reproducible", "secure"])
def test_rounds_that_are_added_to_a_run_are_charged(run_tiny, tmp_path, mode):
    """The first charge is for the rounds that were planned then; the second, for all of them."""
    run_tiny(PRIVATE, SAMPLER, "rounds=4", CHEAP, f"privacy.mode={mode}")
    result = runner.resume(tmp_path / "run", ["rounds=8"])
    lines = Ledger(tmp_path / "run" / "privacy.jsonl").charges
    planned = [
        line.event.rounds if isinstance(line.event, CorrelatedRounds) else 0 for line in lines
    ]
    assert planned == [4, 0, 0, 0, 8, 0, 0, 0]
    mu = np.linalg.norm(dense(8, 3)[:, [0, 4]]) / 2.0
    assert gdp_delta(mu, result.rounds["epsilon"].iloc[-1]) <= 1e-5


SECURE = (PRIVATE, "privacy.mode=secure", SAMPLER, "rounds=6", CHEAP, "evaluation.every=0")
STEP = "step={name='contrastive', hidden=4, session-length=4, masks=1, epochs=1}"
STAGES = f"strategy={{name='two-stage', stage-one={{rounds=2, {STEP}}}}}"


class WhoReads(Callback):
    """Notes after each round which files of the run folder have some secret, and who may read
    them."""

    def __init__(self, secrets):
        super().__init__()
        self.secrets, self.found = secrets, []

    def on_start(self, run, first_round, rounds):
        self.folder = run.path

    def after_round(self, row, seconds):
        self.found.append(self.look())
        return False

    def look(self):
        files = [file for file in self.folder.rglob("*") if file.is_file()]
        with_one = [file for file in files if any(one in file.read_bytes() for one in self.secrets)]
        return {(file.parent.name, oct(file.stat().st_mode)[-3:]) for file in with_one}


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), (STAGES,)], ids=["banded", "two phases"])
def test_noise_that_later_rounds_take_back_is_in_no_model_and_gone_after_the_run(
    run_tiny, monkeypatch, overrides
):
    """With it, the exact sum of the last round follows from two checkpoints."""
    secrets = set()

    def watched(draw):
        def drawn(self, name, size, memory, source, *address):
            found = draw(self, name, size, memory, source, *address)
            secrets.update(value.tobytes() for value in memory.values() if value.ndim)
            return found

        return drawn

    monkeypatch.setattr(Banded, "draw", watched(Banded.draw))
    reader = WhoReads(secrets)
    run_tiny(*SECURE, *overrides, callbacks=[reader])
    assert len(secrets) >= 6 and reader.found == [{("private", "600")}] * 6
    assert oct((reader.folder / "private").stat().st_mode)[-3:] == "700"
    assert reader.look() == set()


def interrupted(run_tiny, *overrides):
    """The folder of a run in mode `secure` that was interrupted after its third round."""
    interrupt = Interrupt(3)
    with pytest.raises(KeyboardInterrupt):
        run_tiny(*SECURE, *overrides, callbacks=[interrupt], output="broken")
    return interrupt.folder


@pytest.mark.slow
def test_a_resumed_run_has_the_noise_that_it_would_have_had(run_tiny, monkeypatch):
    """To the bit, if what the operating system would draw is the same."""
    monkeypatch.setattr(guard, "source_of", lambda mode, seed: Reproducible(seed))
    whole = run_tiny(*SECURE, output="whole")
    assert_same_run(runner.resume(interrupted(run_tiny)), whole)


@pytest.mark.slow
def test_damaged_noise_is_refused_and_lost_noise_is_charged_once_more(run_tiny, caplog):
    folder = interrupted(run_tiny)
    file = max(folder.glob("private/noise-*.npz"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(RunError, match="is damaged") as refused:
        runner.resume(folder)
    assert str(file) in str(refused.value) and "charged once more" in str(refused.value)
    file.unlink()
    (folder / "private" / f".{file.name}.0123").write_bytes(content)  # of a process that was killed
    runner.resume(folder)
    assert f"{file} is missing" in caplog.text
    assert not any("noise" in one.name for one in (folder / "private").iterdir())
    lines = Ledger(folder / "privacy.jsonl").charges
    assert [line.round_number for line in lines] == [1, 2, 3, 4, 5, 6]
    whole = [isinstance(line.event, CorrelatedRounds) for line in lines]
    assert whole == [True, False, False, True, False, False]


class EndAfter4(Callback):
    """Ends a run early."""

    def after_round(self, row, seconds):
        return row["round"] == 4


@pytest.mark.slow
def test_rounds_after_an_early_end_are_charged_although_they_were_planned(run_tiny):
    """The noise of the rounds before is gone with the end of the run."""
    result = run_tiny(*SECURE, callbacks=[EndAfter4()])
    runner.resume(result.folder, ["rounds=5"])
    lines = Ledger(result.folder / "privacy.jsonl").charges
    planned = [getattr(line.event, "rounds", 0) for line in lines]
    assert planned == [6, 0, 0, 0, 5]


class Alternating(TwoStage):
    """Whose stages take turns."""

    @classmethod
    def schedule(cls, config, step):
        return tuple(
            dataclasses.replace(phase, last=number)
            for number, phase in enumerate(super().schedule(config, step) * 5, start=1)
        )


def test_a_phase_whose_rounds_are_not_consecutive_is_refused(run_tiny):
    """Clients that are 4 rounds apart are 2 rounds of the phase apart there."""
    alternating = STAGES.replace("two-stage", "test_banded:Alternating")
    with pytest.raises(ExperimentError, match="not consecutive") as refused:
        run_tiny(PRIVATE, SAMPLER, alternating, "rounds=10", CHEAP)
    assert "rounds 1, 3, 5, 7, ..." in str(refused.value)
    # what is independent in each round has the same cost in any order
    independent = PRIVATE.replace(MECHANISM, "backend='autodp'")
    run_tiny(independent, alternating, "rounds=2", CHEAP, "evaluation.every=0")


def test_noise_for_a_target_epsilon(load_tiny):
    experiment = load_tiny(
        f"privacy={{clip-norm=1.0, epsilon=2.0, delta=1e-5, {MECHANISM}}}", SAMPLER, "rounds=8"
    )
    clients = Population.of(experiment).partition.training_clients
    (plan,) = PhasePlans.before_a_run(experiment, clients).plans.values()
    mu = np.linalg.norm(dense(8, 3)[:, [0, 4]]) / plan.noise_multiplier
    assert gdp_delta(mu, 2.0) == pytest.approx(1e-5, rel=5e-3) and gdp_delta(mu, 2.0) <= 1e-5


@pytest.mark.parametrize(
    ("sampler", "adjacency"),
    [
        ("sampler={name='fixed-size', cohort=3}", "replace-one"),
        ("sampler={name='poisson', cohort=3}", "add-remove"),
    ],
)
def test_cohorts_without_a_known_cost_are_refused(run_tiny, sampler, adjacency, tmp_path):
    with pytest.raises(ExperimentError, match="this mechanism is unknown") as refused:
        run_tiny(PRIVATE, sampler, f"privacy.adjacency={adjacency}", BY_CLIENT)
    assert "separates a client's rounds" in str(refused.value)
    assert not (tmp_path / "run" / "privacy.jsonl").exists()


@pytest.fixture
def joining(load_tiny, tmp_path):
    """The rounds of every client in 12 rounds, of which the last 6 are drawn after two joined."""

    def rounds_of(*overrides):
        run = RunFolder.create(load_tiny(PRIVATE, SAMPLER, *overrides), tmp_path / "run")

        def roster(clients):
            return Roster((0,), (Presence(0, np.arange(clients), np.arange(0)),))

        cohorts = SampledCohorts(run.experiment, roster(18))
        own = Guard(run, run.experiment.privacy, make_strategy(run.experiment, cohorts))
        own.before_upload(1)
        drawn = [cohorts.sample(number) for number in range(1, 7)]
        cohorts.joined(roster(60))
        own.before_upload(7)
        drawn += [cohorts.sample(number) for number in range(7, 13)]
        return [np.flatnonzero([client in cohort for cohort in drawn]) for client in range(60)]

    return rounds_of


def test_clients_that_join_change_nobodys_group(joining):
    rounds = joining()
    assert min(np.diff(own).min(initial=4) for own in rounds) == 4
    assert any(len(own) for own in rounds[18:])


class OfFirstClients(MinSeparation):
    """Keeps its bound for the clients at the start only."""

    @property
    def schedule(self):
        return dataclasses.replace(super().schedule, joining=False)


def test_clients_that_join_are_refused_where_the_schedule_does_not_cover_them(joining):
    with pytest.raises(RunError, match="does not cover new clients") as refused:
        joining(SAMPLER.replace("min-separation", "test_banded:OfFirstClients"))
    assert "18 clients" in str(refused.value) and "60" in str(refused.value)


@pytest.mark.parametrize("mode", ["reproducible", "secure"])
def test_what_is_kept_of_the_noise_is_bounded_and_stated(load_tiny, mode):
    """Checkpoints have none of it: that of noise from the seed is drawn again."""
    experiment = load_tiny(PRIVATE, SAMPLER, f"privacy.mode={mode}", "rounds=8")
    clients = np.arange(18)
    cohorts = SampledCohorts.without_nodes(experiment, clients)
    strategy = make_strategy(experiment, cohorts)
    plans = PhasePlans.of(experiment, experiment.privacy, strategy)
    source = source_of(mode, 0)
    theta = {"x": np.zeros((50, 3), dtype=np.float32)}
    (plan,) = plans.plans.values()
    privacy = DpFedAvg(plan, "main", source, lambda number: None)
    zeros = [(TrainSum({"x": np.zeros((50, 3))}, 3, 3.0, 0, 0.0, 0), 3)]
    sizes = []
    for number in range(1, 7):
        privacy.release(number, theta, zeros)
        sizes.append(sum(value.nbytes for value in privacy.memory.values()))
    most = 2 * 150 * 8
    assert most < sizes[-1] < most + 200
    assert any("that of earlier rounds" in line for line in plans.report(Accountant()).caveats)
    again = DpFedAvg(plan, "main", source, lambda number: None)
    assert privacy.keeps_noise == (mode == "secure")
    again.memory = dict(privacy.memory) if privacy.keeps_noise else {}
    if mode == "secure":  # only the next z may be another after a restart
        privacy.source = again.source = Reproducible(1)
    first = privacy.release(7, theta, zeros)["x"]
    assert np.array_equal(again.release(7, theta, zeros)["x"], first)


@pytest.mark.slow
def test_strategies_add_up_correlated_noise(run_tiny):
    """With updates of zero, a server that adds up what rounds release ends with the sum of the rows
    of the dense matrix times white noise."""
    nothing = "strategy.server-lr=1.0", "step.epochs=0", CHEAP, "rounds=7", "evaluation.every=0"
    result = run_tiny(PRIVATE, SAMPLER, *nothing)
    noiseless = "privacy={clip-norm=1.0, noise-multiplier=0.0, delta=1e-5}"
    run_tiny(noiseless, "sampler={name='full'}", *nothing, output="start")
    after = parameters_in(result.folder)
    before = parameters_in(result.folder.parent / "start")
    source = Reproducible(result.experiment.seed)
    workload = np.linalg.inv(dense(7, 3)).sum(axis=0)
    scale = 2.0 * 2 / 3  # noise multiplier, sensitivity 2S, and a cohort of 3
    for name, value in after.items():
        white = [source.gaussian(value.size, name, number) for number in range(1, 8)]
        moved = scale * (workload @ np.array(white)).reshape(value.shape)
        assert np.allclose(value - before[name], moved, atol=1e-5)
