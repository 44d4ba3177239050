# SPDX-License-Identifier: Apache-2.0
"""Whole private runs: charges and their order, the budget, resuming, secure mode, refusals and the
report."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from flwr.app import MetricRecord

from clients import sums as update_sum
from fedrec.errors import ComponentError, ExperimentError, RunError
from fedrec.privacy import mechanisms
from fedrec.privacy import plan as noise
from fedrec.privacy.accounting import accountant as module
from fedrec.privacy.accounting.accountant import Accountant, Ledger
from fedrec.privacy.accounting.events import NoisyRound
from fedrec.privacy.accounting.sampling import FixedSize
from fedrec.protocol.messages import unpack_sum
from fedrec.protocol.serialization import to_record
from fedrec.report.page.sections import report
from fedrec.runs.folder import RunFolder
from server import cohort as selection
from server.callbacks import Callback, Progress
from server.checkpoint import make_strategy
from server.cohort import SampledCohorts
from server.privacy.guard import Guard
from server.run import _Loop
from simulations import runner
from simulations.cli.run import print_table
from simulations.engines import grid
from strategies import dp
from strategies.base import Aggregate
from strategies.sums import Reptile
from tests.runs import Broken, assert_close, assert_same_run, charges, crash_in_round, parameters_in

PRIVATE = "privacy={clip-norm=1.0, noise-multiplier=1.0, backend='autodp'}"
POISSON = (
    "sampler={name='poisson', cohort=6}",
    "privacy.adjacency=add-remove",
    "split.stream=client",
)
CHEAP = ("evaluation.fine-tune.epochs=0", "evaluation.every=0")
PLACEMENTS = ("central", "local", "distributed")
STEP = "step={name='contrastive', hidden=4, session-length=4, masks=1, epochs=1}"
STAGES = f"strategy={{name='two-stage', stage-one={{rounds=2, {STEP}}}}}"


def own_epsilons(rounds, delta=1e-5, z=1.0, cohort=6, clients=18):
    """The accountant's epsilon of a number of rounds of the tiny experiment, without a run."""
    accountant, found = Accountant("autodp"), []
    for _ in range(rounds):
        accountant.step(NoisyRound("gaussian", FixedSize(cohort, clients), "replace-one", z), 1)
        found.append(accountant.epsilon(delta).epsilon)
    return found


# --- accounts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", [*(f"privacy.placement={p}" for p in PLACEMENTS), STAGES])
def test_every_round_is_charged_once_and_epsilon_is_the_accountants(run_tiny, setting):
    result = run_tiny(PRIVATE, setting, "rounds=4", *CHEAP)
    assert charges(result.folder) == [1, 2, 3, 4]
    if "local" not in setting:  # that one has no amplification
        assert result.rounds["epsilon"].tolist() == pytest.approx(own_epsilons(4), rel=1e-9)
    assert result.rounds["epsilon"].is_monotonic_increasing
    saved = pd.read_csv(result.folder / "rounds.csv")["epsilon"].tolist()
    assert saved == pytest.approx(result.rounds["epsilon"].tolist())


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_crash_after_the_charge_is_charged_again(run_tiny, tmp_path, monkeypatch, placement):
    """Never refunded, because a release may have been observed; the resumed run ends with the same
    parameters."""
    settings = (PRIVATE, f"privacy.placement={placement}", "rounds=4", *CHEAP)
    whole = run_tiny(*settings, output="whole")
    places = {
        "central": (mechanisms, "add_noise"),
        "local": (dp.DpFedAvg, "release"),
        "distributed": (dp.DpFedAvg, "release"),
    }
    crash_in_round(monkeypatch, 3, places[placement])
    with pytest.raises(Broken):
        run_tiny(*settings, output="broken")
    assert charges(tmp_path / "broken") == [1, 2, 3]
    assert RunFolder(tmp_path / "broken").status()["round"] == 2
    result = runner.resume(tmp_path / "broken")
    assert charges(result.folder) == [1, 2, 3, 3, 4]
    assert_close(parameters_in(result.folder), parameters_in(whole.folder))
    five = (result.rounds["epsilon"].iloc[-1], whole.rounds["epsilon"].iloc[-1])
    assert five[0] > five[1]
    if placement != "local":
        assert five[0] == pytest.approx(own_epsilons(5)[-1])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_releases_are_charged_before_they_leave(run_tiny, monkeypatch, placement):
    """The server's noise is charged before it is drawn, clients' noise before the clients are asked
    to upload."""
    charge = Ledger.charge
    draw = mechanisms.add_noise
    train = grid.SerialGrid.send_and_receive
    apply = Reptile.apply
    paid = []

    def pay(self, number, event):
        charge(self, number, event)
        paid.append(number)

    monkeypatch.setattr(Ledger, "charge", pay)
    drawn, sent, applied = [], [], []

    def add(self, arrays, scale, source, number, *more, **settings):
        if "memory" in settings:  # the server's
            drawn.append((number, number in paid))
        return draw(self, arrays, scale, source, number, *more, **settings)

    def use(self, theta, aggregate):
        applied.append((aggregate.round, aggregate.round in paid))
        return apply(self, theta, aggregate)

    def send(self, messages, **more):
        messages = list(messages)
        if messages and messages[0].metadata.message_type == "train":
            sent.append(len(paid) > len(sent))
        return train(self, messages, **more)

    monkeypatch.setattr(mechanisms, "add_noise", add)
    monkeypatch.setattr(Reptile, "apply", use)
    monkeypatch.setattr(grid.SerialGrid, "send_and_receive", send)
    run_tiny(PRIVATE, f"privacy.placement={placement}", "rounds=3", *CHEAP)
    assert applied == [(1, True), (2, True), (3, True)]
    assert drawn == (applied if placement == "central" else [])
    assert sent == [placement != "central"] * 3


