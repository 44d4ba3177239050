# SPDX-License-Identifier: Apache-2.0
"""Sweeps."""

import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import time

import numpy as np
import pandas as pd
import pytest

from fedrec.components.sections import override
from fedrec.data.population import Population
from fedrec.errors import ExperimentError, RunError
from fedrec.privacy.accounting.accountant import Accountant, Ledger
from fedrec.report.page.sections import report
from fedrec.report.privacy_total import shown_together
from fedrec.runs.folder import Result, RunFolder, locked
from simulations import runner
from simulations.studies.search import _drawn, _space_of, grid, overrides, plan_of
from simulations.studies.sweep import SweepFolder, _best, sweep, with_sweeps

# Sweeps: a killed sweep loses nothing, two sweeps are never mixed, and none selects by test users.

VALIDATION = ["evaluation.held-out=validation", "split.validation-users=0.25"]
RATES = "strategy.server-lr=[0.1, 1.0]"
PRIVATE = "privacy={clip-norm=1.0, noise-multiplier=1.0, backend='pld'}"


@pytest.fixture
def plan(tiny_experiment):
    """Plans a sweep of the tiny experiment."""
    return lambda fixed=(), vary=(RATES,), **more: plan_of(tiny_experiment(), fixed, vary, **more)


def test_every_setting_has_a_run_for_each_seed_as_if_run_alone(plan, run_tiny, tmp_path):
    found = sweep(plan(seeds=2), tmp_path / "sweep")
    assert len(found.runs) == 4 and set(found.runs["state"]) == {"finished"} and not found.chosen
    alone = run_tiny("strategy.server-lr=1.0", "seed=1")
    row = found.runs[(found.runs["strategy.server-lr"] == 1.0) & (found.runs["seed"] == 1)].iloc[0]
    assert row["hits@5"] == alone.metrics["hits@5"]
    both = found.runs[found.runs["strategy.server-lr"] == 1.0]["hits@5"].to_numpy()
    assert found.settings.loc[2, "hits@5"] == pytest.approx(np.mean(both))
    assert found.settings.loc[2, "hits@5 sd"] == pytest.approx(np.std(both, ddof=1))
    kept = pd.read_csv(tmp_path / "sweep" / "runs.csv")
    assert list(kept["folder"]) == list(found.runs["folder"])


@pytest.mark.slow
def test_a_killed_sweep_continues_where_it_stopped(plan, tmp_path):
    """Killed in the middle of a run: finished runs are not repeated, and the result is the same."""
    asked = plan(["rounds=6"], seeds=2)
    whole = sweep(asked, tmp_path / "whole")
    broken = tmp_path / "broken"
    child = multiprocessing.get_context("fork").Process(target=sweep, args=(asked, broken))
    child.start()
    deadline, second = time.monotonic() + 60, broken / "runs" / "0001-seed1" / "checkpoints"
    while not list(second.glob("round-*")) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    first = broken / "runs" / "0001-seed0" / "result.json"
    before, states = first.stat().st_mtime_ns, SweepFolder(broken)
    assert [bool(states.values(job)) for job in states.jobs()] == [True, False]
    resumed = sweep(asked, broken)
    assert first.stat().st_mtime_ns == before
    pd.testing.assert_frame_equal(resumed.runs, whole.runs)


def test_a_run_that_was_broken_off_while_its_folder_was_made_begins_again(plan, tmp_path):
    asked = plan()
    begun = SweepFolder.opened(tmp_path / "sweep", asked)
    begun.add_trial({"strategy.server-lr": 0.1})
    half = begun.jobs()[0].folder
    half.mkdir(parents=True)
    (half / "experiment.toml").write_text("")
    assert set(sweep(asked, tmp_path / "sweep").runs["state"]) == {"finished"}


