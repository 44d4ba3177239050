# SPDX-License-Identifier: Apache-2.0
"""The benchmark of targeted perturbation: its grid, its statistics, and continuing after an
interruption."""

from __future__ import annotations

import json
import math
from xml.etree import ElementTree

import pytest
from scipy import stats

from simulations.reproduce.grids import targeted_dp
from simulations.reproduce.grids.targeted_dp import (
    Setting,
    differences,
    interval,
    settings,
    summary,
)


def record(system, select, seed, value, epsilon=0.1, budget=0.3):
    setting = {
        "system": system,
        "epsilon": epsilon,
        "budget": budget,
        "select": select,
        "seed": seed,
    }
    return {"setting": setting, "metrics": {"rmse": value}, "seconds": 1.0}


def test_the_grid_selects_only_where_there_is_something_to_select():
    grid = list(settings(("mf",), (0.1, 3.0), (0.0, 0.5), 2))
    assert len(grid) == len(set(grid)) == 2 * (1 + 2 * (1 + 2))
    assert {one.select for one in grid if one.budget in (0.0, 1.0)} == {"all"}
    assert {one.select for one in grid if one.budget == 0.5} == {"stereotypical", "random"}


@pytest.mark.parametrize("system", targeted_dp.SYSTEMS)
def test_settings_are_those_of_the_experiment(system):
    from fedrec.components.registry import PERTURBATION
    from fedrec.experiment.loading import load

    experiment = load(
        f"targeted-dp-{system}-ml1m", Setting(system, 0.1, 0.7, "random", 4).overrides()
    )
    perturb = experiment.settings(PERTURBATION)
    assert experiment.seed == 4
    assert (perturb.epsilon, perturb.budget, perturb.select) == (0.1, 0.7, "random")
    nothing = load(f"targeted-dp-{system}-ml1m", Setting(system, 0.0, 1.0, "all", 0).overrides())
    assert nothing.settings(PERTURBATION).budget == 1


def test_intervals_are_students():
    values = [0.9, 1.1, 1.3]
    mean, half = interval(values)
    low, high = stats.t.interval(0.95, 2, loc=mean, scale=stats.sem(values))
    assert (mean - half, mean + half) == pytest.approx((low, high))
    assert interval([0.7]) == (0.7, math.inf)


def test_rows_per_setting_and_paired_differences():
    records = [
        record("mf", "random", 0, 1.0),
        record("mf", "random", 1, 1.2),
        record("mf", "stereotypical", 0, 1.1),
    ]
    records += [record("mf", "stereotypical", 1, 1.5), record("metamf", "stereotypical", 0, 9.0)]
    rows = {(row["system"], row["select"]): row for row in summary(records, "rmse")}
    assert rows["mf", "random"]["mean"] == pytest.approx(1.1) and rows["mf", "random"]["seeds"] == 2
    (gap,) = differences(records, "rmse")
    assert (
        gap["system"] == "mf"
        and gap["targeted - random"] == pytest.approx(0.2)
        and gap["seeds"] == 2
    )
    assert summary(records, "auc") == []


def test_costs_are_paired_by_seed_within_a_system_and_between_systems():
    plain = {("mf", 0): 1.0, ("mf", 1): 1.2, ("metamf", 0): 0.9, ("metamf", 1): 1.0}
    under = {("mf", 0): 1.5, ("mf", 1): 1.4, ("metamf", 0): 1.0, ("metamf", 1): 1.4, ("mf", 2): 7.0}
    records = [
        record(system, "all", seed, value, 0.0, 1.0) for (system, seed), value in plain.items()
    ]
    records += [
        record(system, "all", seed, value, 0.1, 0.0) for (system, seed), value in under.items()
    ]
    found = {row["system"]: row for row in targeted_dp.losses(records, "rmse")}
    half = stats.t.ppf(0.975, 1) * stats.sem([0.5, 0.2])
    assert found["mf"]["loss"] == pytest.approx(0.35) and found["mf"][
        "half-width"
    ] == pytest.approx(half)
    assert found["metamf"]["loss"] == pytest.approx(0.25) and found["mf"]["seeds"] == 2
    (row,) = targeted_dp.systems(records, "rmse")
    gaps = [0.1 - 0.5, 0.4 - 0.2]
    assert row["metamf - mf"] == pytest.approx(-0.1) and (row["epsilon"], row["budget"]) == (
        0.1,
        0.0,
    )
    assert row["half-width"] == pytest.approx(stats.t.ppf(0.975, 1) * stats.sem(gaps))


def test_figure_4_joins_errors_and_the_attackers_success(tmp_path):
    records = [record("mf", "random", seed, value) for seed, value in ((0, 1.0), (1, 1.2))]
    records += [record("mf", "stereotypical", 0, 1.4), record("metamf", "random", 0, 2.0)]
    for select, value in (("random", 0.7), ("stereotypical", 0.6), ("all", 0.9)):
        one = record("attack", select, 0, 0.0)
        records.append({**one, "metrics": {"balanced-accuracy": value, "auc": value}})
    rows = {row["select"]: row for row in targeted_dp.tradeoff(records)}
    assert set(rows) == {"random", "stereotypical"}
    assert (
        rows["random"]["rmse of mf"] == pytest.approx(1.1)
        and rows["random"]["rmse of metamf"] == 2.0
    )
    assert rows["stereotypical"]["balanced-accuracy"] == 0.6 and math.isnan(
        rows["stereotypical"]["rmse of metamf"]
    )
    (tmp_path / "results.json").write_text(json.dumps(records))
    targeted_dp._write(tmp_path)
    for system, count in (("mf", 2), ("metamf", 1)):
        drawn = [one.tag for one in ElementTree.parse(tmp_path / f"tradeoff-{system}.svg").iter()]
        assert drawn.count("{http://www.w3.org/2000/svg}circle") == count
    assert (tmp_path / "tradeoff.csv").read_text().count("\n") == 3


def test_what_is_done_is_not_done_again(tmp_path):
    asked = []

    def run(setting, overrides):
        asked.append(setting.seed)
        return {"rmse": 1.0}

    first, second = Setting("mf", 0.1, 0.3, "random", 0), Setting("mf", 0.1, 0.3, "random", 1)
    targeted_dp._work(tmp_path, [first], run, [])
    targeted_dp._work(tmp_path, [first, second], run, [])
    assert asked == [0, 1] and len(json.loads((tmp_path / "results.json").read_text())) == 2
    targeted_dp._write(tmp_path)
    lines = (tmp_path / "accuracy.csv").read_text().splitlines()
    assert lines[0].startswith("system,epsilon,budget,select,metric,mean") and len(lines) == 2
