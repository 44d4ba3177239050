# SPDX-License-Identifier: Apache-2.0
"""The studies of the benchmarks: settings exist, and are compared on validation rows."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from benchmarks.never_drawn import beside
from benchmarks.study_curves import panels
from benchmarks.upc_sdg import told
from fedrec.evaluation.central import make_baseline
from fedrec.experiment.loading import load
from simulations.reproduce.measures.baselines import alone
from simulations.study.declaration import declared
from simulations.study.study import Task, TaskJob

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
