# SPDX-License-Identifier: Apache-2.0
"""The study of UPC-SDG: its measurements, that they are made once, and its tables."""

import json

import pytest

from benchmarks import upc_sdg, upc_sdg_choices, upc_sdg_figures
from fedrec.components.registry import BASELINE, resolve
from fedrec.experiment.loading import load


@pytest.fixture
def measuring(monkeypatch):
    """Figures that depend on the seed, and a list of the calls."""
    asked = []

    def measure(data, perturb, seed, part, models, disclosed=True):
        asked.append((perturb, seed, tuple(models)))
        values = {f"both {metric}": 0.1 + 0.02 * seed for metric in upc_sdg.METRICS}
        told = {"linked": 0.5 if perturb else 1.0} if disclosed else {}
        return {"utility": dict.fromkeys(models, values), **told}

    monkeypatch.setattr(upc_sdg, "measure", measure)
    return asked


def test_what_is_there_is_not_measured_again(measuring, tmp_path):
    named = upc_sdg.settings("office")
    some = ("original", "upc-sdg k=0.2 gamma=0.9", "ablation-f k=0.2 gamma=0.9")
    wanted = [(name, named[name], seed) for seed in range(2) for name in some]
    file = tmp_path / "results.json"
    upc_sdg.work(file, wanted, "office", {"bprmf": {}}, 4)
    upc_sdg.work(file, wanted, "office", {"bprmf": {}})
    assert len(measuring) == 6
    rows = upc_sdg_figures.summary(json.loads(file.read_text()))
    assert [(row["setting"], row["seeds"]) for row in rows] == [(name, 2) for name in some]
    assert rows[0]["bprmf both Recall"] == pytest.approx(0.11)
    assert rows[0]["+- bprmf both Recall"] == pytest.approx(0.02 / 2**0.5)
    assert upc_sdg_figures.table_2(rows, ["bprmf"])[-1].startswith("| X+ | .1100 ± .0141 / ")
    assert upc_sdg_figures.table_3(rows, "bprmf")[-1] == "| f | .1100 ± .0141, linked .500 ± .000 |"
    upc_sdg.write(tmp_path, ["bprmf"])
    assert {"figure-2.svg", "utility-linkage.svg", "tables.md", "results.csv"} <= {
        file.name for file in tmp_path.iterdir()
    }


def test_slow_recommenders_learn_from_the_tables_of_table_2_alone(measuring, tmp_path):
    named = upc_sdg.settings("office")
    wanted = [(name, named[name], 0) for name in ("original", "ablation-f k=0.2 gamma=0.9")]
    models = {"bprmf": {}, **upc_sdg.SLOW_MODELS["office"]}
    upc_sdg.work(tmp_path / "results.json", wanted, "office", models)
    assert [asked for _, _, asked in measuring] == [tuple(models), ("bprmf",)]


def test_a_recommender_that_is_missing_is_measured_alone(measuring, tmp_path):
    named, file = upc_sdg.settings("office"), tmp_path / "results.json"
    wanted = [("ablation-f k=0.2 gamma=0.9", named["ablation-f k=0.2 gamma=0.9"], 0)]
    upc_sdg.work(file, wanted, "office", {"bprmf": {}})
    upc_sdg.work(file, wanted, "office", {"bprmf": {}, "ease": {}})
    assert [models for _, _, models in measuring] == [("bprmf",), ("ease",)]
    (record,) = json.loads(file.read_text())
    assert set(record["utility"]) == {"bprmf", "ease"} and record["linked"] == 0.5
    upc_sdg.work(file, [(*wanted[0][:2], 1)], "office", {"bprmf": {}})
    (row,) = upc_sdg_figures.summary(json.loads(file.read_text()))
    assert row["bprmf both Recall"] == pytest.approx(0.11) and "+- bprmf both Recall" in row
    assert row["ease both Recall"] == pytest.approx(0.1) and "+- ease both Recall" not in row


def test_a_setting_of_a_recommender_exists():
    for data, models in upc_sdg.MODELS.items():
        for name, options in {**models, **upc_sdg.SLOW_MODELS[data]}.items():
            assert resolve(BASELINE, name).Config.parse(options)
    for data, name in upc_sdg_choices.GRIDS:
        for options in upc_sdg_choices.recommenders(data, name):
            assert resolve(BASELINE, name).Config.parse(options)


def test_curves_have_their_own_points():
    rows = [
        {"setting": f"upc-sdg k={k} gamma={gamma}", "linked": k, "bprmf both Recall": gamma / 10}
        for k in (0.2, 0.8)
        for gamma in (0.9, 0.1)
    ]
    rows.append({"setting": "randomised-response eps=4", "linked": 0.1, "bprmf both Recall": 0.02})
    (panel,) = upc_sdg_figures.linkage(rows, {"x": "bprmf both Recall"})
    assert panel.lines == {
        "upc-sdg gamma=0.9": [(0.2, 0.09, "k=0.2"), (0.8, 0.09, "k=0.8")],
        "upc-sdg gamma=0.1": [(0.2, 0.01, "k=0.2"), (0.8, 0.01, "k=0.8")],
        "randomised-response": [(0.1, 0.02, "eps=4")],
    }


def test_every_setting_can_be_asked_for():
    for data, dataset in upc_sdg.DATASETS.items():
        generators = upc_sdg_choices.generators() if data == "office" else {}
        for name, perturb in {**upc_sdg.settings(data), **generators}.items():
            table = {
                "name": "x",
                "rounds": 1,
                "dataset": {"name": dataset},
                "split": {"name": "published"},
            }
            load(
                {
                    **table,
                    "sampler": {"name": "fixed-size", "cohort": 1},
                    **({"perturb": perturb} if perturb else {}),
                }
            )
            assert data == "office" or not name.startswith("noisy")
