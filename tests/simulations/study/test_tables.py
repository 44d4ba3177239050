# SPDX-License-Identifier: Apache-2.0
"""Intervals and tests of a study's tables, by formula."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedrec.metrics.base import UserMetric
from fedrec.runs.result import Result
from simulations.reproduce.recorded import entry
from simulations.study.runs import values
from simulations.study.study import Found, Study, Task
from simulations.study.tables import comparison, differences, input_notes, markdown, write


class Misses(UserMetric):
    """A metric of which less is better."""

    name = "misses"
    lower_is_better = True

    def per_user(self, block, k):
        return 1.0 - block.hits(k)


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
    study = Study("paper", "item", "title", (), tuple(tasks), compared=(("a", "b"),))
    jobs = study.jobs(tmp_path, 3, quick=False)
    for job in jobs:
        job.perform(())
    tables = write(study, tmp_path, jobs, {}, quick=False)
    table = tables.comparison.set_index("model")
    expected = stats.t.interval(0.95, len(draws) - 1, loc=np.mean(draws), scale=stats.sem(draws))
    assert tuple(table.loc["a", ["ours", "low", "high"]]) == pytest.approx(
        (np.mean(draws), *expected)
    )
    assert table.loc["a", "draws"] == len(draws) and table.loc["a", "client-rounds"] == 11
    gains = [0.02] * 5 if folds else [0.01, 0.02, 0.03]
    apart = tables.differences.iloc[0]
    assert apart["difference"] == pytest.approx(0.02) and apart["draws"] == len(draws)
    half = stats.t.ppf(0.975, len(gains) - 1) * stats.sem(gains)
    assert apart["high"] - apart["low"] == pytest.approx(2 * half, abs=1e-9)
    kept = entry(study, jobs)
    assert kept["seeds"] == 3
    assert kept["rows"]["a"]["metric"][3:] == pytest.approx(draws)
    assert kept["differences"]["a -> b"]["metric"][4] == len(draws)


def test_intervals_of_proportions_stay_within_0_and_1():
    found = [Found(*CELL, value, least=0.0, most=1.0) for value in (0.01, 0.0, 0.03)]
    row = comparison({}, found).iloc[0]
    expected = stats.t.interval(0.95, 2, loc=0.04 / 3, scale=stats.sem([0.01, 0.0, 0.03]))
    assert expected[0] < 0 == row["low"] and row["high"] == pytest.approx(expected[1])
    (one,) = [Found(*CELL, 0.99, 0.97, 1.01, least=0.0, most=1.0)]
    assert comparison({}, [one]).iloc[0]["high"] == 1
    assert comparison({}, [Found(*CELL, 0.99, 0.97, 1.01)]).iloc[0]["high"] == 1.01


@pytest.mark.parametrize(
    ("metric", "order"),
    [("hits@10", "bac"), ("rmse", "cab"), (f"{__name__}:Misses@10", "cab")],
)
def test_the_best_is_first(load_tiny, metric, order):
    """By the metric itself, whatever the table calls it, also one of the experiment's own."""
    own = f"evaluation.metrics=['{metric.partition('@')[0]}']"
    column = "misses@10" if ":" in metric else metric
    experiment = load_tiny(*([own] if ":" in metric else []))
    baselines = {name: {column: v} for name, v in (("a", 0.2), ("b", 0.3), ("c", 0.1))}
    result = Result(experiment, Path(), {}, {}, baselines, pd.DataFrame(), users=[], groups=[])
    rows = {name: name for name in "abc"}
    found = list(values(result, "data", rows, {column: "Quality"}))
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


@pytest.mark.filterwarnings("error")
def test_equal_values_do_not_differ():
    found = differences([("a", "b")], rows(a=[0.2] * 3, b=[0.2] * 3)).iloc[0]
    assert (found["low"], found["high"], found["t"], found["wilcoxon"]) == (0, 0, 1, 1)


def test_the_difference_of_two_differences():
    """What noise costs one system minus what it costs another, paired by seed."""
    found = rows(a=[1.0, 1.2], noisy_a=[1.5, 1.4, 7.0], b=[0.9, 1.0], noisy_b=[1.0, 1.4])
    row = differences([("a", "noisy_a", "b", "noisy_b")], found).iloc[0]
    gaps = [0.1 - 0.5, 0.4 - 0.2]
    assert row["difference"] == pytest.approx(np.mean(gaps)) and row["draws"] == 2
    half = stats.t.ppf(0.975, 1) * stats.sem(gaps)
    assert row["high"] - row["difference"] == pytest.approx(half)


def test_rows_without_a_common_seed_have_no_test():
    found = differences([("a", "b"), ("a", "c")], rows(a=[0.1, None], b=[None, 0.2]))
    assert list(found["draws"]) == [0, 0] and found["t"].isna().all()


@pytest.mark.filterwarnings("error")
def test_infinite_epsilons_are_not_compared():
    found = differences([("a", "b")], rows(a=[math.inf, math.inf], b=[math.inf, 1.0])).iloc[0]
    assert math.isnan(found["difference"]) and found["draws"] == 2


def test_inputs_of_rows_have_codes_and_a_warning_for_each_data_set():
    described = {"item_features": ["genres"], "client_rounds": 100}
    found = [
        Found("one", "a", "m", 0.1, inputs=described),
        Found("one", "a", "m", 0.2, inputs={**described, "client_rounds": 51}),
        Found("one", "b", "m", 0.3, inputs={}),
        Found("two", "a", "m", 0.3, inputs={"low_rated": ["0.3"]}),
        Found("two", "c", "m", 0.3),
    ]
    table = comparison({("one", "d", "m"): 0.1}, found)
    assert dict(zip(table["dataset"] + table["model"], table["inputs"], strict=True)) == {
        "oned": "",
        "onea": "G",
        "oneb": "-",
        "twoa": "L",
        "twoc": "",
    }
    assert table["client-rounds"].dropna().tolist() == [76]
    assert table["item-features"].dropna().tolist() == ["genres", "", ""]
    assert input_notes(found) == [
        "inputs: G: items' genres; L: rated items that are not liked (weight 0.3)",
        "rows differ in their inputs: a alone has items' genres",
        "client-rounds: one: a 76",
    ]
    text = markdown(table, "title", [])
    assert "| one | a | m | - | 0.1500 |" in text and text.count("inputs") == 1
    assert "inputs" not in markdown(comparison({}, [Found(*CELL, 0.1)]), "title", [])