def test_two_sweeps_do_not_share_a_folder(plan, run_tiny, tmp_path):
    sweep(plan(vary=["strategy.server-lr=[0.5]"]), tmp_path / "sweep")
    for other in (plan(), plan(["rounds=1"], vary=["strategy.server-lr=[0.5]"]), plan(seeds=2)):
        with pytest.raises(RunError, match="holds another sweep"):
            sweep(other, tmp_path / "sweep")
    run = run_tiny()
    with pytest.raises(RunError, match="is not empty"):
        sweep(plan(), run.folder)
    with locked(tmp_path / "sweep"), pytest.raises(RunError, match="is in use"):
        sweep(plan(vary=["strategy.server-lr=[0.5]"]), tmp_path / "sweep")


@pytest.mark.parametrize("how", [{"choose": ["hits@5"]}, {"optimise": ["hits@5"], "trials": 2}])
def test_choosing_by_test_users_is_refused(plan, how):
    with pytest.raises(ExperimentError, match="selected on test users"):
        plan(**how)
    plan(VALIDATION, **how)


def test_a_chosen_setting_is_the_best_on_validation_users_and_its_file_ranks_test_users(
    plan, tmp_path
):
    found = sweep(plan(VALIDATION, choose=["ndcg@5"], seeds=2), tmp_path / "sweep")
    means = found.settings["ndcg@5"]
    assert found.chosen == (int(means.idxmax()),)
    file = tmp_path / "sweep" / f"chosen-{found.chosen[0]:04d}.toml"
    result = runner.run(file, output=tmp_path / "test")
    assert result.experiment.evaluation.held_out == "test"
    own = result.experiment.strategy.options["server-lr"]
    assert own == found.settings.loc[found.chosen[0], "strategy.server-lr"]


def test_the_front_of_two_aims():
    """Setting 2 is dominated by 1, setting 4 has no value, setting 5 lacks a run."""
    table = {
        1: (0.30, 2.0, 3),
        2: (0.30, 3.0, 3),
        3: (0.20, 1.0, 3),
        4: (math.nan, 0.1, 3),
        5: (0.9, 0.1, 2),
    }
    columns = ["hits@10", "epsilon", "runs"]
    settings = pd.DataFrame.from_dict(table, orient="index", columns=columns)
    assert _best(settings, ["hits@10", "epsilon"], 3) == [1, 3]
    assert _best(settings, ["epsilon"], 3) == [4]
    assert _best(settings, ["hits@10"], 3)[0] == 1


def test_random_settings_differ_and_more_trials_go_on(plan, tmp_path):
    space = ["strategy.server-lr={low=0.1, high=1.0}"]
    few = sweep(plan(vary=space, trials=1), tmp_path / "sweep")
    more = sweep(plan(vary=space, trials=3), tmp_path / "sweep")
    assert len(few.runs) == 1 and len(more.runs) == 3
    assert more.runs["strategy.server-lr"].nunique() == 3
    assert more.runs["strategy.server-lr"].iloc[0] == few.runs["strategy.server-lr"].iloc[0]
    drawn = []
    while (point := plan(vary=[RATES], trials=5).next_point(drawn, dict)) is not None:
        drawn.append(point)
    assert sorted(point["strategy.server-lr"] for point in drawn) == [0.1, 1.0]


def test_a_setting_that_fails_is_kept_with_its_error_and_the_others_go_on(plan, tmp_path):
    """With eighteen training clients, a cohort of a hundred is refused after the data are read."""
    asked = plan(VALIDATION, vary=["sampler.cohort=[100, 4]"], choose=["hits@5"])
    found = sweep(asked, tmp_path / "sweep")
    assert list(found.runs["state"]) == ["failed", "finished"] and found.chosen == (2,)
    assert "sampler.cohort" in found.failures["0001-seed0"]
    done = (tmp_path / "sweep/runs/0002-seed0/result.json").stat().st_mtime_ns
    again = sweep(asked, tmp_path / "sweep")  # which repeats what failed
    assert again.failures.keys() == {"0001-seed0"} and again.chosen == (2,)
    assert (tmp_path / "sweep/runs/0002-seed0/result.json").stat().st_mtime_ns == done


