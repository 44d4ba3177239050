# SPDX-License-Identifier: Apache-2.0
"""Run folders."""

import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from fedrec.errors import RunError
from fedrec.runs.folder import Result, RunFolder
from fedrec.runs.ids import read_ids, write_ids

# Run folders: created once, recognised, locked, and with their experiment.


@pytest.fixture
def run(load_tiny, tmp_path):
    return RunFolder.create(load_tiny("evaluation.baselines=['ease']"), tmp_path / "run")


def refused(action, *arguments):
    with pytest.raises(RunError) as caught:
        action(*arguments)
    return caught.value


def test_a_new_folder_records_experiment_machine_and_versions(run, load_tiny):
    experiment = load_tiny("evaluation.baselines=['ease']")
    about = json.loads((run.path / "run.json").read_text())
    assert about["experiment-sha256"] == experiment.digest() and about["command"] == sys.argv
    environment = json.loads((run.path / "environment.json").read_text())
    assert environment["packages"]["flwr"].startswith("1.") and environment["python"]
    assert run.status() == {"state": "created", "round": 0}
    assert RunFolder(run.path).experiment == run.experiment == experiment


def test_an_existing_run_folder_is_refused_and_resume_is_offered(run, load_tiny):
    error = refused(RunFolder.create, load_tiny(), run.path)
    assert error.got == "a run folder" and error.fix.startswith(f"fedrec resume {run.path};")
    assert "another --output" in error.fix


@pytest.mark.parametrize("names", [["thesis.tex"], ["experiment.toml"], ["environment.json", "a"]])
def test_a_folder_of_other_files_is_refused_and_an_empty_one_taken(load_tiny, tmp_path, names):
    """Also one with files of an experiment that are not those of a killed run."""
    (tmp_path / "empty").mkdir()
    RunFolder.create(load_tiny(), tmp_path / "empty")
    (tmp_path / "full").mkdir()
    for name in names:
        (tmp_path / "full" / name).write_text("mine")
    error = refused(RunFolder.create, load_tiny(), tmp_path / "full")
    assert error.got == "other files" and "--output" in error.fix
    assert [file.read_text() for file in (tmp_path / "full").iterdir()] == ["mine"] * len(names)
    error = refused(RunFolder.create, load_tiny(), tmp_path / "full" / names[0])
    assert "not empty" in error.problem


def test_a_changed_experiment_is_refused(run):
    file = run.path / "experiment.toml"
    file.write_text(file.read_text().replace("rounds = 2", "rounds = 3"))
    error = refused(lambda: RunFolder(run.path).experiment)
    assert "was changed" in error.problem and error.expected != error.got
    right = file.read_text().replace("rounds = 3", "rounds = 2")
    file.write_text("# a comment changes nothing\n" + right)
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


@pytest.fixture
def finished(run):
    """A run folder with a result, and the result."""
    users = pd.DataFrame({"hits@5": [0.5, None]}, index=pd.Index([3, 8], name="client"))
    groups = pd.DataFrame({"count": [1], "hits@5": [0.5]}, index=pd.Index(["active"], name="group"))
    rounds = [{"round": 1, "loss": 0.1 + 0.2}, {"round": 2, "loss": 1e-17, "hits@5": 0.5}]
    result = Result(
        run.experiment, run.path, {"hits@5": 0.5}, {"hits@5": 0.25}, {"ease": {"hits@5": 1.0}},
        pd.DataFrame(rounds), users, groups,
    )  # fmt: skip
    run.write_rounds(rounds, [{"round": 1, "seconds": 0.5}])
    run.write_baseline("ease", {"metrics": {"hits@5": 1.0}}, users, groups)
    run.write_result(result, {"seconds": {"training": 1.0}})
    return run, result


def test_rounds_are_written_as_pandas_writes_them(run):
    """Also with columns that come later, or without a value."""
    rows = [
        {"round": n, "loss": math.pi / n if n % 4 else math.nan, "why": None if n % 5 else 'a, "b"'}
        | ({"hits@5": 1e-17 / n} if n % 3 == 0 else {})
        for n in range(1, 30)
    ]
    file = run.path / "rounds.csv"
    run.write_rounds(rows, [])
    assert file.read_text() == pd.DataFrame(rows).to_csv(index=False)


def test_a_result_is_read_as_it_was_written(finished):
    run, result = finished
    found = RunFolder(run.path).read_result()
    assert (found.metrics, found.before_fine_tuning) == ({"hits@5": 0.5}, {"hits@5": 0.25})
    assert found.baselines == {"ease": {"hits@5": 1.0}} and found.experiment == run.experiment
    pd.testing.assert_frame_equal(found.rounds, result.rounds)
    pd.testing.assert_frame_equal(found.users, result.users)
    pd.testing.assert_frame_equal(found.groups, result.groups)
    assert json.loads((run.path / "result.json").read_text())["seconds"] == {"training": 1.0}


