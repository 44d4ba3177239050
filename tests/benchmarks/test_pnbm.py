# SPDX-License-Identifier: Apache-2.0
"""The study of PNBM's figures: its settings, that finished work is not repeated, and its tables."""

import json

import pytest

from benchmarks import pnbm, pnbm_choices
from fedrec.components.registry import BASELINE, resolve


@pytest.fixture
def measuring(monkeypatch):
    """Errors that depend on the settings, and a list of the calls."""
    asked = []

    def measured(system, settings, epsilon, fold, seed, part):
        asked.append((system, epsilon, fold, seed, part))
        own = {"epsilon": 2 * epsilon} if epsilon else {}
        return {
            "rmse": 1
            + 0.01 * fold
            + 0.1 * seed * (part == "test")
            + sum(map(float, settings.values())),
            **own,
        }

    monkeypatch.setattr(pnbm, "measured", measured)
    monkeypatch.setattr(pnbm, "GRIDS", {"item-mean": {}, "dpsgd-mf": {"epochs": [3, 2, 5]}})
    return asked


def test_settings_are_chosen_on_validation_rows_and_work_is_done_once(measuring, tmp_path):
    jobs = pnbm.work_list([1.0, 5.0], 2, ("item-mean", "dpsgd-mf"))
    assert len(jobs) == len(set(jobs)) == 5 + 2 * 2 * 5
    for _ in range(2):
        pnbm.test(tmp_path, jobs)
    choosing = [one for one in measuring if one[-1] == "validation"]
    assert len(choosing) == 1 + 2 * 3 and {one[2] for one in choosing} == {pnbm.SCREEN}
    assert len(measuring) == len(choosing) + len(jobs)
    chosen = json.loads((tmp_path / "chosen.json").read_text())
    assert chosen["dpsgd-mf 5"]["settings"] == {"epochs": 2}
    rows = pnbm.rows_of(json.loads((tmp_path / "results.json").read_text()))
    assert [
        (row["system"], row["nominal epsilon"], row["true epsilon"], row["seeds"]) for row in rows
    ] == [
        ("dpsgd-mf", 1.0, 2.0, 2),
        ("dpsgd-mf", 5.0, 10.0, 2),
        ("item-mean", "", "", 1),
    ]
    assert rows[0]["rmse"] == pytest.approx(3.03 + 0.05)
    assert rows[0]["spread over seeds"] == pytest.approx(0.1 / 2**0.5)
    drawn = pnbm.panel(rows, "x")
    assert drawn.lines == {"dpsgd-mf": [(1.0, rows[0]["rmse"]), (5.0, rows[1]["rmse"])]}
    assert drawn.levels == {"item-mean": rows[2]["rmse"]}


def test_a_fold_that_is_missing_leaves_its_seed_out(measuring, tmp_path):
    pnbm.test(tmp_path, pnbm.work_list([1.0], 2, ("dpsgd-mf",))[:7])
    assert [
        row["seeds"] for row in pnbm.rows_of(json.loads((tmp_path / "results.json").read_text()))
    ] == [1]


def test_every_setting_of_the_grids_exists():
    from fedrec.experiment.loading import load

    for system, grid in pnbm.GRIDS.items():
        if system == "pnbm-sound":
            continue
        config = resolve(BASELINE, "pnbm" if system == pnbm.UNTRAINED else system).Config
        for key, values in grid.items():
            for value in values:
                config.parse({key: value})
    assert load("pnbm-sound-ml100k").privacy is not None and load("pnbm-ml100k").privacy is None


def test_what_is_varied_around_the_choices_are_other_settings_of_the_same_systems():
    for system, changes in pnbm_choices.VARIED.items():
        for settings in pnbm_choices.CHOSEN[system].values():
            if system == "pnbm-sound":
                assert {*changes, *settings} <= {*pnbm.GRIDS[system], "clip-norm", "damping"}
                continue
            config = resolve(BASELINE, system).Config
            base = config.parse(settings)
            for key, values in changes.items():
                for value in values:
                    assert config.parse({**settings, key: value}) != base


def test_differences_are_paired_by_seed():
    records = [
        {"system": "x", "epsilon": 1.0, "change": change, "seed": seed, "rmse": rmse}
        for seed, base in enumerate((1.0, 1.2))
        for change, rmse in (({}, base), ({"steps": 2}, base - 0.1 - 0.02 * seed))
    ]
    assert pnbm_choices.shown(records)[1] == ('x 1 {"steps": 2}: 0.9900, -0.1100 ± 0.0141 (2)')