@pytest.mark.slow
def test_the_privacy_of_all_runs_adds_up(plan, tmp_path):
    """The total equals that of one accountant with the charges of all ledgers."""
    found = sweep(plan([PRIVATE, *VALIDATION], choose=["hits@5"], seeds=2), tmp_path / "sweep")
    together = Accountant("pld")
    for ledger in sorted((tmp_path / "sweep").glob("runs/*/privacy.jsonl")):
        for charge in Ledger(ledger).charges:
            together.step(charge.event)
    one = RunFolder(tmp_path / "sweep" / "runs" / "0001-seed0").read_result().rounds["epsilon"]
    delta = float(re.search(r"at delta (\S+)", found.total[0])[1])
    epsilon = together.epsilon(delta).epsilon
    assert epsilon > one.iloc[-1]
    assert f"The 4 private runs of this sweep cost epsilon {epsilon:.4g} at" in found.total[0]
    assert "validation users" in found.total[-1]


@pytest.mark.slow
def test_a_private_baseline_that_draws_equal_noise_is_one_release(plan, tmp_path):
    """With two rates and one seed, `dp-popularity` is the same in both runs, and is charged
    once."""
    own = 'evaluation.baselines=[{name="dp-popularity", epsilon=1.0}]'
    found = sweep(plan([own]), tmp_path / "sweep")
    two = sweep(plan([own], seeds=2), tmp_path / "two")
    words = [
        re.search(r"The (\d) private runs .* cost epsilon (\S+)", t.total[0]) for t in (found, two)
    ]
    assert [match[1] for match in words] == ["2", "4"]
    assert float(words[0][2]) == pytest.approx(1.0, rel=0.02) and float(words[1][2]) > 1.2


@pytest.mark.slow
def test_optuna_finds_the_better_end(plan, tmp_path):
    """Proposals depend only on the results: an interrupted sweep proposes the same settings."""
    pytest.importorskip("optuna", reason="extra 'tune' is not installed")
    space = ["privacy.noise-multiplier={low=0.5, high=8.0, log=true}"]
    asked = plan(
        [PRIVATE, *VALIDATION, "rounds=1"], vary=space, optimise=["hits@5", "epsilon"], trials=4
    )
    found = sweep(asked, tmp_path / "sweep")
    assert len(found.runs) == 4 and found.chosen
    least = found.settings["epsilon"].idxmin()
    assert least in found.chosen
    noise = found.settings["privacy.noise-multiplier"]
    assert list(noise.sort_values(ascending=False).index) == list(
        found.settings["epsilon"].sort_values().index
    )
    few = plan([PRIVATE, *VALIDATION, "rounds=1"], vary=space, optimise=list(asked.aims), trials=2)
    sweep(few, tmp_path / "few")
    pd.testing.assert_frame_equal(sweep(asked, tmp_path / "few").settings, found.settings)


def test_an_unknown_aim_offers_the_known_ones(plan, tmp_path):
    pytest.importorskip("optuna", reason="extra 'tune' is not installed")
    asked = plan(VALIDATION, optimise=["hits@7"], trials=2)
    with pytest.raises(ExperimentError, match="hits@5"):
        sweep(asked, tmp_path / "sweep")


@pytest.mark.slow
@pytest.mark.ray
def test_ray_finds_the_same_as_one_process(plan, tmp_path):
    serial = sweep(plan(seeds=2), tmp_path / "serial")
    at_once = sweep(plan(seeds=2), tmp_path / "ray", workers=2)
    pd.testing.assert_frame_equal(at_once.settings, serial.settings)


# Search spaces of sweeps: from texts of the command line to points and overrides.


