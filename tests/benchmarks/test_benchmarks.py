# SPDX-License-Identifier: Apache-2.0
"""Benchmarks run on small sizes, and their declared studies hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks import experiments, gpu_check, kernel_limit, kernel_versions
from benchmarks.contestants.command_parts import PARTS
from benchmarks.experiments import COLUMNS, difference, lines_of, steps_of
from benchmarks.experiments import table as table_of_steps
from benchmarks.gpu_check import ROOT, Budget, apart, step_row
from benchmarks.never_drawn import beside
from benchmarks.ranking import SYSTEMS, measured
from benchmarks.simulation import figures, summary
from benchmarks.study_curves import panels
from benchmarks.upc_sdg import told
from benchmarks.watch import GpuWatch
from fedrec.evaluation.central import make_baseline
from fedrec.experiment.loading import load
from fedrec.training import kernel
from simulations.reproduce.measures import alone
from simulations.studies.declaration import Task, TaskJob, declared

# The plain PyTorch loop gives the same updates as the shipped experiments: an independent oracle
# for the kernel. The table of both goes on where it was interrupted.


def test_the_loop_and_the_kernel_take_the_same_steps():
    assert list(steps_of("privrec-synthetic")) == ["sgd"]
    assert difference("privrec-synthetic", "sgd") < 1e-4


@pytest.mark.parametrize("step", ["counts", "gram"])
def test_the_loop_adds_up_the_same_counts_and_products(step):
    assert sorted(steps_of("linear-synthetic")) == ["counts", "gram"]
    assert difference("linear-synthetic", step) < 1e-12


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize("name", ["privrec-ml1m", "mf-ml1m"])
def test_they_do_on_movielens(name):
    assert difference(name, "sgd") < 1e-4


STEPS = dict.fromkeys(("sgd", "contrastive"), SimpleNamespace(generated=False))
PRINTED = {
    "shipped": {"users": 40, "seconds": [2.0], "path": "kernel", "peak_mib": 500.0},
    "shipped_loop": {"users": 20, "seconds": [4.0]},
    "command_parts": dict.fromkeys(PARTS, 2.0),
}


class FakeMeasurements:
    """Contestants that are not started, and which were."""

    def __init__(self):
        self.started = []
        self.fails = ""

    def measured(self, module, *arguments, **environment):
        if module == self.fails:
            raise KeyboardInterrupt
        self.started.append((module, *arguments[:2]))
        return PRINTED[module]


@pytest.fixture
def contestants(monkeypatch):
    fake = FakeMeasurements()
    monkeypatch.setattr(experiments, "measured", fake.measured)
    monkeypatch.setattr(experiments, "difference", lambda name, step: 1e-7)
    monkeypatch.setattr(experiments, "steps_of", lambda name: STEPS)
    return fake


def cells(printed):
    return [[own.strip() for own in line.split("|")[1:-1]] for line in printed.splitlines()]


def test_the_first_line_of_an_experiment_has_the_parts_of_its_command(contestants, capsys):
    table_of_steps(["privrec-two-stage-synthetic"], list(COLUMNS), 1, None)
    head, rule, first, second = cells(capsys.readouterr().out)
    assert len(head) == len(rule) == len(first) == len(second)
    found = dict(zip(head, first, strict=True))
    assert found["experiment, step"] == "privrec-two-stage-synthetic, sgd"
    assert (found["users/s"], found["plain loop"], found["ratio"]) == ("20", "5", "4.0")
    assert found["processor s of the command"] == "14.0" and found["imports"] == "2.0"
    assert second[0] == "privrec-two-stage-synthetic, contrastive"
    assert second[1:8] == first[1:8]
    assert second[8:] == [""] * (1 + len(PARTS))


def test_an_interrupted_table_goes_on(contestants, capsys, tmp_path):
    kept = tmp_path / "rows.json"
    contestants.fails = "command_parts"
    with pytest.raises(KeyboardInterrupt):
        table_of_steps(["privrec-two-stage-synthetic"], list(COLUMNS), 1, kept)
    own = [
        ("shipped", "privrec-two-stage-synthetic"),
        ("shipped_loop", "privrec-two-stage-synthetic"),
    ]
    assert contestants.started == [(*one, "sgd") for one in own]
    contestants.started.clear()
    contestants.fails = ""
    table_of_steps(["privrec-two-stage-synthetic"], list(COLUMNS), 1, kept)
    assert contestants.started[0] == ("command_parts", "privrec-two-stage-synthetic")
    assert contestants.started[1:] == [(*one, "contrastive") for one in own]
    whole = capsys.readouterr().out.splitlines()[-4:]
    contestants.started.clear()
    table_of_steps(["privrec-two-stage-synthetic"], list(COLUMNS), 1, kept)
    assert not contestants.started and capsys.readouterr().out.splitlines() == whole


def test_columns_that_are_left_out_are_not_measured(contestants, capsys, monkeypatch):
    command = ["experiments.py", "--only", "privrec-two-stage-synthetic", "--without"]
    monkeypatch.setattr("sys.argv", [*command, "speeds"])
    experiments.main()
    assert contestants.started == [("command_parts", "privrec-two-stage-synthetic")]
    assert cells(capsys.readouterr().out)[0] == [
        "experiment, step",
        "processor s of the command",
        *PARTS,
    ]
    contestants.started.clear()
    monkeypatch.setattr("sys.argv", [*command, "parts"])
    experiments.main()
    assert {module for module, *_ in contestants.started} == {"shipped", "shipped_loop"}
    assert "imports" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize("name", ["fedgnn-ml100k", "gpfedrec-ml100k", "metamf-ml1m"])
def test_clients_with_generated_parameters_are_timed_in_whole_runs(name, monkeypatch):
    started = []

    def measured(module, *arguments):
        started.append((module, *arguments))
        return {"users_per_second": [8.0], "evaluation": 1.0, "peak_mib": 500.0}

    monkeypatch.setattr(experiments, "measured", measured)
    lines = lines_of(name, 1)
    assert list(lines) == [name]
    assert lines[name]["speeds"]()["path"] in ("blocks", "kernel")
    assert [one[:3] for one in started] == [
        ("shipped_run", name, "reference"),
        ("shipped_run", name, "auto"),
    ]


@pytest.mark.parametrize("text", ['{"privrec": ', "[1]", '{"privrec": 3}', None])
def test_a_file_without_measurements_is_refused(tmp_path, text):
    kept = tmp_path / "rows.json"
    if text is None:
        kept.mkdir()
    else:
        kept.write_text(text)
    with pytest.raises(SystemExit, match=r"rows\.json has no measurements(.|\n)*fix: give another"):
        table_of_steps([], list(COLUMNS), 1, kept)


# The check of a GPU runs without one.


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_row_says_what_differs_and_what_waits():
    row = step_row("linear-synthetic", "counts")
    assert row["difference"] == 0 and "users_per_second" not in row
    assert any(place.startswith("clients/sums.py:") for place in row["waits"])


def test_what_there_is_no_time_for_is_noted():
    budget = Budget(100.0)
    budget.begun -= 80
    assert not budget.allows("steps", "mf") and budget.allows("cohorts", "64 users")
    assert budget.left_out == ["steps: mf"]


def test_a_step_that_fails_does_not_end_the_check(monkeypatch):
    def fails(name, step):
        raise ValueError("no")

    monkeypatch.setattr(gpu_check, "step_row", fails)
    rows = gpu_check.steps(Budget(600.0))
    assert rows["mf-ml1m, sgd"] == {"failed": "ValueError: no"}


def test_apart_is_relative():
    ours = {"a": torch.tensor([3.0, 4.5]).numpy()}
    assert apart(ours, {"a": torch.tensor([3.0, 4.0]).numpy()}) == pytest.approx(0.1)


@pytest.mark.slow
def test_the_command_writes_one_file(tmp_path):
    file = tmp_path / "check.json"
    command = [sys.executable, "benchmarks/gpu_check.py", "--minutes", "0.02", "--output", file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    report = json.loads(file.read_text())
    assert set(report) == {"machine", "tests", "steps", "cohorts", "loop", "left_out", "seconds"}
    assert "tests: stopped" in report["left_out"] and done.returncode == 1


# The comparison of compiled training with the processor's limit runs, and counts operations.


def test_a_product_of_matrices_has_two_operations_a_number():
    assert kernel_limit.operations(("forward", 3, 4, 5)) == 2 * 3 * 4 * 5


@pytest.mark.slow
def test_it_prints_products_and_times(capsys, monkeypatch):
    monkeypatch.setattr(kernel, "train_clients", kernel.train_clients)  # put back at the end
    kernel_limit.main("privrec-synthetic", "sgd", "2")
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[0] == "forward" for line in lines)
    times = {line.rsplit(maxsplit=4)[0].strip(): float(line.split()[-4]) for line in lines[-4:]}
    assert times["everything"] >= times["compiled training"] > 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("privrec-synthetic", "other"), "expected a step of privrec-synthetic: sgd; got 'other'"),
        (("privrec-synthetic", "sgd", "x"), "expected a number of users, got 'x'"),
        (("privrec-synthetic", "sgd", "0"), "expected a number of users, got '0'"),
    ],
)
def test_what_cannot_be_measured_is_refused(given, said):
    with pytest.raises(SystemExit, match=said):
        kernel_limit.main(*given)


# Compiled training of several checkouts in turns.

HERE = Path(__file__).resolve().parents[2]


class Pair(NamedTuple):
    numbers: np.ndarray
    count: int


def test_copies_of_arguments_are_of_the_same_types_and_other_memory():
    given = Pair(np.arange(6.0).reshape(2, 3), 4), (np.zeros(0, np.int64), "word")
    pair, (empty, word) = kernel_versions.copied(given)
    assert isinstance(pair, Pair) and pair.count == 4 and word == "word"
    np.testing.assert_array_equal(pair.numbers, given[0].numbers)
    assert pair.numbers.flags.c_contiguous and empty.dtype == np.int64
    pair.numbers[:] = 0
    assert given[0].numbers[1, 2] == 5


def test_a_folder_without_the_source_is_an_error(tmp_path, capfd):
    version = kernel_versions.Version(tmp_path)
    with pytest.raises(RuntimeError, match=f"version in {tmp_path} ended"):
        version.milliseconds()
    version.close()
    assert "benchmarks" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_it_prints_a_row_for_each_version(capsys):
    kernel_versions.main([str(HERE), str(HERE), "--repeats", "2"])
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["ms", "a", "user", "least", "median", "to", "the", "first"]
    assert [row.split()[0] for row in rows] == [str(HERE)] * 2
    assert all(0 < float(row.split()[1]) <= float(row.split()[2]) for row in rows)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["nowhere"], "expected checkouts of fedrec, got nowhere"),
        ([str(HERE), "--repeats", "0"], "expected --repeats of 1 or more, got 0"),
        ([], "the following arguments are required: checkouts"),
    ],
)
def test_bad_arguments_are_refused(capsys, given, said):
    with pytest.raises(SystemExit) as error:
        kernel_versions.main(given)
    assert error.value.code == 2 and said in capsys.readouterr().err


# The benchmark of long catalogues evaluates the users that it says.


@pytest.mark.parametrize("system", SYSTEMS)
def test_users_are_evaluated(system):
    users, seconds = measured(system, 5000, 20)
    assert users == 20 and seconds > 0


# The benchmark's arithmetic: medians, ratios, equal results.


class Watched:
    """A watch with round figures."""

    def cpu_seconds(self, begin, end):
        return 2 * (end - begin)


def runs(*speeds, total=100.0):
    return [
        {"users_per_second": s, "users_per_cpu_second": s / 2, "squared_sum": total} for s in speeds
    ]


def test_speeds_are_of_the_median_round_and_of_the_cpu_time_of_all_counted_rounds():
    found = figures([(0.0, 1.0), (1.0, 3.0), (3.0, 8.0)], 20, Watched(), GpuWatch("cpu"))
    assert found == {"users_per_second": 10.0, "users_per_cpu_second": 60 / 16}


def test_medians_over_repeats_and_the_memory_of_its_own_run():
    found = summary(
        {"a": runs(1.0, 9.0, 2.0), "b": runs(3.0)}, {"a": 1.0, "b": 1.0}, {"a": 90, "b": 30}
    )
    assert found["users_per_second"] == {"a": 2.0, "b": 3.0}
    assert found["users_per_cpu_second"] == {"a": 1.0, "b": 1.5}
    assert found["peak_mib"] == {"a": 90, "b": 30}


@pytest.mark.parametrize(
    ("total", "change", "equal"),
    [(100.005, 1.001, True), (100.02, 1.0, False), (100.0, 1.01, False)],
)
def test_results_are_equal_when_sums_and_changes_are(total, change, equal):
    found = summary(
        {"a": runs(1.0), "b": runs(1.0, total=total)}, {"a": 1.0, "b": change}, {"a": 1, "b": 1}
    )
    assert found["equal_results"] is equal


def test_how_busy_a_gpu_was_is_the_median_over_the_repeats():
    shared = [
        {**run, "gpu_busy": busy} for run, busy in zip(runs(1, 1, 1), (0.2, 0.9, 0.5), strict=True)
    ]
    found = summary({"a": shared}, {"a": 1}, {})
    assert found["gpu_busy"] == {"a": 0.5}
    assert "gpu_busy" not in summary({"a": runs(1.0)}, {"a": 1.0}, {})


# The products that are timed beside each other give the same numbers.

SIZES = (32, 128, 64)


# The studies of the benchmarks: settings exist, and are compared on validation rows.

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


STUDIES = [study for file in sorted(FOLDER.glob("*.toml")) for study in declared(file)]


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_every_task_can_be_run(study):
    """Its measure takes its keys, its settings exist, and names of tasks, which are folders, are
    unique. Where settings are compared no test row is looked at."""
    assert len({task.name for task in study.tasks}) == len(study.tasks)
    for task in study.tasks:
        given = task.resolved().keywords
        if "experiment" not in given:
            continue
        job = TaskJob(Path(), study.first_seed, False, task)
        experiment = job.experiment(given["experiment"], given.get("set", ()))
        settings = experiment.evaluation.baseline_settings()
        for label, options in settings.items():
            make_baseline(label, options)
        assert set(given.get("rows", ())) <= {"", *settings}
        if study.best:
            assert experiment.evaluation.held_out == "validation"


def test_tasks_are_systems_of_their_experiment_in_its_order():
    for study in declared(FOLDER / "central.toml"):
        experiment = study.tasks[0].options["experiment"]
        if not isinstance(experiment, str):
            continue  # the study's own, whose tasks name their systems
        labels = [task.options["label"] for task in study.tasks]
        known = load(experiment).evaluation.baseline_settings()
        assert labels == [label for label in known if label in labels]


def test_a_system_alone_has_the_numbers_that_it_has_beside_others(tmp_path, run_tiny, load_tiny):
    both = "evaluation.baselines=['popularity', {name='ease', regularisation=3.0}]"
    table = load_tiny(both).table()
    job = TaskJob(tmp_path / "job", table["seed"], False, Task("ease", 1, alone))
    metrics = {"hits@5": "Hits@5"}
    found = {one.metric: one.value for one in alone(job, table, "ease", "data", metrics)}
    assert found["Hits@5"] == run_tiny(both).baselines["ease"]["hits@5"]
    assert found["CPU s"] >= 0


def test_perturbed_rows_are_measured_as_baselines_of_a_run_and_on_devices(
    tmp_path, run_tiny, load_tiny
):
    """EASE that learned from perturbed rows has the metrics that a run reports, with both masks,
    and others for real rows."""
    perturb = "perturb={name='random-replacement', replacement-ratio=0.5}"
    shared = (perturb, "evaluation.baselines=['ease']", "evaluation.ks=[5]")
    table = load_tiny(*shared).table()
    job = TaskJob(tmp_path / "job", table["seed"], False, Task("half", 1, told))
    found = {one.metric: one.value for one in told(job, table, "data", {"hits@5": "Hits"})}
    for mask in ("both", "learned"):
        result = run_tiny(*shared, f"evaluation.masked='{mask}'", output=tmp_path / mask)
        assert found[f"ease {mask} Hits"] == result.baselines["ease"]["hits@5"]
    assert found["ease on devices real Hits"] != found["ease both Hits"]
    assert 0 < found["kept"] < 1 and found["similarity rows"] > 0 and "recovered top-10" in found


def test_the_list_without_a_model_stands_beside_a_run(tmp_path, load_tiny):
    table = load_tiny("evaluation.baselines=[]").table()
    job = TaskJob(tmp_path / "job", table["seed"], False, Task("peer", 1, beside))
    found = list(beside(job, table, "data", "peer", {"hits@5": "Hits"}))
    assert [one.model for one in found] == ["peer", "no model, draws of peer"]
    assert all(0 <= one.value <= 1 for one in found)


def test_curves_have_the_points_of_a_table():
    rows = [("one, epsilon 2", "RMSE", 1.0), ("one, epsilon 1", "RMSE", 3.0), ("flat", "RMSE", 2.0)]
    rows += [("m k=0.2 gamma=1", "linked", 0.5), ("m k=0.2 gamma=1", "Recall", 0.1)]
    table = pd.DataFrame(rows, columns=["model", "metric", "ours"])
    (panel,) = panels(table[:3], r"(?P<name>.*), epsilon (?P<x>\S+)", logarithmic=True)
    assert panel.lines == {"one": [(2.0, 1.0), (1.0, 3.0)]} and panel.levels == {"flat": 2.0}
    pattern = r"(?P<name>\w+) (?P<label>\w+=\S+)(?P<more> .*)?"
    (panel,) = panels(table[3:], pattern, against="linked")
    assert panel.lines == {"m gamma=1": [(0.5, 0.1, "k=0.2")]} and panel.across == "linked"
