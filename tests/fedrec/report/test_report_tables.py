# SPDX-License-Identifier: Apache-2.0
"""Tables of reports: tests, intervals, inputs, summaries and privacy totals."""

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from scipy import stats

from fedrec.components.sections import Section
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import load
from fedrec.privacy.accounting.accountant import Accountant
from fedrec.privacy.accounting.events import from_record
from fedrec.report.comparison import _holm, _seed_test, bootstrap_intervals, compare, paired_tests
from fedrec.report.formats import comparison_text
from fedrec.report.inputs import Inputs, inputs_line, system_inputs
from fedrec.report.page.sections import report
from fedrec.report.privacy_total import shown_together
from fedrec.report.summary import (
    answer_line,
    comparison_table,
    deciding_metric,
    result_lines,
    summary_table,
)
from fedrec.runs.folder import Result


def one_by_one(values, resamples, seed):
    """Efron's percentile interval with a loop."""
    random = np.random.default_rng(seed)
    means = [random.choice(values, len(values)).mean() for _ in range(resamples)]
    return np.quantile(means, [0.025, 0.975])


def test_an_interval_is_that_of_resampling_one_by_one():
    values = np.random.default_rng(3).exponential(1.0, 300)
    (found,) = bootstrap_intervals([values], resamples=10_000)
    np.testing.assert_allclose(found, one_by_one(values, 10_000, 1), atol=0.01)


# Paired tests against scipy, closed forms and worked examples.


def test_hits_of_many_users_by_hand():
    # 60 users gain a hit, 40 lose one: ranks are all 50.5, so the balance is 20 * 50.5 and its
    # variance 100 * 50.5^2
    differences = np.repeat([1.0, -1.0, 0.0], [60, 40, 500])
    (found,) = paired_tests([differences])
    assert found["effect"] == pytest.approx(20 / 600 / differences.std(ddof=1))
    assert (found["better"], found["worse"]) == (60, 40)
    assert found["wilcoxon_p"] == pytest.approx(2 * stats.norm.sf(2))


def test_holm_by_hand():
    # .01 * 4, .02 * 3, .03 * 2 (raised to .06), .04 * 1 (raised to .06)
    np.testing.assert_allclose(_holm(np.array([0.02, 0.01, 0.04, 0.03])), [0.06, 0.04, 0.06, 0.06])
    np.testing.assert_allclose(_holm(np.array([0.7, 0.9])), [1, 1])


def test_a_seed_alone_and_equal_seeds_are_not_tested():
    assert np.isnan(_seed_test(np.array([0.1]))["seed_p"])
    assert np.isnan(_seed_test(np.full(3, 0.1))["seed_p"])


# Comparison tables: cells, marks, and missing values.

ROWS = {
    "popularity": {"hits@10": 0.1, "rmse": 1.25},
    "ease [500]": {"hits@10": 0.24, "rmse": math.nan},
    "mine": {"hits@10": 0.24001, "rmse": 0.9},
}


def printed(rows, metrics):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(comparison_table(rows, metrics))
    return console.export_text(styles=True)


def test_the_best_values_as_printed_are_bold():
    text = printed(ROWS, ["hits@10", "rmse"])
    assert text.count("\x1b[1m0.2400\x1b[0m") == 2  # 0.24 and 0.24001 are printed the same
    assert "\x1b[1m0.9000\x1b[0m" in text and "\x1b[1m1.2500" not in text


# The inputs of systems against what is known of each of them, and their codes in tables.

DESCRIBED = {"user_features": ("gender", "age", "occupation"), "item_features": ("genres",)}
LIKES = Inputs()
FOLDED = {"name": "warp", "label": "warp", "unseen-users": "fold-in"}


def inputs_of(name, *overrides, baselines=()):
    """Of a shipped experiment's systems, by label."""
    experiment = load(name, [*overrides, "evaluation.baselines=[]"]).resolve()
    evaluation = experiment.evaluation.model_copy(update={"baselines": tuple(baselines)})
    experiment = experiment.model_copy(update={"evaluation": evaluation})
    rounds = [{"round": 1, "num-clients": 20}, {"round": 2, "num-clients": 15}]
    return system_inputs(finished(experiment, rounds))