def test_a_crash_before_the_charge_costs_nothing(run_tiny, tmp_path, monkeypatch):
    crash_in_round(monkeypatch, 2, (Ledger, "charge"))
    with pytest.raises(Broken):
        run_tiny(PRIVATE, "rounds=3", *CHEAP, output="broken")
    assert charges(tmp_path / "broken") == [1]
    assert charges(runner.resume(tmp_path / "broken").folder) == [1, 2, 3]


# --- the budget -----------------------------------------------------------------------------------


@pytest.mark.parametrize("paid", [1, 3])
def test_a_run_stops_before_the_round_that_would_exceed_the_target(run_tiny, monkeypatch, paid):
    """If the calibrated noise is too little for all rounds together."""
    monkeypatch.setattr(noise, "_calibrated", lambda *of: 1.0)
    budget = np.mean(own_epsilons(paid + 1)[-2:])
    target = f"privacy={{clip-norm=1.0, epsilon={budget}, backend='autodp'}}"
    result = run_tiny(target, "rounds=6", "checkpoint.every=5", *CHEAP)
    assert len(result.rounds) == paid and charges(result.folder) == list(range(1, paid + 1))
    assert result.rounds["epsilon"].iloc[-1] <= budget
    assert RunFolder(result.folder).status() == {"state": "finished", "round": paid}
    assert len(result.users) and (result.folder / "checkpoints" / f"round-{paid:06d}.npz").exists()
    assert "the privacy budget is spent" in (result.folder / "log.txt").read_text()


def test_noise_for_a_target_epsilon_covers_all_rounds_and_no_more(run_tiny):
    result = run_tiny("privacy={clip-norm=1.0, epsilon=3.0}", "rounds=5", *CHEAP)
    assert len(result.rounds) == 5 and 2.9 < result.rounds["epsilon"].iloc[-1] <= 3.0