def test_a_grid_is_the_product_of_the_values():
    space = _space_of(["step.epochs=[1, 2]", "strategy.server-lr=[0.1, 0.5, 1.0]"])
    expected = [
        {"step.epochs": epochs, "strategy.server-lr": rate}
        for epochs, rate in itertools.product((1, 2), (0.1, 0.5, 1.0))
    ]
    assert grid(space) == expected


def test_values_come_back_as_they_were_written():
    values = [1, 0.1, 1e-07, "fedavg", True, [5, 10], {"epochs": 2, "learning-rate": 0.5}]
    space = {"key.inner": tuple(values)}
    found = [override({}, text)["key"]["inner"] for p in grid(space) for text in overrides(p)]
    assert found == values
    assert all(type(one) is type(two) for one, two in zip(found, values, strict=True))


def test_points_of_ranges_stay_within_and_are_a_function_of_the_number():
    space = _space_of(["a={low=1, high=3}", "b={low=0.001, high=1.0, log=true}", "c=[[1], [2]]"])
    points = [_drawn(space, 5, number) for number in range(300)]
    assert points == [_drawn(space, 5, number) for number in range(300)]
    assert {point["a"] for point in points} == {1, 2, 3}
    assert all(0.001 <= point["b"] <= 1 for point in points)
    # uniform by order of magnitude: a third of the values lies below each power of ten
    assert 70 < sum(point["b"] < 0.01 for point in points) < 130


# `fedrec sweep` on the command line.


def test_a_sweep_prints_a_table_and_is_resumed_by_its_folder(fedrec, tiny_file, tmp_path):
    folder = tmp_path / "sweep"
    vary = ("--vary", "strategy.server-lr=[0.1, 1.0]")
    code, out, err = fedrec("sweep", tiny_file, *vary, "-o", folder)
    assert code == 0 and "server-lr" in out
    assert "run 2/2" in err and "left" in err
    before = err.partition("run 1/2")[0]
    assert "0/2 runs are done" in before and "round 2/2" in before
    assert out.splitlines()[-1] == str(folder)
    again, second, err = fedrec("resume", folder)
    assert again == 0 and second == out and "run 1/2" not in err
    code, out, _ = fedrec("compare", folder)
    assert code == 0 and "server-lr=0.1" in out and "server-lr=1" in out
    code, out, _ = fedrec("report", folder)
    assert code == 0 and "server-lr=0.1" in (folder / "report.html").read_text("utf-8")


def test_a_dry_run_prints_the_settings_and_runs_nothing(fedrec, tiny_file, tmp_path):
    code, out, _ = fedrec(
        "sweep", tiny_file, "-v", "rounds=[1, 2]", "--seeds", 3, "--dry-run", "-o", tmp_path / "s"
    )
    assert code == 0 and "2 settings (grid), 3 seeds: 6 runs" in out and "rounds=2" in out
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-v", "strategy.server-lrr=[1]"], "did you mean 'server-lr'"),
        (["--seeds", "0"], "1 to 10000"),
        (["--seeds", "1000000000", "--dry-run"], "1 to 10000"),
        (["-v", f"rounds=[{'9' * 5000}]"], "cannot read"),
        (["-v", "[1, 2]"], "cannot read"),
        (["-v", "rounds=[1, "], "KEY=[VALUE"),
        (["-v", "rounds=5"], "single value"),
        (["-v", "rounds=[1, 1]"], "without duplicates"),
        (["-v", "seed=[1, 2]"], "--seeds"),
        (["-v", "evaluation.held-out=['test', 'validation']"], "held-out=validation"),
        (["-v", "rounds={low=5, high=1}", "--trials", "2"], "low < high"),
        (["-v", "rounds={low=0, high=1, log=true}", "--trials", "2"], "0 < low"),
        (["-v", "rounds=[1]", "-v", "rounds=[2]"], "duplicate key"),
        (["-v", "rounds={low=1, high=3}"], "a grid cannot have"),
        ([w for n in range(5) for w in ("-v", f"k{n}={list(range(10))}")], "the grid has 100000"),
        (["--trials", "5"], "no keys to vary"),
        (["-v", "rounds=[1]", "--optimise", "a", "--choose", "b"], "--optimise and --choose"),
    ],
)
def test_bad_input_gives_an_error_with_a_fix(fedrec, tiny_file, tmp_path, arguments, words):
    code, out, err = fedrec("sweep", tiny_file, *arguments, "-o", tmp_path / "sweep")
    assert code == 2 and words in " ".join(err.split()) and "Traceback" not in err + out
    assert not (tmp_path / "sweep").exists()


