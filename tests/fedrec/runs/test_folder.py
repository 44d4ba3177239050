# SPDX-License-Identifier: Apache-2.0
"""Run folders: created once, recognised, locked, and with their experiment."""

from __future__ import annotations

import json
import subprocess
import sys

import pandas as pd
import pytest

from fedrec.errors import RunError
from fedrec.runs.directory import default_folder
from fedrec.runs.folder import RunFolder
from fedrec.runs.result import Result


@pytest.fixture
def run(load_tiny, tmp_path):
    return RunFolder.create(load_tiny(), tmp_path / "run")


def refused(action, *arguments):
    with pytest.raises(RunError) as caught:
        action(*arguments)
    return caught.value


def test_a_new_folder_records_experiment_machine_and_versions(run, load_tiny):
    assert run.experiment == load_tiny()
    about = json.loads((run.path / "run.json").read_text())
    assert about["experiment-sha256"] == load_tiny().digest() and about["command"] == sys.argv
    environment = json.loads((run.path / "environment.json").read_text())
    assert environment["packages"]["flwr"].startswith("1.") and environment["python"]
    assert run.status() == {"state": "created", "round": 0}
    assert RunFolder(run.path).experiment == load_tiny()


def test_an_existing_run_folder_is_refused_and_resume_is_offered(run, load_tiny):
    error = refused(RunFolder.create, load_tiny(), run.path)
    assert error.got == "a run folder" and error.fix.startswith(f"fedrec resume {run.path};")
    assert "--overwrite" in error.fix


def test_a_folder_of_other_files_is_refused_and_an_empty_one_taken(load_tiny, tmp_path):
    (tmp_path / "empty").mkdir()
    RunFolder.create(load_tiny(), tmp_path / "empty")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    error = refused(RunFolder.create, load_tiny(), tmp_path / "full")
    assert error.got == "other files" and "--output" in error.fix
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["thesis.tex"]
    assert (
        "not empty"
        in refused(RunFolder.create, load_tiny(), tmp_path / "full" / "thesis.tex").problem
    )


@pytest.mark.parametrize(
    ("make", "got"), [("nothing", "no such folder"), ("file", "a file"), ("folder", "another")]
)
def test_other_folders_are_reported(tmp_path, make, got):
    if make != "nothing":
        (tmp_path / "x").mkdir() if make == "folder" else (tmp_path / "x").touch()
    assert refused(RunFolder, tmp_path / "x").got.startswith(got)


def test_a_changed_experiment_is_refused(run):
    file = run.path / "experiment.toml"
    file.write_text(file.read_text().replace("rounds = 2", "rounds = 3"))
    error = refused(lambda: RunFolder(run.path).experiment)
    assert "was changed" in error.problem and error.expected != error.got
    file.write_text(
        "# a comment changes nothing\n" + file.read_text().replace("rounds = 3", "rounds = 2")
    )
    assert RunFolder(run.path).experiment.rounds == 2


def test_the_lock_keeps_a_second_process_out(run):
    hold = (
        "import sys, pathlib; from fedrec.runs.folder import RunFolder\n"
        "with RunFolder(pathlib.Path(sys.argv[1])).lock():\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(run.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "held\n"
        error = refused(run.lock().__enter__)
        assert "in use" in error.problem
        other.stdin.close()
        assert other.wait(timeout=30) == 0
    with run.lock():
        pass


def test_a_damaged_status_is_reported(run):
    (run.path / "status.json").write_text('{"state": ')
    assert "status.json cannot be read" in refused(run.status).problem


def test_a_result_is_read_as_it_was_written(run):
    users = pd.DataFrame({"hits@5": [0.5, None]}, index=pd.Index([3, 8], name="client"))
    groups = pd.DataFrame({"count": [1], "hits@5": [0.5]}, index=pd.Index(["active"], name="group"))
    rounds = [{"round": 1, "loss": 0.1 + 0.2}, {"round": 2, "loss": 1e-17, "hits@5": 0.5}]
    result = Result(
        run.experiment, run.path, {"hits@5": 0.5}, {"hits@5": 0.25}, {"ease": {"hits@5": 1.0}},
        pd.DataFrame(rounds), users, groups,
    )  # fmt: skip
    error = refused(run.read_result)
    assert "no result" in error.problem and "created after round 0" in error.got
    run.write_rounds(rounds, [{"round": 1, "seconds": 0.5}])
    run.write_result(result, {"seconds": {"training": 1.0}})
    found = RunFolder(run.path).read_result()
    assert (found.metrics, found.before_fine_tuning) == ({"hits@5": 0.5}, {"hits@5": 0.25})
    assert found.baselines == {"ease": {"hits@5": 1.0}} and found.experiment == run.experiment
    pd.testing.assert_frame_equal(found.rounds, result.rounds)
    pd.testing.assert_frame_equal(found.users, users)
    pd.testing.assert_frame_equal(found.groups, groups)
    assert json.loads((run.path / "result.json").read_text())["seconds"] == {"training": 1.0}


def test_default_folder_is_named_by_experiment_and_digest(load_tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDREC_RUNS", str(tmp_path))
    folder = default_folder(load_tiny())
    assert folder.parent == tmp_path and folder.name.startswith("tiny-20")
    assert folder.name.endswith(load_tiny().digest()[:6])


@pytest.mark.parametrize(
    "left",
    [
        [".environment.json.0123abcd"],
        ["environment.json"],
        ["environment.json", ".experiment.toml.0123abcd"],
        ["environment.json", "experiment.toml"],
    ],
)
def test_a_run_that_was_killed_before_it_began_is_begun_again(load_tiny, tmp_path, left):
    (tmp_path / "run").mkdir()
    for name in left:
        (tmp_path / "run" / name).write_text("of the killed run")
    assert RunFolder.create(load_tiny(), tmp_path / "run").experiment == load_tiny()


@pytest.mark.parametrize("own", [["experiment.toml"], ["environment.json", "notes.txt"]])
def test_files_of_somebodys_own_are_not_taken_for_a_killed_run(load_tiny, tmp_path, own):
    (tmp_path / "run").mkdir()
    for name in own:
        (tmp_path / "run" / name).write_text("mine")
    assert refused(RunFolder.create, load_tiny(), tmp_path / "run").got == "other files"
    assert all((tmp_path / "run" / name).read_text() == "mine" for name in own)