def test_a_repeated_charge_does_not_exceed_the_target_and_is_told(
    run_tiny, tmp_path, monkeypatch, capsys
):
    crash_in_round(monkeypatch, 3, (mechanisms, "add_noise"))
    with pytest.raises(Broken):
        run_tiny("privacy={clip-norm=1.0, epsilon=3.0}", "rounds=5", *CHEAP, output="broken")
    result = runner.resume(tmp_path / "broken")
    assert charges(result.folder) == [1, 2, 3, 3, 4]
    assert len(result.rounds) == 4 and result.rounds["epsilon"].iloc[-1] <= 3.0
    privacy = json.loads((result.folder / "result.json").read_text())["privacy"]
    assert privacy["charged-again"] == 1 and privacy["rounds-not-run"] == 1
    told = (
        "Charged again after an interruption, as earlier releases are not refunded:"
        " round 3. The budget ended the run after 4 of 5 rounds."
    )
    assert result.privacy[1] == told
    print_table(result)
    printed = " ".join(capsys.readouterr().out.split())
    assert told in printed and "4 of 5 rounds." in printed and "4 of 5 rounds" in repr(result)
    page = " ".join(report([result]).split())
    assert told in page and "4 of 5" in page and "charged again" in page


# --- resuming -------------------------------------------------------------------------------------

RESUMED = {
    "central": (),
    "local": ("privacy.placement=local",),
    "poisson": POISSON,
    "two stages": (STAGES,),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_has_the_same_bits(run_tiny, tmp_path, monkeypatch, case):
    settings = (PRIVATE, *RESUMED[case], "rounds=4", *CHEAP)
    whole = run_tiny(*settings, output="whole")
    crash_in_round(monkeypatch, 3, (_Loop, "_train"))
    with pytest.raises(Broken):
        run_tiny(*settings, output="broken")
    result = runner.resume(tmp_path / "broken")
    assert_same_run(result, whole)


def test_every_parameter_of_a_real_round_has_noise(run_tiny):
    """With S = 1e-6 there is only noise: every coordinate moves, also those of items without
    interactions."""
    still = run_tiny(
        "privacy={clip-norm=1e-6, noise-multiplier=0.0}", "rounds=1", *CHEAP, output="still"
    )
    noisy = run_tiny(
        "privacy={clip-norm=1e-6, noise-multiplier=1e6}", "rounds=1", *CHEAP, output="noisy"
    )
    noise = np.concatenate(
        [(noisy.parameters[n] - still.parameters[n]).ravel() for n in still.parameters]
    )
    assert noise.all() and abs(noise.std() / (2 / 6) - 1) < 5 / math.sqrt(2 * noise.size)


# --- secure mode ----------------------------------------------------------------------------------


def test_secure_runs_never_repeat_and_keep_who_took_part_and_what_was_lost(
    run_tiny, tmp_path, monkeypatch
):
    """Ids and losses are in no file of the run, in any form."""
    cohorts, losses = [], []
    draw, add = selection.secure_fixed_size, update_sum.UpdateSum.add_block

    def drawing(*of):
        cohorts.append(draw(*of))
        return cohorts[-1]

    def adding(self, clients, update):
        losses.extend(update.losses())
        add(self, clients, update)

    monkeypatch.setattr(selection, "secure_fixed_size", drawing)
    monkeypatch.setattr(update_sum.UpdateSum, "add_block", adding)
    first, second = (
        run_tiny(
            PRIVATE, "privacy.mode=secure", "rounds=3", "sampler.cohort=9", *CHEAP, output=output
        )
        for output in ("a", "b")
    )
    assert all(
        not np.array_equal(first.parameters[name], second.parameters[name])
        for name in first.parameters
    )
    assert (
        len(cohorts) == 6 and len({tuple(cohort) for cohort in cohorts}) > 3 and len(losses) == 54
    )
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"rounds.csv", "log.txt", "status.json", "result.json", "privacy.jsonl"} <= {
        path.name for path in files
    }
    contents = {path: path.read_bytes() for path in files}
    for cohort in cohorts:
        spelled = [joint.join(map(str, cohort)).encode() for joint in (", ", ",", " ", "\n")]
        packed = [cohort.astype(kind).tobytes() for kind in (np.int64, np.int32)]
        assert not any(
            mark in content for mark in spelled + packed for content in contents.values()
        )
    for loss in [*losses, *(sum(losses[k : k + 9]) / 9 for k in range(0, 54, 9))]:
        assert not any(f"{loss:.6g}".encode() in content for content in contents.values())
    for result in (first, second):
        assert not {"loss", "num-examples"} & set(result.rounds.columns[result.rounds.any()])
        assert "loss" not in (result.folder / "log.txt").read_text()