@pytest.mark.parametrize(
    "table", ["rounds.csv", "users.csv", "groups.csv", "baselines/ease/users.csv"]
)
def test_a_table_of_a_finished_run_that_lost_its_last_line_is_refused(finished, table):
    run, _ = finished
    file = run.path / table
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    error = refused(run.read_result)
    assert table in error.problem and "changed" in error.got


def test_a_result_that_is_no_table_is_damage(finished):
    run, _ = finished
    (run.path / "result.json").write_text("[]")
    assert "result.json" in refused(run.summary).problem
    assert "users.csv" in refused(lambda: run._read_table("users.csv", 0)).problem


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


def test_folders_of_other_versions_are_refused_with_what_reads_them(run):
    """A folder of a later form, and one with a setting that this version does not have."""
    about = json.loads((run.path / "run.json").read_text())
    assert about["format"] == 2
    (run.path / "run.json").write_text(json.dumps(about | {"format": 3, "fedrec": "9.0"}))
    error = refused(lambda: RunFolder(run.path).experiment)
    assert "fedrec (9.0)" in str(error) and "format 3" in str(error)
    older = {key: value for key, value in about.items() if key != "format"}
    (run.path / "run.json").write_text(json.dumps(older | {"fedrec": "0.0.8"}))
    error = refused(lambda: RunFolder(run.path).experiment)  # metrics had other names
    assert "fedrec (0.0.8)" in str(error) and "format 1" in str(error)
    (run.path / "run.json").write_text(json.dumps(about | {"fedrec": "0.0.9"}))
    text = (run.path / "experiment.toml").read_text()
    (run.path / "experiment.toml").write_text("old-setting = 3\n" + text)
    error = refused(lambda: RunFolder(run.path).experiment)
    assert "fedrec (0.0.9)" in str(error) and "old-setting" in str(error)
    assert "fedrec run " in str(error)
    (run.path / "experiment.toml").write_text(text.replace("rounds = 2", "rounds = 3"))
    assert "other defaults" in str(refused(lambda: RunFolder(run.path).experiment))


@pytest.mark.parametrize("value", [1.5, math.inf, -math.inf, math.nan])
def test_metrics_come_back_as_they_were_written(load_tiny, tmp_path, value):
    """JSON has neither infinity, as of a true epsilon without a bound, nor NaN."""
    run = RunFolder.create(load_tiny("evaluation.baselines=['ease']"), tmp_path / "run")
    run.write_baseline("ease", {"metrics": {"epsilon": value}}, pd.DataFrame(), pd.DataFrame())
    np.testing.assert_equal(run.read_baselines(), {"ease": {"epsilon": value}})
    assert "Infinity" not in "".join(file.read_text() for file in run.path.rglob("*.json"))


# The ids of the data, kept in a run folder.

AWKWARD = ['"', "a\nb", "a\u2028b", "a\x85b", "\x0b", "\\", "ü", "", ",", "[1]", " x "]
"""What JSON escapes, and what Python counts as the end of a line and JSON does not."""


def with_users(interactions, ids):
    names = np.array(ids, dtype=object)
    features = dataclasses.replace(interactions.user_features, rows=len(names), features=())
    return dataclasses.replace(interactions, user_ids=names, user_features=features)


@pytest.fixture
def interactions(load_tiny):
    from fedrec.data.population import read_interactions

    return read_interactions(load_tiny()).with_rows(slice(0, 0))


@pytest.mark.parametrize("ids", [AWKWARD, [3, 1, 2], []], ids=["texts", "numbers", "none"])
def test_ids_come_back_as_texts_one_to_a_line(interactions, tmp_path, ids):
    write_ids(tmp_path, with_users(interactions, ids))
    users, items = read_ids(tmp_path)
    assert users.tolist() == [str(one) for one in ids]
    assert items.tolist() == [str(one) for one in interactions.item_ids]
    lines = (tmp_path / "ids" / "users.txt").read_text("utf-8").removesuffix("\n").split("\n")
    assert [json.loads(line) for line in lines if ids] == [str(one) for one in ids]


def test_a_damaged_file_is_named(interactions, tmp_path):
    write_ids(tmp_path, with_users(interactions, ["a", "b"]))
    (tmp_path / "ids" / "users.txt").write_text('"a"\n"b\n')
    with pytest.raises(RunError, match=r"users\.txt cannot be read"):
        read_ids(tmp_path)