def finished(experiment, rounds):
    """A result without metrics and users."""
    return Result(experiment, Path(), {}, {}, {}, pd.DataFrame(rounds), users=[], groups=[])


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("privrec-ml1m", (), {**DESCRIBED, "item_features": ("genres", "eras")}),
        ("privrec-ml1m", ("model.features=false",), {}),
        ("privrec-ml1m", ("step.low-rated='negative'", "dataset.eras=false"),
            {**DESCRIBED, "low_rated": ("negative",)}),
        ("fed-fold-in-ml1m", (),
            {"item_features": ("genres", "eras", "title"), "low_rated": ("0.3",)}),
        ("fed-fold-in-ml1m", ("model.low-rated=0.0", "step.low-rated=0.0",
            "strategy.step.low-rated=0.0"), {"item_features": ("genres", "eras", "title")}),
        ("fedgnn-privrec-ml1m", (), {"test_users": True}),
    ],
)  # fmt: skip
def test_a_federated_systems_inputs_follow_from_its_experiment(name, overrides, expected):
    (found,) = inputs_of(name, *overrides).values()
    assert found is not None
    assert replace(found, settings_tried=None) == Inputs(**expected, client_rounds=35)


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        ({"name": "ease"}, {}),
        ({"name": "neumf"}, {"test_users": True}),
        ({**FOLDED, "features": ["genres", "age"]},
            {"user_features": ("age",), "item_features": ("genres",)}),
        ({"name": "central", "model": {"name": "privrec"}}, DESCRIBED),
        ({"name": "dp-gram", "epsilon": 5.0, "public-features": True},
            {"item_features": ("genres",)}),
        ({"name": "dp-fold-in", "epsilon": 5.0},
            {"item_features": ("genres",), "low_rated": ("0.3",)}),
        ({"name": "central", "model": {"name": "mf"}}, {"test_users": True}),
        ({"name": "ease", "settings-tried": 7}, {"settings_tried": 7}),
    ],
)  # fmt: skip
def test_a_centralised_systems_inputs_follow_from_its_settings(baseline, expected):
    section = Section.model_validate(baseline)
    found = inputs_of("fofl-self-ml1m", baselines=[section])
    assert found[baseline.get("label", baseline["name"])] == Inputs(**expected)


def test_nothing_is_low_rated_where_every_row_is_positive():
    found = inputs_of("fed-fold-in-ml1m", "positive-above=0.0")
    assert found["fed-fold-in-ml1m"] == Inputs(
        item_features=("genres", "eras", "title"), low_rated=("0.3",), client_rounds=35
    )
    experiment = load("fed-fold-in-ml1m").model_copy(update={"positive_above": None})
    result = finished(experiment, [])
    assert system_inputs(result)["fed-fold-in-ml1m"].low_rated == ()  # type: ignore[union-attr]


def test_the_number_of_settings_tried_is_stated_and_changes_nothing_else():
    tried = "evaluation.baselines=[{{name='ease', settings-tried={}}}]"
    plain = load("privrec-ml1m", ["evaluation.baselines=['ease']"])
    told = load("privrec-ml1m", ["settings-tried=9", tried.format(3)])
    assert told.digest() == plain.digest() and told.settings_tried == 9
    assert told.evaluation.settings_tried() == {"ease": 3}
    assert told.evaluation.baseline_settings() == plain.evaluation.baseline_settings()
    with pytest.raises(ExperimentError, match=r"baselines.ease.settings-tried(.*\n)*.*got.*0"):
        load("privrec-ml1m", [tried.format(0)]).resolve()


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ({}, ""),
        ({"a": LIKES, "b": LIKES}, ""),
        ({"a": None}, ""),
        ({"a": Inputs(low_rated=("0.5",))}, "inputs: rated items that are not liked (weight 0.5)"),
        ({"gone": None, "a": LIKES},
            "rows differ in their inputs: gone: not stated; a: likes alone"),
        ({"PrivRec, two stages": Inputs(("age", "city"), ("genres",)),
            "EASE": LIKES, "PrivRec": Inputs(("age", "city"), ("genres",)),
            "iALS": Inputs(low_rated=("0.3", "0.5"), test_users=True), "a": LIKES, "b": LIKES},
            "rows differ in their inputs: iALS: rated items that are not liked (weight 0.3, 0.5) +"
            " known rows of test users in training; PrivRec, two stages / PrivRec: users' age, city"
            " + items' genres; all others: likes alone"),
    ],
)  # fmt: skip
def test_a_line_names_the_inputs_of_all_rows_or_of_those_that_differ(rows, line):
    assert inputs_line(rows) == line


def test_every_table_of_a_run_shows_inputs(run_tiny):
    result = run_tiny("rounds=1", "settings-tried=5", "evaluation.baselines=['popularity', 'ease']")
    label = result.experiment.name
    clients = int(result.rounds["num-clients"].sum())
    features = "users' gender, age, occupation + items' genres"
    differ = f"rows differ in their inputs: {label}: {features}; all others: likes alone"
    tried = f"client-rounds: {label} {clients}; settings tried: {label} 5"
    assert {differ, tried} <= set(result_lines(result))
    comparison = compare([result])
    for form in ("markdown", "latex"):
        text = comparison_text(comparison, form)
        assert differ in text and tried in text
    table = pd.read_csv(io.StringIO(comparison_text(comparison, "csv")), index_col=0)
    assert table.loc[label, "user_features"] == "gender, age, occupation"
    assert table.loc[label, "client_rounds"] == clients
    assert table.loc["ease", "test_users"] == "no"
    assert report([result]).count(differ.replace("'", "&#39;")) == 5  # two tables, a warning