def test_nothing_published_in_secure_mode_depends_on_who_was_drawn(run_tiny, monkeypatch):
    """Also if nobody was: the tables are the same to the byte, whatever the cohorts."""
    settings = (PRIVATE, *POISSON, "rounds=3", *CHEAP)
    tables = []
    for sizes in ([6, 6, 6], [0, 18, 1]):
        left = iter(sizes)
        monkeypatch.setattr(selection, "secure_poisson", lambda c, rate, left=left: c[: next(left)])
        result = run_tiny(*settings, "privacy.mode=secure", output=f"secure-{sizes[0]}")
        assert next(left, None) is None
        tables.append((result.folder / "rounds.csv").read_bytes())
        cost = json.loads((result.folder / "result.json").read_text())["cost"]
        tables.append(json.dumps(cost).encode())
    assert tables[:2] == tables[2:] and result.rounds["num-clients"].tolist() == [6] * 3
    whole = sum(value.nbytes for value in result.parameters.values())
    assert result.rounds["bytes-up"].tolist() == [6 * whole] * 3
    assert set(run_tiny(*settings, output="open").rounds["num-clients"]) != {6}


def test_secure_mode_keeps_and_prints_no_time_that_depends_on_a_cohort(run_tiny, capsys, caplog):
    settings = (PRIVATE, "privacy.mode=secure", "rounds=2", *CHEAP)
    heard = Heard()
    result = run_tiny(*settings, callbacks=[heard, Progress()])
    assert heard.seconds == [pytest.approx(math.nan, nan_ok=True)] * 2
    assert not (result.folder / "timings.csv").exists()
    summary = json.loads((result.folder / "result.json").read_text())
    assert "training" not in summary["seconds"] and "peak-memory-mib" not in summary["cost"]
    log_file = result.folder / "log.txt"
    log = log_file.read_text()
    assert "round 2: " in log and not re.search(r"\d s\b|\d:\d\d", log)
    assert log_file.stat().st_mode & 0o777 == 0o600  # it may name nodes that failed
    said = capsys.readouterr().err
    assert "round 2/2" in said and not re.search(r"\d s\b", said)
    with np.load(max((result.folder / "checkpoints").iterdir())) as checkpoint:
        assert json.loads(checkpoint["about"].tobytes())["timings"] == []