# Private choices of a setting: what they charge is what one user can change, all trials have one
# split, and what is published tells neither the number of the trial nor the cost of one.

PRIVATE_RUNS = [*VALIDATION, "rounds=2", PRIVATE, "privacy.delta=1e-5"]


def privately(plan, fixed=PRIVATE_RUNS, aim="hits@5", **more):
    return plan(fixed, choose=[aim], private="geometric", trials=3, **more)


def test_a_private_choice_costs_what_dp_accounting_says_before_anything_runs(plan):
    """All clients in each of 2 rounds: Gaussian noise of multiplier 1, of which the best of a
    geometric number of trials is published."""
    event = pytest.importorskip("dp_accounting.dp_event")
    rdp = pytest.importorskip("dp_accounting.rdp")
    everybody = [*PRIVATE_RUNS, "sampler={name='full'}"]
    found = privately(plan, everybody).cost
    accountant = rdp.RdpAccountant(list(range(2, 65)))
    rounds = event.SelfComposedDpEvent(event.GaussianDpEvent(1.0), 2)
    accountant.compose(event.RepeatAndSelectDpEvent(rounds, 3, 1.0))
    assert found.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)
    noisier = privately(plan, everybody, vary=["privacy.noise-multiplier=[1.0, 3.0]"]).cost
    assert noisier.epsilon == found.epsilon  # the costliest setting counts
    assert "no epsilon covers them" in " ".join(found.lines())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reproducible", "secure"])
def test_the_best_of_all_trials_is_published_without_its_number(plan, fedrec, tmp_path, mode):
    """All trials have one split, and seeds that do not follow from their numbers."""
    asked = privately(plan, [*PRIVATE_RUNS, f"privacy.mode={mode}"])
    found = sweep(asked, tmp_path / "private")
    assert len(found.runs) == asked.trials
    (chosen,) = found.chosen
    assert found.settings.loc[chosen, "hits@5"] == found.settings["hits@5"].max()
    runs = [RunFolder(found.folder / folder) for folder in found.runs["folder"]]
    parts = [Population.of(run.experiment).partition for run in runs]
    for part in parts:
        np.testing.assert_array_equal(part.training_clients, parts[0].training_clients)
        np.testing.assert_array_equal(part.validation_rows, parts[0].validation_rows)
    seeds = list(found.runs["seed"])
    assert len(set(seeds)) == len(seeds) and min(seeds) > 2**20
    repeated = privately(plan, [*PRIVATE_RUNS, f"privacy.mode={mode}"]).seeds
    assert (repeated == asked.seeds) == (mode == "reproducible")

    published = Result.load(found.folder / "chosen")
    best = Result.load(runs[chosen - 1].path)
    for name, value in best.parameters.items():
        np.testing.assert_array_equal(published.parameters[name], value)
    assert published.experiment == best.experiment and published.metrics.keys() == {"hits@5"}
    files = {str(file.relative_to(published.folder)) for file in published.folder.rglob("*")}
    assert files == PUBLISHED
    about = json.loads((published.folder / "run.json").read_text())
    assert about.keys() == {"format", "fedrec", "experiment-sha256"}
    for file in published.folder.rglob("*.*"):
        assert best.folder.name.encode() not in file.read_bytes()
    assert found.folder.stat().st_mode & 0o777 == 0o700
    assert with_sweeps([found.folder]) == [found.folder / "chosen"]

    before = (published.folder / "run.json").read_bytes()
    again = privately(plan, [*PRIVATE_RUNS, f"privacy.mode={mode}"])
    assert sweep(again, found.folder).plan == asked  # the number of trials is drawn once
    assert (published.folder / "run.json").read_bytes() == before
    shutil.rmtree(runs[0].path)
    assert sweep(again, found.folder).runs["state"][0] == "waiting"  # one choice is made
    assert (published.folder / "run.json").read_bytes() == before