@pytest.mark.parametrize(
    ("settings", "columns"),
    [
        ((), ["hits@5"]),
        (("evaluation.shown=['recall@5', 'mrr']",), ["recall@5", "mrr"]),
        (("evaluation.shown=['recall@20']",), ["hits@5"]),
    ],
)
def test_the_printed_table_has_the_metrics_that_the_experiment_names(run_tiny, settings, columns):
    result = run_tiny("rounds=1", "evaluation.baselines=['popularity']", *settings)
    heads = [str(column.header) for column in summary_table(result).columns[1:]]
    assert heads == columns
    assert deciding_metric(result) == columns[0]


def test_the_answer_names_popularity_and_the_strongest_system_of_equal_inputs(run_tiny):
    """PrivRec with the users' and items' features has inputs that the others have not."""
    bare = ("model={name='mf', factors=2}", "evaluation.fine-tune={epochs=0}")
    baselines = "evaluation.baselines=['popularity', 'ease', 'random']"
    result = run_tiny("rounds=1", baselines, *bare, output="bare")
    best = max(("popularity", "ease"), key=lambda label: result.baselines[label]["hits@5"])
    told = answer_line(result)
    assert f"than {best}, the strongest baseline of equal inputs" in told
    assert "than popularity" in told and "random" not in told
    featured = run_tiny("rounds=1", baselines, output="featured")
    assert f"{best}, the strongest baseline though its inputs differ" in answer_line(featured)


# Total privacy cost of the private runs of a table: the sum of their ledgers, or the reason why
# there is none.

BY_CLIENT = "split.stream=client"
NOISE = "privacy={clip-norm=1.0, noise-multiplier=2.0, delta=1e-5}"


@pytest.fixture
def two(run_tiny):
    """Two private runs with other seeds."""
    return [run_tiny(NOISE, f"seed={seed}", output=f"run{seed}") for seed in range(2)]


def added_up(runs):
    """Epsilon of all lines of the ledgers at delta 1e-5, read by hand."""
    accountant = Accountant("pld")
    for file in [file for run in runs for file in run.folder.rglob("privacy.jsonl")]:
        for charge in map(json.loads, file.read_text().splitlines()):
            accountant.step(from_record(charge["event"]))
    return accountant.epsilon(1e-5).epsilon


def test_the_total_is_that_of_all_ledgers(two):
    (line,) = shown_together([run.folder for run in two])
    total = added_up(two)
    assert f"The 2 private runs on synthetic that are shown cost epsilon {total:.4g}" in line
    assert total > max(run.rounds["epsilon"].iloc[-1] for run in two)
    assert shown_together([two[0].folder] * 2) == []  # one run, named twice
    assert line.replace("'", "&#39;") in report(two)
    assert "private runs on" not in report(two[:1])
    ledger = two[0].folder / "privacy.jsonl"
    ledger.write_text(20 * ledger.read_text())
    (line,) = shown_together([run.folder for run in two])
    assert f"cost epsilon {added_up(two):.4g} at delta" in line


@pytest.mark.slow
def test_a_run_and_its_private_baselines_have_a_joint_epsilon(run_tiny, tmp_path):
    """By all ledgers of the run, added up by hand; above either, below their sum."""
    systems = "evaluation.baselines=['popularity', {name='dp-popularity', epsilon=5.0}]"
    result = run_tiny("privacy={clip-norm=1.0, epsilon=5.0, delta=1e-5}", systems)
    joint = added_up([result])
    assert 5 < joint < 10
    told = f"The 2 private systems of this run cost epsilon {joint:.4g} at delta 1e-05 together"
    assert told in result.privacy[-1] and told in report([result])
    alone = run_tiny("privacy={clip-norm=1.0, epsilon=5.0}", output="alone")
    assert "private systems of this run" not in " ".join(alone.privacy)


def test_a_run_and_a_baseline_of_another_adjacency_have_no_joint_epsilon(run_tiny):
    systems = "evaluation.baselines=[{name='dp-popularity', adjacency='add-remove'}]"
    assert "no total epsilon" in run_tiny(NOISE, systems, BY_CLIENT).privacy[-1]


def test_runs_without_privacy_and_on_other_data_are_not_added_up(two, run_tiny):
    folders = [run.folder for run in two]
    plain = run_tiny(output="plain").folder
    other = run_tiny(NOISE, "dataset.items=31", output="other").folder
    assert shown_together([plain, folders[0], other]) == []
    assert shown_together([plain, *folders, other]) == shown_together(folders)


POISSON = "sampler={name='poisson', cohort=6}", "privacy.adjacency=add-remove", BY_CLIENT


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (POISSON, "no total epsilon.*different adjacencies.*add-remove and replace-one"),
        (("privacy.noise-multiplier=0.0",), "infinite total epsilon"),
    ],
)
def test_the_reason_why_there_is_no_total_is_given(two, run_tiny, settings, reason):
    other = run_tiny(NOISE, *settings, output="other")
    (line,) = shown_together([two[0].folder, other.folder])
    assert re.search(reason, line)