class Heard(Callback):
    """Notes the times that it is told."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def after_round(self, row, seconds):
        self.seconds.append(seconds)
        return False


# --- parameters that nobody trains ----------------------------------------------------------------


def test_noise_on_what_no_client_changes_is_warned_of_once_a_run(run_tiny, caplog):
    still = "step.rates={'item.*'=0.0}"
    run_tiny(PRIVATE, still, "rounds=3", *CHEAP, output="idle")
    lines = [
        record.getMessage()
        for record in caplog.records
        if "noise but no signal" in record.getMessage()
    ]
    assert len(lines) == 1 and "item.id" in lines[0] and "layer0" not in lines[0]
    caplog.clear()
    run_tiny(PRIVATE, "rounds=2", *CHEAP, output="busy")
    # a sum of zero is data too
    run_tiny(PRIVATE, still, "privacy.mode=secure", "rounds=2", *CHEAP, output="secure")
    assert "noise but no signal" not in caplog.text


# --- refusals and reports -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (
            "name='flwr.serverapp.strategy:FedAvg'",
            "a strategy of Flower's, whose averaging of updates cannot be controlled",
        ),
        ("name='trimmed-mean'", "its server needs the update of each client"),
        ("name='fedavg'", "weighting 'examples': a client's share of the sum is unbounded"),
        (
            f"name='two-stage', main={{name='fedavg'}}, stage-one={{rounds=1, {STEP}}}",
            "is unbounded",
        ),
    ],
)
def test_strategies_without_a_bound_are_refused_before_anything_is_trained(
    run_tiny, tmp_path, strategy, reason
):
    with pytest.raises(ExperimentError, match=reason):
        run_tiny(f"strategy={{{strategy}}}", PRIVATE)
    assert charges(tmp_path / "run") == []


def test_the_result_reports_its_cost(run_tiny):
    result = run_tiny(
        "privacy={clip-norm=1.0, noise-multiplier=1.0, delta=1e-6, backend='autodp'}",
        "rounds=3",
        *CHEAP,
    )
    table = json.loads((result.folder / "result.json").read_text())["privacy"]
    (expected,) = own_epsilons(3, delta=1e-6)[-1:]
    assert table["epsilon"] == table["epsilon of main"] == pytest.approx(expected)
    assert table["delta"] == 1e-6
    assert table["releases"] == 3
    assert 0 < table["attack"] <= table["epsilon"]
    words = " ".join(table["in words"])
    assert tuple(table["in words"]) == tuple(result.privacy)
    for said in ("another user's", "simulation", "server is trusted", "Not accounted"):
        assert said in words


def test_without_noise_epsilon_is_infinite_everywhere(run_tiny):
    result = run_tiny("privacy={clip-norm=1.0, noise-multiplier=0.0}", *CHEAP)
    table = json.loads((result.folder / "result.json").read_text())["privacy"]
    assert np.isinf(result.rounds["epsilon"]).all() and table["epsilon"] == "inf"


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.ray
def test_ray_and_serial_give_the_same_private_run(run_tiny, shared_engine):
    ray, serial_run = (
        run_tiny(PRIVATE, f"engine.name={name}", "engine.nodes=2", *CHEAP, output=name)
        for name in ("ray", "serial")
    )
    assert_close(ray.parameters, serial_run.parameters, rtol=1e-5, atol=1e-6)
    assert ray.rounds["epsilon"].tolist() == serial_run.rounds["epsilon"].tolist()


LOST = {
    "deleted": lambda lines: None,
    "emptied": lambda lines: [],
    "cut": lambda lines: lines[:1],
    "cheapened": lambda lines: [
        line.replace('"noise_multiplier": 1.0', '"noise_multiplier": 9.0') for line in lines
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_run_whose_ledger_lost_charges_is_not_resumed(
    run_tiny, tmp_path, monkeypatch, how, checkpoints
):
    """Resumed without these charges, a run would report too small an epsilon."""
    crash_in_round(monkeypatch, 4, (_Loop, "_train"))
    with pytest.raises(Broken):
        run_tiny(PRIVATE, "rounds=4", *CHEAP, output="broken")
    file = tmp_path / "broken" / "privacy.jsonl"
    before = file.read_text().splitlines(keepends=True)
    left = LOST[how](before)
    assert len(before) == 3 and left != before
    file.unlink() if left is None else file.write_text("".join(left))
    if not checkpoints:
        for checkpoint in (tmp_path / "broken" / "checkpoints").iterdir():
            checkpoint.unlink()
        if how in ("cut", "cheapened"):
            # rounds are charged again from the first one on, and no later charges are known
            return
    with pytest.raises(
        RunError, match=r"does not contain all charges of the run(.*\n)*.*restore the file"
    ):
        runner.resume(tmp_path / "broken")
    file.write_text("".join(before))
    assert runner.resume(tmp_path / "broken").rounds["epsilon"].tolist()[-1] >= own_epsilons(4)[-1]


def test_the_population_that_noise_is_for_is_that_of_the_runs_start(load_tiny, tmp_path):
    """A node that claims many clients after the start, or before a run is resumed, does not reduce
    the noise."""
    run = RunFolder.create(
        load_tiny("privacy={clip-norm=1.0, epsilon=2.0, delta=1e-5, backend='autodp'}"),
        tmp_path / "run",
    )

    def guard(clients, folder=run):
        cohorts = SampledCohorts.without_nodes(folder.experiment, np.arange(clients))
        strategy = make_strategy(folder.experiment, cohorts)
        return Guard(folder, folder.experiment.privacy, strategy).phases.plans["main"]

    start = guard(18)
    assert guard(1_000_018) == start and start.clients == 18
    other = RunFolder.create(run.experiment, tmp_path / "other")
    # the purpose of the claim
    assert guard(1_000_018, other).noise_multiplier < start.noise_multiplier / 2
    (run.path / "populations.json").write_text("[1")
    with pytest.raises(RunError, match=r"populations\.json is damaged"):
        guard(18)


def test_a_bound_below_what_an_attack_reaches_is_an_error_of_the_accountant(monkeypatch):
    accountant = Accountant("pld")
    accountant.step(NoisyRound("gaussian", FixedSize(6, 18), "replace-one", 1.0), 3)
    honest = accountant.epsilon(1e-5, attack=True)
    assert 0 < honest.attack < honest.epsilon
    monkeypatch.setattr(module, "attack_epsilon", lambda *_: honest.epsilon * 1.001)
    # within the digits of the grid
    assert accountant.epsilon(1e-5, attack=True).attack == honest.epsilon
    monkeypatch.setattr(module, "attack_epsilon", lambda *_: honest.epsilon * 1.01)
    with pytest.raises(
        ComponentError, match=r"accountant .* is wrong: the best known attack exceeds"
    ):
        accountant.epsilon(1e-5, attack=True)


class OwnRounds(Reptile):
    """Aggregates by itself."""

    def aggregate_train(self, server_round, replies):
        sums = [unpack_sum(reply.content) for reply in replies]
        whole = Aggregate(sums[0].total, sums[0].clients, sums[0].weight, server_round)
        theta = self.apply(self._theta, whole)
        return to_record({n: v.astype(np.float32) for n, v in theta.items()}), MetricRecord({})


class Delegating(Reptile):
    """Contains another strategy and does not say so."""

    def __init__(self, config, cohorts, step):
        super().__init__(config, cohorts, step)
        self.inner = Reptile(config, cohorts, step)

    def configure_train(self, server_round, arrays, config, grid):
        return self.inner.configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        return self.inner.aggregate_train(server_round, replies)


class Bypassing(Delegating):
    """Names a strategy that it does not use."""

    def __init__(self, config, cohorts, step):
        super().__init__(config, cohorts, step)
        self.named = Reptile(config, cohorts, step)

    def phases(self):
        return {"main": self.named}


@pytest.mark.parametrize("strategy", [OwnRounds, Delegating])
def test_strategies_that_aggregate_by_themselves_are_refused(run_tiny, tmp_path, strategy):
    name = f"strategy.name={__name__}:{strategy.__name__}"
    with pytest.raises(ExperimentError, match="cannot be made private"):
        run_tiny(name, PRIVATE, *CHEAP)
    assert charges(tmp_path / "run") == []


def test_the_result_of_a_round_without_a_charge_is_not_used(run_tiny, tmp_path):
    with pytest.raises(RunError, match="round 1 was not charged"):
        run_tiny(f"strategy.name={__name__}:Bypassing", PRIVATE, *CHEAP)
    assert not list((tmp_path / "run").glob("**/*.npz"))
    assert RunFolder(tmp_path / "run").status()["round"] == 0


def test_the_result_of_a_round_with_another_charge_is_not_used(run_tiny, tmp_path, monkeypatch):
    """The ledger has a line of the round, with twice the noise that is planned and drawn."""

    def cheaper(self, number):
        event = self.phases.event("main")
        self.ledger.charge(number, replace(event, noise_multiplier=2 * event.noise_multiplier))

    monkeypatch.setattr(Guard, "_charge", cheaper)
    with pytest.raises(RunError, match="round 1 was not charged"):
        run_tiny(PRIVATE, *CHEAP)
    assert charges(tmp_path / "run") == [1] and RunFolder(tmp_path / "run").status()["round"] == 0


def test_a_target_below_one_round_gives_the_first_parameters_and_claims_nothing(
    run_tiny, monkeypatch
):
    monkeypatch.setattr(noise, "_calibrated", lambda *of: 0.1)
    result = run_tiny("privacy={clip-norm=1.0, epsilon=1e-3}", *CHEAP)
    assert len(result.rounds) == 0 and charges(result.folder) == []
    assert RunFolder(result.folder).status() == {"state": "finished", "round": 0}
    told = " ".join(result.privacy)
    assert "no epsilon to report" in told
    assert "guarantee" not in told and "epsilon 0" not in told
