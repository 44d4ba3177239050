# SPDX-License-Identifier: Apache-2.0
"""Comparisons of runs: the pairing of users, and refusals."""

from io import StringIO

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedrec.errors import ExperimentError
from fedrec.experiment.schema import load
from fedrec.report.comparison import compare, named, paired_tests
from fedrec.report.formats import (
    comparison_cells,
    comparison_notes,
    comparison_terminal,
    comparison_text,
)
from fedrec.runs.folder import Result


@pytest.fixture
def result(tiny_experiment, tmp_path):
    def make(name="one", *, seed=0, users, baselines=None, clients=None, **changes):
        experiment = load({**tiny_experiment(), "name": name, "seed": seed, **changes})
        index = pd.Index(range(len(users)) if clients is None else clients, name="client")
        tables = {
            label: pd.DataFrame({"hits@10": values}, index=index)
            for label, values in (baselines or {}).items()
        }
        own = pd.DataFrame({"hits@10": users}, index=index)
        return Result(
            experiment=experiment,
            folder=tmp_path / f"{name}-{seed}-{experiment.rounds}",
            metrics={"hits@10": float(np.mean(users))},
            before_fine_tuning={},
            baselines={k: {"hits@10": float(np.mean(v))} for k, v in (baselines or {}).items()},
            rounds=pd.DataFrame({"round": [1]}),
            users=own,
            groups=pd.DataFrame(index=pd.Index([], name="group")),
            baseline_users=tables,
        )

    return make


@pytest.fixture(autouse=True)
def _no_folders(monkeypatch):
    monkeypatch.setattr("fedrec.report.comparison.is_private", lambda result, label: False)


def test_systems_are_paired_by_user(result):
    own, other = [0.5, 0.2, 0.9, 0.4, 0.7], [0.1, 0.2, 0.3, 0.5, 0.2]
    found = compare([result(users=own, baselines={"popularity": other})])
    assert found.reference == "one"
    test = found.table.loc["popularity"]
    assert test.t_p == pytest.approx(stats.ttest_rel(other, own).pvalue)
    assert found.table.loc["popularity", "t_holm"] == pytest.approx(test.t_p)


def test_users_without_a_value_do_not_count(result):
    own, other = [1.0, np.nan, 0.5, 0.25], [0.5, 1.0, np.nan, 0.5]
    with pytest.raises(ValueError, match="two users"):
        paired_tests([np.subtract(own[:2], other[:2])])
    assert compare([result(users=own, baselines={"x": other})]).table.loc["x", "users"] == 2
    with pytest.raises(ExperimentError, match="tested on different users"):
        compare([result(users=own[:2], baselines={"x": other[:2]})])


def test_runs_that_differ_in_their_seed_alone_are_one_system_and_users_count_once(result):
    base = {"popularity": [0.0, 0.0]}
    runs = [
        result(seed=0, users=[0.4, 0.2], baselines=base, clients=[0, 1]),
        result(seed=1, users=[0.6, 0.8], baselines=base, clients=[1, 2]),
    ]
    found = compare(runs, against="popularity")
    assert list(found.table.index) == ["one", "popularity"]
    test = found.table.loc["one"]
    assert test.users == 3
    assert test.difference == pytest.approx(np.mean([0.4, (0.2 + 0.6) / 2, 0.8]))
    assert found.table.loc["one", "seeds"] == 2
    assert found.table.loc["one", "sd"] == pytest.approx(np.std([0.3, 0.7], ddof=1))


def test_what_only_watches_or_hosts_a_run_makes_no_other_system(result):
    watched = {"callbacks": ["progress"], "engine": {"name": "serial", "nodes": 2}}
    runs = [
        result(seed=0, users=[0.4, 0.2], baselines={"popularity": [0.0, 0.1]}),
        result(seed=1, users=[0.6, 0.8], baselines={"popularity": [0.0, 0.1]}, **watched),
    ]
    assert list(compare(runs).table.index) == ["one", "popularity"]


def test_settings_of_a_sweep_are_systems_over_all_their_seeds(result):
    """The users of other seeds are others; each setting is compared under the same seed."""
    runs = [
        result(
            seed=seed,
            users=[0.1, 0.2, 0.4 + seed / 10],
            clients=[3 * seed, 3 * seed + 1, 3 * seed + 2],
            rounds=rounds,
        )
        for rounds in (2, 5)
        for seed in (0, 1)
    ]
    found = compare(runs)
    assert list(found.table.index) == ["one (rounds=2)", "one (rounds=5)"]
    assert found.table.loc["one (rounds=5)", "users"] == 6
    assert [run.label for run in named(runs)][1] == "one (rounds=2), seed 1"


@pytest.mark.parametrize(
    "changes", [{"positive-above": 4.0}, {"split": {"name": "user-holdout", "test-users": 0.5}}]
)
def test_other_data_are_refused(result, changes):
    runs = [result("one", users=[0.1, 0.2]), result("two", users=[0.1, 0.2], **changes)]
    with pytest.raises(ExperimentError, match="cannot be compared"):
        compare(runs)


def test_unknown_names_are_reported(result):
    one = result(users=[0.1, 0.2], baselines={"popularity": [0.0, 0.1]})
    with pytest.raises(ExperimentError, match="unknown metric 'hits@99'"):
        compare([one], metric="hits@99")
    with pytest.raises(ExperimentError, match="unknown system 'nobody'"):
        compare([one], against="nobody")
    with pytest.raises(ExperimentError, match="only one system to compare"):
        compare([result(users=[0.1, 0.2])])