PUBLISHED = {
    *("experiment.toml", "run.json", "environment.json", "status.json", "result.json"),
    *("rounds.csv", "users.csv", "groups.csv"),
    *("checkpoints", "checkpoints/round-000002.npz"),
}


@pytest.mark.slow
def test_the_cost_of_the_choice_stands_wherever_the_chosen_run_is_shown(plan, fedrec, tmp_path):
    asked = privately(plan)
    costs = asked.cost
    once = SweepFolder(sweep(asked, tmp_path / "private").folder)
    alone = [run for job in once.jobs() if (run := job.run()) is not None]
    spent = f"{alone[0].summary()['privacy']['epsilon']:.4g}"
    kept = RunFolder(tmp_path / "private" / "chosen")
    assert kept.summary()["privacy"]["epsilon"] == costs.epsilon > 1.2 * float(spent)
    page = report([kept.read_result()])
    code, printed, _ = fedrec("resume", tmp_path / "private")
    assert not code and str(kept.path) in printed and "-seed" not in printed
    for text in (page, printed):
        assert f"{costs.epsilon:.4g}" in text and spent not in text.replace(f"{costs.once:.4g}", "")
        assert not re.search(r"000\d-seed|setting \d", text)
    file = tmp_path / "page.html"
    assert not fedrec("report", tmp_path / "private", "--output", file)[0]
    assert f"{costs.epsilon:.4g} at delta" in file.read_text()
    assert f"{kept.summary()['metrics']['hits@5']:.4f}" in page
    (together,) = shown_together([kept.path, alone[0].path])
    assert "no total epsilon: one is the result of a private choice" in together


def test_equally_good_trials_publish_one_model(plan, tmp_path):
    """All items are within the list, so that all scores are 1."""
    asked = privately(plan, [*PRIVATE_RUNS, "rounds=1", "evaluation.ks=[5, 30]"], aim="hits@30")
    found = sweep(asked, tmp_path / "private")
    assert asked.trials > 1 and set(found.settings["hits@30"]) == {1.0}
    assert len(found.chosen) == 1


OTHER_DATA = (
    *("split.validation-users=[0.25, 0.5]", "positive-above=[2.0, 3.0]", "dataset.users=[24, 25]"),
    *("evaluation.final-users=[2, 3]", "split-seed=[0, 1]"),
)
NOISELESS = "privacy={clip-norm=1.0, noise-multiplier=0.0, delta=1e-5}"


@pytest.mark.parametrize(
    ("changes", "more", "words"),
    [
        *(([], {"vary": [varied]}, r"have different data \(") for varied in OTHER_DATA),
        ([NOISELESS], {}, r"(?s)made private.*a table \[privacy\] with noise"),
        (["privacy.placement=local"], {}, "(?s)made private.*'central' or 'distributed'"),
        (
            ["split={name='leave-one-out', validation=true}"],
            {},
            "(?s)made private.*validation users who do not train",
        ),
        ([], {"aim": "popularity@5"}, "not of training users"),
        ([], {"seeds": 2}, "one run per trial"),
        ([], {"vary": ["strategy.server-lr={low=0.1, high=1.0}"]}, "range"),
    ],
)
def test_settings_without_a_bound_are_not_chosen_privately(plan, changes, more, words):
    with pytest.raises(ExperimentError, match=words):
        _ = privately(plan, [*PRIVATE_RUNS, *changes], **more).cost
