# SPDX-License-Identifier: Apache-2.0
"""The inputs of systems against what is known of each of them, and their codes in tables."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from fedrec.experiment.sections import Section
from fedrec.report.comparison import compare
from fedrec.report.formats import comparison_cells, comparison_text
from fedrec.report.input_codes import budgets, input_codes
from fedrec.report.inputs import Inputs, system_inputs
from fedrec.report.page.page import report
from fedrec.report.summary import input_lines, summary_table
from fedrec.runs.result import Result

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
        ("privrec-ml1m", ("dataset.eras=false",), DESCRIBED),
        ("privrec-ml1m", ("model.features=false",), {}),
        ("privrec-ml1m", ("step.low-rated='negative'", "dataset.eras=false"),
            {**DESCRIBED, "low_rated": ("negative",)}),
        ("fofl-self-ml1m", (), {}),
        ("fed-fold-in-ml1m", (),
            {"item_features": ("genres", "eras", "title"), "low_rated": ("0.3",)}),
        ("fed-fold-in-ml1m", ("model.low-rated=0.0", "step.low-rated=0.0",
            "strategy.step.low-rated=0.0"), {"item_features": ("genres", "eras", "title")}),
        ("fed-fold-in-ml1m", ("model.word-variance=0.0",),
            {"item_features": ("genres", "eras"), "low_rated": ("0.3",)}),
        ("privrec-ml1m", ("dataset.titles=true", "dataset.eras=false"), DESCRIBED),
        ("fedgnn-privrec-ml1m", (), {"test_users": True}),
        ("fedmf-ml1m", (), {"test_users": True}),
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
        ({"name": "ials"}, {}),
        ({"name": "neumf"}, {"test_users": True}),
        ({"name": "neumf", "unseen-users": "fold-in"}, {}),
        ({**FOLDED, "features": ["genres", "age"]},
            {"user_features": ("age",), "item_features": ("genres",)}),
        ({"name": "privrec"}, DESCRIBED),
        ({"name": "dp-gram", "epsilon": 5.0}, {}),
        ({"name": "dp-gram", "epsilon": 5.0, "public-features": True},
            {"item_features": ("genres",)}),
        ({"name": "dp-fold-in", "epsilon": 5.0},
            {"item_features": ("genres",), "low_rated": ("0.3",)}),
        ({"name": "dp-fold-in", "epsilon": 5.0, "low-rated": 0.0}, {"item_features": ("genres",)}),
        ({"name": "central", "model": {"name": "privrec"}}, DESCRIBED),
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


def test_inputs_of_what_is_not_installed_here_are_not_stated():
    gone = Section(name="gone.package:Baseline")
    assert inputs_of("fofl-self-ml1m", baselines=[gone])["gone.package:Baseline"] is None
    assert input_codes({"gone": None, "ease": LIKES}).codes == {"gone": "?", "ease": "-"}


def test_the_number_of_settings_tried_is_stated_and_changes_nothing_else():
    plain = load("privrec-ml1m", ["evaluation.baselines=['ease', {name='warp', factors=4}]"])
    told = load(
        "privrec-ml1m",
        [
            "settings-tried=9",
            "evaluation.baselines=[{name='ease', settings-tried=3}, "
            "{name='warp', factors=4, settings-tried=2}]",
        ],
    )
    assert told.digest() == plain.digest() and told.settings_tried == 9
    assert told.evaluation.settings_tried() == {"ease": 3, "warp": 2}
    assert told.evaluation.baseline_settings() == plain.evaluation.baseline_settings()
    with pytest.raises(ExperimentError, match=r"baselines.ease.settings-tried(.*\n)*.*got.*0"):
        load("privrec-ml1m", ["evaluation.baselines=[{name='ease', settings-tried=0}]"]).resolve()


def test_codes_are_of_inputs_and_the_warning_names_the_fewer_rows():
    rows = {
        "PrivRec": Inputs(("age",), ("genres", "eras")),
        "fold-in": Inputs((), ("genres", "eras", "gear"), ("0.3",)),
        "EASE": Inputs(low_rated=("0.5",)),
        "iALS": Inputs(low_rated=("0.5",), test_users=True),
    }
    found = input_codes(rows)
    assert found.codes == {
        "PrivRec": "U G E",
        "fold-in": "G E Ge L",
        "EASE": "L",
        "iALS": "L T",
    }
    assert found.legend == (
        "inputs: U: users' age; G: items' genres; E: items' eras; Ge: items' gear; L: rated items"
        " that are not liked (weight 0.3, 0.5); T: known rows of test users in training"
    )
    assert found.warning == (
        "rows differ in their inputs: PrivRec alone has users' age; PrivRec and fold-in alone have"
        " items' genres and items' eras; fold-in alone has items' gear; PrivRec has no rated items"
        " that are not liked; iALS alone has known rows of test users in training"
    )
    same = input_codes({"a": rows["EASE"], "b": rows["EASE"]})
    assert same.warning == "" and same.codes == {"a": "L", "b": "L"}


def test_different_features_of_users_have_codes_of_their_own():
    rows = {"a": Inputs(("age",)), "b": Inputs(("age", "city")), "c": Inputs((), ("Units",))}
    assert input_codes(rows).codes == {"a": "U1", "b": "U2", "c": "Un"}


def test_of_many_rows_a_warning_counts_the_rest():
    rows = {str(n): Inputs(test_users=n < 6) for n in range(12)}
    assert "0, 1 and 4 others alone have" in input_codes(rows).warning


def test_budgets_are_told_where_they_are_known():
    rows = {"a": Inputs(client_rounds=1600, settings_tried=4), "b": Inputs(), "c": None}
    assert budgets(rows) == ["client-rounds: a 1,600; settings tried: a 4"]
    assert budgets({"b": LIKES}) == []


def test_every_table_of_a_run_shows_inputs(run_tiny):
    result = run_tiny("rounds=1", "settings-tried=5", "evaluation.baselines=['popularity', 'ease']")
    label = result.experiment.name
    clients = int(result.rounds["num-clients"].sum())
    console = Console(width=120, record=True)
    console.print(summary_table(result))
    text = console.export_text()
    assert "inputs" in text and "U G" in text
    differ = f"rows differ in their inputs: {label} alone has users' gender, age and occupation"
    lines = input_lines(result)
    assert any(line.startswith(differ) for line in lines)
    assert f"client-rounds: {label} {clients}; settings tried: {label} 5" in lines
    found = compare([result])
    heads, first, *rest = comparison_cells(found)
    at = {name: heads.index(name) for name in ("inputs", "client-rounds", "settings tried")}
    assert [first[place] for place in at.values()] == ["U G", f"{clients}", "5"]
    assert all([row[place] for place in at.values()] == ["-", "-", "?"] for row in rest)
    for form in ("markdown", "latex"):
        assert "U G" in comparison_text(found, form) and differ in (
            comparison_text(found, form).replace("&#x27;", "'")
        )
    table = pd.read_csv(pd.io.common.StringIO(comparison_text(found, "csv")), index_col=0)  # type: ignore[attr-defined]
    assert table.loc[label, "user_features"] == "gender, age, occupation"
    assert table.loc[label, "client_rounds"] == clients
    assert table.loc["ease", "test_users"] == "no"
    page = report([result])
    assert (
        page.count(">inputs</th>") == 2 and "U: users&#39; gender" in page and differ[:40] in page
    )