def test_formats(result):
    found = compare([result("a_b", users=[0.5, 0.2], baselines={"popularity": [0.1, 0.4]})])
    heads, *rows = comparison_cells(found)
    assert all(len(row) == len(heads) for row in rows)
    assert heads[1] == "private" and [row[1] for row in rows] == ["no", "no"]
    table = pd.read_csv(pd.io.common.StringIO(comparison_text(found, "csv")), index_col=0)
    assert table.loc["popularity", "difference"] == pytest.approx(-0.1)
    markdown = comparison_text(found, "markdown").splitlines()
    assert sum(line.startswith("|") for line in markdown) == 4
    notes = [line for line in markdown if line.startswith("- ")]
    assert notes[0].startswith("- differences to a_b, over 2 users; 95% bootstrap intervals")
    latex = comparison_text(found, "latex")
    assert "a\\_b &" in latex and latex.count("\\\\\n") == 3
    assert " $-0.1000$ & [$" in latex and " -0" not in latex


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "+x", "-x", "@x", "\tx"])
def test_names_of_systems_are_no_formulas_in_csv(result, name):
    found = compare([result(users=[0.0, 1.0], baselines={name: [1.0, 0.5]})])
    printed = pd.read_csv(StringIO(comparison_text(found, "csv")), index_col=0)
    expected = found.table.rename(index={name: f"'{name}"})
    assert list(printed.index) == list(expected.index)
    np.testing.assert_array_equal(printed["difference"], expected["difference"])
    plain = compare([result(users=[0.0, 1.0], baselines={"x": [1.0, 0.5]})])
    assert comparison_text(plain, "csv") == plain.table.to_csv()


@pytest.mark.parametrize(
    ("form", "name", "start"),
    [
        ("latex", "[5cm] x", "{}[5cm] x"),  # no argument of the line before
        ("latex", " [x", "{} [x"),
        ("latex", "*x", "{}*x"),
        (
            "latex",
            "lr<1e-3~\\x^2",
            "lr$<$1e-3\\textasciitilde{}\\textbackslash{}x\\textasciicircum{}2 &",
        ),
        ("markdown", "<img src=x>|_y_", "| &lt;img src=x&gt;\\|_y_ |"),
    ],
)
def test_names_of_systems_are_text(result, form, name, start):
    found = compare([result(users=[0.0, 1.0], baselines={name: [1.0, 0.5]})])
    text = comparison_text(found, form)
    assert sum(line.startswith(start) for line in text.splitlines()) == 1 and "<img" not in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_terminal_gets_tables_that_it_can_show(result, width):
    from rich.console import Console

    found = compare([result(users=[0.5, 0.2, 0.9], baselines={"popularity": [0.1, 0.2, 0.3]})])
    assert len(comparison_terminal(found, 200)) == 1
    tables = comparison_terminal(found, width)
    console = Console(width=width)
    with console.capture() as captured:
        for table in tables:
            console.print(table)
    assert len(tables) > 1
    assert all(cell in captured.get() for row in comparison_cells(found) for cell in row)
    assert captured.get().count("popularity") == len(tables)


def test_several_seeds_are_tested_over_seeds_too(result):
    """Many users in favour, under seeds that disagree."""
    random = np.random.default_rng(0)
    gains = (0.3, 0.1, -0.05)
    runs = [
        result(
            seed=seed,
            users=0.4 + gain + random.normal(0, 0.01, 100),
            baselines={"popularity": np.full(100, 0.4)},
            clients=range(100 * seed, 100 * (seed + 1)),
        )
        for seed, gain in enumerate(gains)
    ]
    found = compare(runs, against="popularity")
    own = found.table.loc["one"]
    means = [float(run.users["hits@10"].mean()) - 0.4 for run in runs]
    assert own.common_seeds == 3 and own.seed_p == pytest.approx(stats.ttest_1samp(means, 0).pvalue)
    assert own.seed_p > 0.2 and own.t_p < 0.001
    heads, _, row = comparison_cells(found)
    cells = dict(zip(heads, row, strict=True))
    assert cells["t, Holm"] == "< .001" and cells["t over seeds, Holm"] == f"{own.seed_p:.3f}"
    assert "(3 seeds)" in cells["hits@10 ± sd over seeds"]
    notes = "\n".join(comparison_notes(found))
    assert "2 degrees of freedom" in notes
    assert found.table.loc["one", "seed_holm"] == pytest.approx(own.seed_p)


def test_centralised_systems_of_other_settings_are_other_systems(result):
    """Whichever run comes first; the same settings in several runs are one system."""
    runs = []
    for epsilon, value in ((5, 0.3), (1, 0.1)):
        private = {"name": "dp-popularity", "epsilon": float(epsilon)}
        tables = {"popularity": [0.2, 0.2], "dp-popularity": [value, value]}
        evaluation = {"baselines": ["popularity", private]}
        users = [0.5, 0.2]
        runs.append(result(f"eps{epsilon}", users=users, baselines=tables, evaluation=evaluation))
    labels = [f"dp-popularity (epsilon={epsilon})" for epsilon in (1, 5)]
    for order in (runs, runs[::-1]):
        means = compare(order).table["mean"]
        assert set(means.index) == {"eps5", "eps1", "popularity", *labels}
        assert list(means[labels]) == pytest.approx([0.1, 0.3])
    assert list(compare(runs[:1]).table.index) == ["eps5", "popularity", "dp-popularity"]
