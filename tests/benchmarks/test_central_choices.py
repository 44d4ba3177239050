# SPDX-License-Identifier: Apache-2.0
"""The studies of centralised systems: settings exist, and are compared on validation rows."""

from pathlib import Path

import pytest

from fedrec.components.registry import BASELINE, resolve
from fedrec.experiment.loading import load
from simulations.reproduce.measures.baselines import alone
from simulations.study.declaration import declared
from simulations.study.study import Task, TaskJob

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize(
    "study", list(declared(FOLDER / "central-choices.toml")), ids=lambda study: study.item
)
def test_a_setting_of_a_grid_exists_and_no_test_row_is_looked_at(study):
    for task in study.tasks:
        job = TaskJob(Path(), 0, False, task)
        experiment = job.experiment(task.options["experiment"], task.options["set"])
        assert experiment.evaluation.held_out == "validation"
        ((label, settings),) = experiment.evaluation.baseline_settings().items()
        assert resolve(BASELINE, label).Config.parse(settings)
        assert task.options["rows"].keys() == {label}


def test_every_system_of_an_experiment_is_a_task():
    for study in declared(FOLDER / "central.toml"):
        known = load(study.tasks[0].options["experiment"]).evaluation.baseline_settings()
        assert [task.options["label"] for task in study.tasks] == list(known)


def test_a_system_alone_has_the_numbers_that_it_has_beside_others(tmp_path, run_tiny, load_tiny):
    both = "evaluation.baselines=['popularity', {name='ease', regularisation=3.0}]"
    table = load_tiny(both).table()
    job = TaskJob(tmp_path / "job", table["seed"], False, Task("ease", 1, alone))
    metrics = {"hits@5": "Hits@5"}
    found = {one.metric: one.value for one in alone(job, table, "ease", "data", metrics)}
    assert found["Hits@5"] == run_tiny(both).baselines["ease"]["hits@5"]
    assert found["CPU s"] >= 0
