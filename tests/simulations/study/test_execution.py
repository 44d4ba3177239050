# SPDX-License-Identifier: Apache-2.0
"""Studies do what is left, repeat what failed, and take no other run for theirs."""

import json
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from fedrec.errors import ClientError, ExperimentError, RunError
from simulations.study.execution import folder_of, run_study, selected
from simulations.study.runs import finished
from simulations.study.study import Found, Study, Task, TaskJob
from simulations.study.tables import duration


def counting(calls, fail_at=None, error=KeyboardInterrupt):
    """A measure that notes its calls, and fails in one of them."""

    def work(job):
        if len(calls) == fail_at:
            raise error
        calls.append(job.name)
        return [Found("data", "model", "metric", float(job.seed))]

    return work


def study_of(*tasks):
    return Study("mine", "figure9", "A made-up one", (), tasks)


def run(path, study, seeds=1, **more):
    folder = folder_of(study, path, quick=False)
    jobs = study.jobs(folder.path, seeds, quick=False)
    return run_study(folder, jobs, **more), jobs


def test_a_study_that_was_broken_off_does_only_what_is_left(tmp_path):
    calls = []
    study = study_of(
        *(Task(name, 1.0, counting(calls)) for name in ("a", "b")),
        Task("fixed", 1.0, counting(calls), seeded=False),
    )
    broken = replace(
        study, tasks=tuple(replace(t, measure=counting(calls, fail_at=3)) for t in study.tasks)
    )
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, broken, 2)
    assert len(calls) == 3
    failures, jobs = run(tmp_path, study, 2)
    assert sorted(calls) == ["a-seed0", "a-seed1", "b-seed0", "b-seed1", "fixed-seed0"]
    assert not failures and all(job.found() for job in jobs)
    with pytest.raises(RunError, match="is not the folder of this study"):
        folder_of(study, tmp_path, quick=True)


def test_a_task_that_fails_is_named_and_done_again(tmp_path):
    calls = []
    study = study_of(
        Task("a", 1.0, counting(calls, fail_at=0, error=ClientError("it diverged"))),
        Task("b", 1.0, counting(calls)),
    )
    failures, _ = run(tmp_path, study)
    assert failures.keys() == {"a-seed0"} and "diverged" in failures["a-seed0"]
    failures, _ = run(tmp_path, study)
    assert not failures and calls == ["b-seed0", "a-seed0"]


def test_a_job_can_be_sent_to_another_process(tmp_path, tiny_experiment):
    options = {"experiment": tiny_experiment(), "dataset": "data", "row": "model"}
    options["metrics"] = {"hits@5": "Hits@5"}
    task = Task("one", 1.0, "simulations.study.runs:measure", options)
    job = pickle.loads(pickle.dumps(TaskJob(tmp_path / "one-seed0", 0, False, task)))
    assert job.attempt([]) is None and job.found()[0][0].cell == ("data", "model", "Hits@5")


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError) as refused:
        run(tmp_path / "file", study_of(Task("a", 1.0, counting([]))))
    assert refused.value.got == "a file" and (tmp_path / "file").read_text() == "mine"


def test_damaged_results_are_named(tmp_path):
    study = study_of(Task("a", 1.0, counting([])))
    _, (job,) = run(tmp_path, study)
    (job.folder / "found.json").write_text("{")
    with pytest.raises(RunError, match=r"found\.json is damaged"):
        run(tmp_path, study)


def test_the_time_is_printed_before_the_work(tmp_path):
    said = []
    run(tmp_path, study_of(Task("a", 3600.0, counting([]))), 4, say=said.append)
    assert "0 of 4 tasks are done" in said[0] and "4.0 h" in said[0]
    assert duration(30) == "30 s" and duration(600) == "10 min"


@pytest.mark.parametrize(
    ("only", "names"), [("one", ["one"]), ("one*", ["one", "one more"]), ("", ["one", "one more"])]
)
def test_tasks_are_selected_by_name_or_pattern(tmp_path, only, names):
    study = study_of(*(Task(name, 1, counting([])) for name in ("one", "one more")))
    jobs = study.jobs(tmp_path, 1, quick=False)
    assert [job.task.name for job in selected(jobs, only)] == names
    for unknown in ("nothing", "on"):
        with pytest.raises(ExperimentError, match="no task") as error:
            selected(jobs, unknown)
        assert "one, one more" in error.value.text()
    with pytest.raises(ExperimentError, match="nothing to run"):
        selected([], only)


def test_a_run_of_other_settings_is_not_taken_for_the_studys(tmp_path, tiny_experiment):
    """For example of an earlier version, whose numbers would be taken for those of this one."""
    job = TaskJob(tmp_path, 0, False, Task("a", 1, counting([])))
    finished(job, tiny_experiment(), ())
    assert finished(job, tiny_experiment(), ()).metrics
    with pytest.raises(RunError, match="other settings"):
        finished(job, tiny_experiment(), ("strategy.server-lr=0.5",))


KILLED = '''
"""A study that is killed in the fourth round of its run if KILL is set."""

import os, signal, sys
from pathlib import Path

from server.callbacks.base import Callback
from simulations.study.execution import folder_of, run_study
from simulations.study.study import Study, Task


class Killing(Callback):
    def after_round(self, row, seconds):
        with open(os.environ["TOLD"], "a") as file:
            file.write(f"{row['round']}\\n")
        if os.environ.get("KILL") and row["round"] == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return False


def found(table, path):
    options = {"experiment": table, "dataset": "data", "row": "model"}
    options["metrics"] = {"hits@5": "Hits"}
    task = Task("one", 1.0, "simulations.study.runs:measure", options)
    study = Study("mine", "figure9", "A made-up one", (), (task,))
    folder = folder_of(study, Path(path), quick=False)
    jobs = study.jobs(folder.path, 1, quick=False)
    run_study(folder, jobs)
    return jobs[0].found()[0]


if __name__ == "__main__":
    import json

    found(json.loads(sys.argv[1]), sys.argv[2])
'''


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_a_killed_study_continues_within_its_run(tmp_path, tiny_experiment, monkeypatch):
    (tmp_path / "killed_study.py").write_text(KILLED)
    monkeypatch.syspath_prepend(str(tmp_path))
    table = {**tiny_experiment(), "rounds": 8, "callbacks": [{"name": "killed_study:Killing"}]}
    table["checkpoint"] = {"every": 8}  # a study saves more often than that
    place = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, "-m", "killed_study", json.dumps(table), str(tmp_path / "study")],
        env={**os.environ, "PYTHONPATH": place, "KILL": "1", "TOLD": str(tmp_path / "killed")},
        stderr=subprocess.DEVNULL,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    assert (tmp_path / "killed").read_text().split() == ["1", "2", "3", "4"]
    import killed_study

    monkeypatch.setenv("TOLD", str(tmp_path / "resumed"))
    found = killed_study.found(table, tmp_path / "study")
    resumed = (tmp_path / "resumed").read_text().split()
    assert resumed[0] in ("4", "5") and resumed[-1] == "8"  # the fourth may not have been saved
    monkeypatch.setenv("TOLD", str(tmp_path / "whole"))
    assert found == killed_study.found(table, tmp_path / "whole-study")
