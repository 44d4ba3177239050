# SPDX-License-Identifier: Apache-2.0
"""Studies: declaration, execution and tables."""

import math
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedrec.errors import ClientError, ExperimentError, RunError
from fedrec.runs.folder import Result
from simulations.studies.declaration import Found, Study, Task, TaskJob, _filled, declared
from simulations.studies.runs import finished, folder_of, run_study, selected, values
from simulations.studies.tables import _input_notes, cells_of, comparison, differences, write

RECORDING = Path(__file__).resolve().parents[2] / "docs" / "record_results.py"
FILE = """
[sets]
quiet = ["evaluation.every=0"]
both = ["@quiet", "rounds={rounds}"]

[defaults]
dataset = "data"
measure = "HERE:echo"

[parts.mf]
name = "mf-{lr:g}"
seconds = 2
vary = {lr = "{rates}"}

[table1]
title = "Rates on {dataset}"
rates = [0.1, 1.0]
rounds = 3
slower = 10
set = ["@both"]
compared = [{rows = ["mf {lr}", "other"], vary = {lr = [0.1, 1.0]}}]
tasks = [
    "@mf",
    {seconds = 1, set = ["a={name}"], cases = [
        {name = "One", b = 1},
        {name = "two", b = 2, seeded = false},
    ]},
]

[table2]
like = "table1"
title = "Others"
sample = [{lr = 1.0}]
rates = [1.0, 2.0]
""".replace("HERE", __name__)


def echo(job: TaskJob, dataset: str, lr: float = 0.0, set: tuple = (), b: int = 0):
    return [Found(dataset, "|".join(set), str(b), lr)]


@pytest.fixture
def written(tmp_path):
    """The studies of a text, by item."""

    def write(text: str):
        (tmp_path / "mine.toml").write_text(text)
        return {study.item: study for study in declared(tmp_path / "mine.toml")}

    return write


