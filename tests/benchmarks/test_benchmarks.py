# SPDX-License-Identifier: Apache-2.0
"""Benchmarks run on small sizes, and their declared studies hold."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import experiments, gpu_check
from benchmarks.contestants.shipped import apart
from benchmarks.experiments import COLUMNS, difference, steps_of
from benchmarks.experiments import table as table_of_steps
from benchmarks.gpu_check import ROOT, Budget, step_row
from benchmarks.measures import beside_no_model, perturbed
from benchmarks.processes import GpuWatch
from benchmarks.simulation import figures, summary
from fedrec.evaluation.central import make_baseline
from fedrec.experiment.schema import load
from simulations.reproduce.measures import alone
from simulations.studies.declaration import Task, TaskJob, declared

# Two paths of training have the same sums. The table of both goes on where it was interrupted.


PATHS = [
    ("linear-synthetic", ["counts", "gram"], 1e-12),
    ("privrec-synthetic", ["sgd"], 1e-4),
    pytest.param("privrec-ml1m", ["sgd"], 1e-4, marks=[pytest.mark.slow, pytest.mark.real_data]),
    pytest.param("mf-ml1m", ["sgd"], 1e-4, marks=[pytest.mark.slow, pytest.mark.real_data]),
]


@pytest.mark.parametrize(("name", "steps", "most"), PATHS)
def test_both_paths_have_the_same_sums(name, steps, most):
    assert sorted(steps_of(name)) == steps
    assert max(difference(name, step) for step in steps) < most


STEPS = ("sgd", "contrastive")
PRINTED = {
    "auto": {"users": 40, "seconds": [2.0], "path": "kernel", "peak_mib": 500.0},
    "reference": {"users": 20, "seconds": [4.0]},
}
NAME = "privrec-two-stage-synthetic"


class FakeMeasurements:
    """Contestants and commands that are not started, and which were."""

    def __init__(self):
        self.started = []
        self.fails = False

    def measured(self, name, step, path, *others):
        self.started.append((path, step))
        return PRINTED[path]

    def command(self, name):
        if self.fails:
            raise KeyboardInterrupt
        self.started.append(("command", name))
        return {"seconds": 14.0}


@pytest.fixture
def contestants(monkeypatch):
    fake = FakeMeasurements()
    monkeypatch.setattr(experiments, "measured", fake.measured)
    monkeypatch.setattr(experiments, "command", fake.command)
    monkeypatch.setattr(experiments, "difference", lambda name, step: 1e-7)
    monkeypatch.setattr(experiments, "steps_of", lambda name: STEPS)
    return fake


def cells(printed):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines()]


def test_the_first_line_of_an_experiment_has_the_time_of_its_command(contestants, capsys):
    table_of_steps([NAME], list(COLUMNS), 1, None)
    head, rule, first, second = cells(capsys.readouterr().out)
    assert len(head) == len(rule) == len(first) == len(second)
    row = dict(zip(head, first, strict=True))
    assert row["experiment, step"] == f"{NAME}, sgd"
    assert (row["users/s"], row["loop"], row["ratio"]) == ("20", "5", "4.0")
    assert row["command, s"] == "14.0"
    assert second == [f"{NAME}, contrastive", *first[1:8], ""]


def test_an_interrupted_table_is_continued(contestants, capsys, tmp_path):
    file = tmp_path / "rows.json"
    contestants.fails = True
    with pytest.raises(KeyboardInterrupt):
        table_of_steps([NAME], list(COLUMNS), 1, file)
    assert contestants.started == [("auto", "sgd"), ("reference", "sgd")]
    contestants.started.clear()
    contestants.fails = False
    table_of_steps([NAME], list(COLUMNS), 1, file)
    rest = [("command", NAME), ("auto", "contrastive"), ("reference", "contrastive")]
    assert contestants.started == rest
    whole = capsys.readouterr().out.splitlines()[-4:]
    contestants.started.clear()
    table_of_steps([NAME], list(COLUMNS), 1, file)
    assert not contestants.started and capsys.readouterr().out.splitlines() == whole


def test_columns_that_are_left_out_are_not_measured(contestants, capsys, monkeypatch):
    call = ["experiments.py", "--only", NAME, "--without"]
    monkeypatch.setattr("sys.argv", [*call, "speeds"])
    experiments.main()
    assert contestants.started == [("command", NAME)]
    assert cells(capsys.readouterr().out)[0] == ["experiment, step", "command, s"]
    contestants.started.clear()
    monkeypatch.setattr("sys.argv", [*call, "command"])
    experiments.main()
    assert {path for path, _ in contestants.started} == {"auto", "reference"}
    assert "command" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_whole_command_takes_processor_time():
    assert experiments.command("linear-synthetic")["seconds"] > 0.5


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
    job = TaskJob(tmp_path / "job", table["seed"], False, Task("half", 1, perturbed))
    found = {one.metric: one.value for one in perturbed(job, table, "data", {"hits@5": "Hits"})}
    for mask in ("both", "learned"):
        result = run_tiny(*shared, f"evaluation.masked='{mask}'", output=tmp_path / mask)
        assert found[f"ease {mask} Hits"] == result.baselines["ease"]["hits@5"]
    assert found["ease on devices real Hits"] != found["ease both Hits"]
    assert 0 < found["kept"] < 1 and found["similarity rows"] > 0 and "recovered top-10" in found


def test_the_list_without_a_model_stands_beside_a_run(tmp_path, load_tiny):
    table = load_tiny("evaluation.baselines=[]").table()
    job = TaskJob(tmp_path / "job", table["seed"], False, Task("peer", 1, beside_no_model))
    found = list(beside_no_model(job, table, "data", "peer", {"hits@5": "Hits"}))
    assert [one.model for one in found] == ["peer", "no model, draws of peer"]
    assert all(0 <= one.value <= 1 for one in found)
