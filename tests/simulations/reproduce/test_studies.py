# SPDX-License-Identifier: Apache-2.0
"""Studies: the small version of each runs, interrupted ones continue, and results are compared with
the paper's."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from fedrec.errors import ExperimentError, RunError
from simulations.reproduce import execution
from simulations.reproduce.catalogue import NOT_HERE, find, studies
from simulations.reproduce.execution import StudyFolder, reproduce
from simulations.reproduce.published import Published, published
from simulations.reproduce.runs import finished
from simulations.reproduce.study import Found, Job, Study, Task
from simulations.reproduce.tables import comparison, markdown

MUST = (
    "privrec table2",
    "privrec table4",
    "privrec table5",
    "privrec table6",
    "dp-vae table8",
    "dp-vae table10",
    "targeted-dp figure2",
    "pnbm figure1",
    "upc-sdg table2",
)
DESCRIPTIONS = ("privrec figure2", "dp-vae table2", "dp-vae table3", "upc-sdg table1")
FIGURES = (
    "dp-vae figure3",
    "privrec figure4",
    "privrec figure5",
    "privrec figure6",
    "privrec figure7",
    "privrec figure9",
    "pnbm figure1-ml1m",
    "targeted-dp figure4",
    "upc-sdg figure2",
    "upc-sdg figure4",
    "upc-sdg table2-gowalla",
)
LONG = (
    "privrec table2",
    "privrec table6",
    "pnbm figure1",
    "pnbm figure1-ml1m",
    "dp-vae table8",
    "upc-sdg table2",
    "upc-sdg table2-gowalla",
)


def done(name, path, seeds=1):
    (study,) = find(*name.split())
    found = reproduce(StudyFolder(path, study, quick=True), seeds)
    return study, [one for _, own in found for one in own]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in LONG else [])
        for name in (*MUST, *FIGURES, *DESCRIPTIONS)
    ],
)
def test_a_study_runs_small_and_fills_rows_of_the_papers_table(name, tmp_path, monkeypatch):
    """On synthetic data, without a data directory; the resulting rows are rows of the paper."""
    monkeypatch.setenv("FEDREC_DATA", str(tmp_path / "none"))
    study, found = done(name, tmp_path / "study")
    printed = published(study.paper, study.item, study.published)
    assert found and all(not math.isnan(one.value) for one in found)
    if printed:
        assert {one.cell for one in found} & printed.keys()
    table = comparison(printed, found)
    assert len(table) >= len(printed) and table["ours"].notna().sum() == len(
        {f.cell for f in found}
    )
    assert study.title in markdown(table, study.title, study.differs)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError) as refused:
        done("privrec table4", tmp_path / "file")
    assert refused.value.got == "a file" and (tmp_path / "file").read_text() == "mine"


def test_the_epsilons_of_table_4_come_out_as_printed(tmp_path):
    study, found = done("privrec table4", tmp_path)
    table = comparison(published(study.paper, study.item), found)
    ours = table[(table["model"] == "DP-PrivRec") & table["ours"].notna()]
    assert list(ours["ours"]) == pytest.approx(list(ours["published"]), abs=1e-4)
    assert len(ours) == 4 and math.isinf(ours["ours"].iloc[0])
    counted = table[table["model"].str.startswith("each round") & np.isfinite(table["ours"])]
    assert (counted["ours"] < 1.75).all() and len(counted) == 6


def test_the_network_of_dp_vae_is_the_printed_one_but_for_the_items(tmp_path):
    """Its parameters in closed form, for the items of the synthetic data and of MovieLens-100K."""

    def parameters(items, hidden=80, latent=20):
        outer = 2 * items * hidden + items + hidden
        return outer + 3 * hidden * latent + 2 * latent + hidden

    study, found = done("dp-vae table3", tmp_path)
    printed = published(study.paper, study.item)["ML-100K", "VAE", "parameters"].value
    assert parameters(1682) == printed
    ours = {one.metric: one.value for one in found}
    assert ours["parameters"] == parameters(50) and ours["latent dimension"] == 20


def test_every_table_and_figure_of_the_papers_is_made_or_has_a_reason():
    """Numbers of tables and figures as the papers count them."""
    counted = {
        "privrec": {"table": 6, "figure": 9},
        "dp-vae": {"table": 11, "figure": 3},
        "targeted-dp": {"figure": 4},
        "pnbm": {"figure": 3},
        "upc-sdg": {"table": 3, "figure": 4},
    }
    items = {
        f"{paper} {kind}{number}"
        for paper, kinds in counted.items()
        for kind, count in kinds.items()
        for number in range(1, count + 1)
    }
    made = {study.name.partition("-ml1m")[0].partition("-gowalla")[0] for study in studies()}
    assert made | NOT_HERE.keys() == items
    assert not made & NOT_HERE.keys()


def test_a_table_of_several_data_sets_is_read_in_parts():
    whole = published("upc-sdg", "table2")
    office, gowalla = (published("upc-sdg", "table2", name) for name in ("Office", "Gowalla"))
    assert published("upc-sdg", "table2-gowalla", "Gowalla") == gowalla
    assert {cell[0] for cell in office} == {"Office", "Office+", "Office-"}
    assert len(office) == len(gowalla) == len(whole) / 3


def test_figure_8_separates_active_and_inactive_users(tmp_path):
    (study,) = find("privrec", "figure8")
    ((_, found),) = reproduce(StudyFolder(tmp_path, study, quick=True), 1, only="privrec-sgd")
    assert {"PrivRec-SGD", "PrivRec-SGD, inactive users"} <= {one.model for one in found}


def test_every_shipped_row_of_a_study_is_one_of_the_papers_or_named_as_ours():
    """A misspelt row would be appended to the table and leave its cell empty."""
    for study in studies():
        assert study.tasks and study.seconds(study.seeds) > 0
        names = [task.name for task in study.tasks]
        assert len(set(names)) == len(names) and any(task.sample for task in study.tasks)


def counting(calls, fail_at=None):
    def work(job):
        if len(calls) == fail_at:
            raise KeyboardInterrupt
        calls.append((job.folder.name, job.seed))
        return [Found("data", "model", "metric", float(job.seed))]

    return work


def test_a_study_that_was_broken_off_does_only_what_is_left(tmp_path):
    calls = []
    tasks = [Task(name, 1.0, counting(calls)) for name in ("a", "b")]
    fixed = Task("fixed", 1.0, counting(calls), seeded=False)
    study = Study("pnbm", "figure9", "A made-up one", (), (*tasks, fixed))
    broken = replace(
        study, tasks=tuple(replace(t, work=counting(calls, fail_at=3)) for t in study.tasks)
    )
    with pytest.raises(KeyboardInterrupt):
        reproduce(StudyFolder(tmp_path, broken, quick=False), 2)
    assert len(calls) == 3
    found = reproduce(StudyFolder(tmp_path, study, quick=False), 2)
    assert sorted(calls) == sorted(
        [("a-seed0", 0), ("b-seed0", 0), ("fixed-seed0", 0), ("a-seed1", 1), ("b-seed1", 1)]
    )
    assert len(found) == 5
    with pytest.raises(RunError, match="is not the folder of this study"):
        StudyFolder(tmp_path, study, quick=True)


def test_the_time_is_printed_before_the_work(tmp_path):
    said = []
    study = Study("pnbm", "figure9", "A made-up one", (), (Task("a", 3600.0, counting([])),))
    reproduce(StudyFolder(tmp_path, study, quick=False), 4, say=said.append)
    assert "0 of 4 tasks are done" in said[0] and "4.0 h" in said[0]
    assert execution.duration(30) == "30 s" and execution.duration(600) == "10 min"


def test_intervals_are_students_over_seeds_and_the_users_for_one():
    values = [0.30, 0.34, 0.29]
    cell = ("data", "model", "metric")
    known = {cell: Published(0.25, False), ("data", "other", "metric"): Published(0.1, False)}
    table = comparison(known, [Found(*cell, value) for value in values])
    expected = stats.t.interval(0.95, 2, loc=np.mean(values), scale=stats.sem(values))
    row = table.iloc[0]
    assert (row["low"], row["high"]) == pytest.approx(expected)
    assert row["difference"] == pytest.approx(np.mean(values) - 0.25)
    assert math.isnan(table.iloc[1]["ours"])
    one = comparison(known, [Found(*cell, 0.3, 0.2, 0.4)]).iloc[0]
    assert (one["low"], one["high"]) == (0.2, 0.4)


def test_published_numbers_are_those_of_the_papers():
    table = published("privrec", "table2")
    assert table["MovieLens-1M", "PrivRec", "Hits@10"].value == 0.168
    assert published("dp-vae", "table8")["ML-100K", "VAE", "Recall@20"].value == 0.62
    suspect = [cell for cell, one in published("privrec", "table3").items() if one.suspect]
    assert suspect == [("Frappe", "FCF", "Hits@10")]
    assert not published("pnbm", "figure1")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("privrek", None), "did you mean 'privrec'"),
        (("privrec", "tabel2"), "did you mean 'table2'"),
        (("dp-vae", "table5"), "ML-20M and Netflix"),
    ],
)
def test_missing_studies_are_reported_with_the_reason(asked, words):
    with pytest.raises(ExperimentError) as refused:
        find(*asked)
    assert words in refused.value.text()


KILLED = '''
"""A study that is killed in the fourth round of its run if KILL is set."""

import os, signal, sys
from pathlib import Path

from server.callbacks.base import Callback
from simulations.reproduce.execution import StudyFolder, reproduce
from simulations.reproduce.runs import SYSTEM, run_task
from simulations.reproduce.study import Study


class Killing(Callback):
    def after_round(self, row, seconds):
        with open(os.environ["TOLD"], "a") as file:
            file.write(f"{row['round']}\\n")
        if os.environ.get("KILL") and row["round"] == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return False


def study(table):
    task = run_task(
        "one", table, dataset="data", models={SYSTEM: "model"}, metrics={"hits@5": "Hits@5"},
        seconds=1,
    )
    return Study("pnbm", "figure9", "A made-up one", (), (task,))


if __name__ == "__main__":
    import json

    reproduce(StudyFolder(Path(sys.argv[2]), study(json.loads(sys.argv[1])), quick=False), 1)
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
    found = reproduce(StudyFolder(tmp_path / "study", killed_study.study(table), quick=False), 1)
    resumed = (tmp_path / "resumed").read_text().split()
    assert resumed[0] in ("4", "5") and resumed[-1] == "8"  # the fourth may not have been saved
    monkeypatch.setenv("TOLD", str(tmp_path / "whole"))
    whole = reproduce(
        StudyFolder(tmp_path / "whole-study", killed_study.study(table), quick=False), 1
    )
    assert [one for _, one in found] == [one for _, one in whole]


def test_a_run_of_other_settings_is_not_taken_for_the_studys(tmp_path, tiny_experiment):
    """For example of an earlier version, whose numbers would be taken for those of this one."""
    job = Job(tmp_path, 0, False)
    finished(job, tiny_experiment(), ())
    assert finished(job, tiny_experiment(), ()).metrics
    with pytest.raises(RunError, match="other settings"):
        finished(job, tiny_experiment(), ("strategy.server-lr=0.5",))


@pytest.mark.parametrize("name", ["nothing", "on"])
def test_a_task_is_selected_by_its_whole_name(tmp_path, name):
    calls = []
    tasks = tuple(Task(one, 1, counting(calls)) for one in ("one", "one more"))
    folder = StudyFolder(
        tmp_path, Study("pnbm", "figure9", "A made-up one", (), tasks), quick=False
    )
    with pytest.raises(ExperimentError, match="no task") as error:
        reproduce(folder, 1, only=name)
    assert "one, one more" in error.value.text() and not calls
    reproduce(folder, 1, only="one")
    assert calls == [("one-seed0", 0)]