def test_a_task_for_each_value_and_case_with_everything_filled_in(written):
    study = written(FILE)["table1"]
    assert study.name == "mine table1" and study.title == "Rates on data"
    assert study.compared == (("mf 0.1", "other"), ("mf 1.0", "other"))
    found = {
        (task.name, task.seconds, task.seeded): task.resolved()(TaskJob(Path(), 0, False, task))
        for task in study.tasks
    }
    shared = "evaluation.every=0|rounds=3"
    assert found == {
        ("mf-0.1", 20.0, True): [Found("data", shared, "0", 0.1)],
        ("mf-1", 20.0, True): [Found("data", shared, "0", 1.0)],
        ("one", 10.0, True): [Found("data", f"{shared}|a=One", "1", 0.0)],
        ("two", 10.0, False): [Found("data", f"{shared}|a=two", "2", 0.0)],
    }


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("[sets]", "[sets", "is not valid TOML"),
        ("[sets]", "[sets]\ndeep = " + "[" * 100_000, "is not valid TOML"),
        ('like = "table1"', 'like = "tabel1"', "did you mean 'table1'"),
        ('set = ["@both"]', 'set = ["@bot"]', "did you mean 'both'"),
        ('"@mf"', '"@fm"', "unknown name 'fm'"),
        ("seconds = 2", "", "'seconds'"),
        ("seconds = 2", "", "see docs/how-to.md, Studies of your own"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_reason(written, before, after, words):
    with pytest.raises(ExperimentError) as refused:
        written(FILE.replace(before, after))
    assert words in refused.value.text()


def test_a_misspelt_key_of_a_task_is_refused(written):
    study = written(FILE.replace("b = 2", "datset = 2"))["table1"]
    with pytest.raises(ExperimentError, match="unknown key 'datset'") as refused:
        study.tasks[-1].resolved()
    assert "did you mean 'dataset'" in refused.value.text()


def test_the_seed_of_a_run_can_be_a_setting(tiny_experiment):
    baseline = {"name": "mf", "seed": "{seed}"}
    table = tiny_experiment() | {"evaluation": {"ks": [5], "baselines": [baseline]}}
    job = TaskJob(Path(), 7, False, Task("a", 1, echo))
    assert job.experiment(table).evaluation.baseline_settings()["mf"]["seed"] == 7


def test_texts_keep_what_is_no_key():
    known = {"a": 0.5, "b-c": [1, 2]}
    assert _filled("{a:.2f}, {x}, {name='a'}, {b-c}", known) == "0.50, {x}, {name='a'}, [1, 2]"
    assert _filled({"{a}": ["{b-c}", {"k": "{a}"}]}, known) == {"0.5": [[1, 2], {"k": 0.5}]}


# Studies do what is left, repeat what failed, and take no other run for theirs.


def counting(calls, fail_at=None, error=KeyboardInterrupt):
    """A measure that notes its calls, and fails in one of them."""

    def work(job):
        if len(calls) == fail_at:
            raise error
        calls.append(job.name)
        return [Found("data", "model", "metric", float(job.seed))]

    return work


def study_of(*tasks):
    return Study("mine", "figure9", "A made-up one", tasks)


def run(path, study, seeds=1, **more):
    folder = folder_of(study, path, quick=False)
    jobs = study.jobs(folder, seeds, quick=False)
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
    assert not failures and all(job.results() for job in jobs)
    with pytest.raises(RunError, match="holds another study"):
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


@pytest.mark.parametrize(
    ("only", "names"), [("one", ["one"]), ("one*", ["one", "one more"]), ("", ["one", "one more"])]
)
def test_tasks_are_selected_by_name_or_pattern(tmp_path, only, names):
    study = study_of(*(Task(name, 1, counting([])) for name in ("one", "one more")))
    jobs = study.jobs(tmp_path, 1, quick=False)
    assert [job.task.name for job in selected(jobs, only)] == names
    for unknown in ("nothing", "on"):
        with pytest.raises(ExperimentError, match="task") as error:
            selected(jobs, unknown)
        assert "one, one more" in error.value.text()
    with pytest.raises(ExperimentError, match="no tasks to run"):
        selected([], only)


def test_a_run_of_a_study_saves_often_and_other_runs_are_not_taken_for_it(
    tmp_path, tiny_experiment
):
    """At least twenty times a run, or each round. Numbers of an earlier version would be taken for
    those of this one."""
    job = TaskJob(tmp_path, 0, False, Task("a", 1, counting([])))
    table = {**tiny_experiment(), "rounds": 3, "checkpoint": {"every": 8}}
    result = finished(job, table, ())
    assert result.experiment.checkpoint.every == 1
    assert finished(job, table, ()).metrics == result.metrics
    with pytest.raises(RunError, match="different settings"):
        finished(job, table, ("strategy.server-lr=0.5",))


# Intervals and tests of a study's tables, by formula.


CELL = ("data", "model", "metric")


def rows(**columns):
    """Numbers of models over seeds; None where a seed is missing."""
    return [
        (seed, Found("data", model, "metric", value))
        for model, values in columns.items()
        for seed, value in enumerate(values)
        if value is not None
    ]


def test_intervals_are_students_over_seeds_and_the_users_for_one():
    values = [0.30, 0.34, 0.29]
    known = {CELL: 0.25, ("data", "other", "metric"): 0.1}
    table = comparison(known, [Found(*CELL, value) for value in values])
    expected = stats.t.interval(0.95, 2, loc=np.mean(values), scale=stats.sem(values))
    row = table.iloc[0]
    assert (row["low"], row["high"]) == pytest.approx(expected)
    assert row["difference"] == pytest.approx(np.mean(values) - 0.25)
    assert math.isnan(table.iloc[1]["ours"])
    one = comparison(known, [Found(*CELL, 0.3, 0.2, 0.4)]).iloc[0]
    assert (one["low"], one["high"]) == (0.2, 0.4)


def measured(job, rises):
    """By row what each seed and fold gives: seeds on a fold differ, and one run has two values."""
    for row, rise in rises.items():
        value = FOLDS[job.task.options.get("fold", job.seed + 1) - 1] + rise * job.seed
        for apart in (-0.002, 0.002):
            inputs = {"client_rounds": 10 + job.seed}
            yield Found("data", row, "metric", value + rise + apart, inputs=inputs)


FOLDS = (0.30, 0.34, 0.29, 0.36, 0.31)


@pytest.mark.parametrize(("folds", "draws"), [(5, FOLDS), (0, FOLDS[:3])])
def test_intervals_count_a_fold_or_seed_once(folds, draws, tmp_path):
    """Whichever there is; the oracle has the mean of each, with 4 or 2 degrees of freedom."""
    rises = {"a": 0.0, "b": 0.01}
    keys = [{"fold": fold + 1} for fold in range(folds)] or [{}]
    tasks = [Task(f"t{i}", 1, measured, {"rises": rises, **own}) for i, own in enumerate(keys)]
    tasks = [replace(task, variables=frozenset({"fold"})) for task in tasks]
    study = Study("paper", "item", "title", tuple(tasks), compared=(("a", "b"),))
    jobs = study.jobs(tmp_path, 3, quick=False)
    for job in jobs:
        job.perform(())
    table = write(study, tmp_path, jobs, {}, quick=False)[0].set_index("model")
    expected = stats.t.interval(0.95, len(draws) - 1, loc=np.mean(draws), scale=stats.sem(draws))
    assert tuple(table.loc["a", ["ours", "low", "high"]]) == pytest.approx(
        (np.mean(draws), *expected)
    )
    assert table.loc["a", "draws"] == len(draws) and table.loc["a", "client-rounds"] == 11
    gains = [0.02] * 5 if folds else [0.01, 0.02, 0.03]
    apart = pd.read_csv(tmp_path / "item-differences.csv").iloc[0]
    assert apart["difference"] == pytest.approx(0.02) and apart["draws"] == len(draws)
    half = stats.t.ppf(0.975, len(gains) - 1) * stats.sem(gains)
    assert apart["high"] - apart["low"] == pytest.approx(2 * half, abs=1e-9)
    recorded = runpy.run_path(str(RECORDING))["entry"](study, jobs)
    assert recorded["seeds"] == 3
    assert recorded["rows"]["a"]["metric"][3:] == pytest.approx(draws)
    assert recorded["differences"]["a -> b"]["metric"][4] == len(draws)


def test_intervals_of_proportions_stay_within_0_and_1():
    found = [Found(*CELL, value, least=0.0, most=1.0) for value in (0.01, 0.0, 0.03)]
    row = comparison({}, found).iloc[0]
    expected = stats.t.interval(0.95, 2, loc=0.04 / 3, scale=stats.sem([0.01, 0.0, 0.03]))
    assert expected[0] < 0 == row["low"] and row["high"] == pytest.approx(expected[1])
    (one,) = [Found(*CELL, 0.99, 0.97, 1.01, least=0.0, most=1.0)]
    assert comparison({}, [one]).iloc[0]["high"] == 1
    assert comparison({}, [Found(*CELL, 0.99, 0.97, 1.01)]).iloc[0]["high"] == 1.01


@pytest.mark.parametrize(("metric", "order"), [("hits@10", "bac"), ("rmse", "cab")])
def test_the_best_is_first(load_tiny, metric, order):
    """By the metric itself, whatever the table calls it."""
    baselines = {name: {metric: v} for name, v in (("a", 0.2), ("b", 0.3), ("c", 0.1))}
    result = Result(load_tiny(), Path(), {}, {}, baselines, pd.DataFrame(), users=[], groups=[])
    rows = {name: name for name in "abc"}
    found = list(values(result, "data", rows, {metric: "Quality"}))
    assert "".join(comparison({}, found, best=True)["model"]) == order
    assert "".join(comparison({}, found)["model"]) == "abc"


def test_paired_by_seed_as_in_the_textbook():
    one = [0.30, 0.32, 0.29, 0.33, 0.35, None]
    other = [0.31, 0.36, 0.31, 0.32, 0.38, 0.9]
    found = differences([("a", "b")], rows(a=one, b=other)).iloc[0]
    gains = np.subtract(other[:5], one[:5])
    error = gains.std(ddof=1) / math.sqrt(5)
    assert found["draws"] == 5 and found["difference"] == pytest.approx(gains.mean())
    expected = stats.t.interval(0.95, 4, loc=gains.mean(), scale=error)
    assert (found["low"], found["high"]) == pytest.approx(expected)
    assert found["t"] == pytest.approx(2 * stats.t.sf(gains.mean() / error, 4))


def test_wilcoxons_p_is_exact_without_ties():
    # the one negative has rank 2; sums of at most 2 are {}, {1}, {2}
    gains = [0.01, 0.05, 0.03, -0.02, 0.08]
    found = differences([("a", "b")], rows(a=[0.2] * 5, b=[0.2 + gain for gain in gains])).iloc[0]
    assert found["wilcoxon"] == pytest.approx(2 * 3 / 2**5)


def test_the_difference_of_two_differences():
    """What noise costs one system minus what it costs another, paired by seed."""
    found = rows(a=[1.0, 1.2], noisy_a=[1.5, 1.4, 7.0], b=[0.9, 1.0], noisy_b=[1.0, 1.4])
    row = differences([("a", "noisy_a", "b", "noisy_b")], found).iloc[0]
    gaps = [0.1 - 0.5, 0.4 - 0.2]
    assert row["difference"] == pytest.approx(np.mean(gaps)) and row["draws"] == 2
    half = stats.t.ppf(0.975, 1) * stats.sem(gaps)
    assert row["high"] - row["difference"] == pytest.approx(half)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("before", "after", "draws", "expected"),
    [
        ([0.2] * 3, [0.2] * 3, 3, [0.0, 0.0, 0.0, 1.0, 1.0]),
        ([0.1, None], [None, 0.2], 0, [math.nan] * 5),
        ([math.inf, math.inf], [math.inf, 1.0], 2, [math.nan] * 5),  # epsilons
    ],
)
def test_rows_that_are_equal_or_cannot_be_compared(before, after, draws, expected):
    row = differences([("a", "b")], rows(a=before, b=after)).iloc[0]
    columns = ["difference", "low", "high", "t", "wilcoxon"]
    assert row["draws"] == draws
    assert [row[name] for name in columns] == pytest.approx(expected, nan_ok=True)


def test_inputs_of_rows_are_told_with_their_data_set():
    described = {"item_features": ["genres"], "client_rounds": 100}
    found = [
        Found("one", "a", "m", 0.1, inputs=described),
        Found("one", "a", "m", 0.2, inputs={**described, "client_rounds": 51}),
        Found("one", "b", "m", 0.3, inputs={}),
        Found("two", "a", "m", 0.3, inputs={"low_rated": ["0.3"]}),
        Found("two", "c", "m", 0.3),
    ]
    table = comparison({("one", "d", "m"): 0.1}, found)
    assert table["client-rounds"].dropna().tolist() == [76]
    assert table["item-features"].dropna().tolist() == ["genres", "", ""]
    assert _input_notes(found) == [
        "rows differ in their inputs: one: a: items' genres; one: b: likes alone;"
        " two: a: rated items that are not liked (weight 0.3)",
        "client-rounds: one: a 76",
    ]
    assert cells_of(table.to_dict("records")[1])[:5] == ["one", "a", "m", "-", "0.1500"]
