# SPDX-License-Identifier: Apache-2.0
"""FedRec-Bench: an experiment for each system, a protocol that no system can change, and a probe
that finds held-out items where they are kept out of the negatives."""

from dataclasses import replace

import numpy as np
import pytest

from fedrec.experiment.loading import load
from simulations.reproduce.bench import (
    CHANCE,
    METRICS,
    PROBE,
    never_drawn,
    protocol_table,
)
from simulations.reproduce.recorded import find, recorded
from simulations.studies.runs import folder_of, run_study

STUDIES = find("bench", None)
RECORDED = {name: table for name, table in recorded().items() if name.startswith("bench/")}
LEAVE_ONE_OUT = {"name": "leave-one-out", "order": "temporal"}


def table_of(task):
    options = dict(task.options)
    overrides = [*options.get("set", []), *options.get("chosen", {}).get(options["protocol"], [])]
    names = ("table", "split", "experiment", "label")
    return protocol_table(*(options.get(name, "") for name in names), overrides, options["tried"])


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.item)
def test_every_task_is_an_experiment_under_the_protocol(study):
    for task in study.tasks:
        experiment = load(table_of(task))
        assert experiment.dataset.name == task.options["table"]["name"]
        assert experiment.split.name == task.options["protocol"] in study.item
        assert experiment.positive_above is None and experiment.task == "ranking"
        assert experiment.evaluation.ks == (10,) and experiment.evaluation.sampled_items == 99
        assert experiment.evaluation.held_out == "test"
        if experiment.split.name == "user-holdout":
            assert experiment.split.options["folds"] == 5
        else:
            assert not experiment.split.options["leaky-negatives"]


def test_a_system_cannot_change_the_protocol(tmp_path):
    (tmp_path / "mine.toml").write_text(
        'name = "mine"\nrounds = 2\npositive-above = 3.0\n[dataset]\nname = "ml-1m"\n'
        '[model]\nname = "mf"\n[step]\nname = "sgd"\nprivate-parameters = ["user.*"]\n'
        '[sampler]\nname = "fixed-size"\ncohort = 4\n[evaluation]\nks = [3]\n'
    )
    overrides = [
        *("split.leaky-negatives=true", "evaluation.held-out=validation", "dataset.name=ml-1m"),
        *("evaluation.final-users=9", "evaluation.masked=both", "positive-above=4.0"),
        "task=rating",
    ]
    dataset = {"name": "ml-100k"}
    file = str(tmp_path / "mine.toml")
    experiment = load(protocol_table(dataset, LEAVE_ONE_OUT, file, "", overrides, 4))
    assert experiment.dataset.name == "ml-100k" and experiment.positive_above is None
    assert not experiment.split.options["leaky-negatives"] and experiment.task == "ranking"
    assert experiment.evaluation.held_out == "test" and experiment.evaluation.ks == (10,)
    assert experiment.evaluation.final_users is None and experiment.evaluation.masked == "real"
    assert experiment.rounds == 2 and experiment.model.name == "mf"


def test_a_study_has_all_numbers_and_bytes_of_the_arrays(tmp_path):
    """A client of FedMF gets a table of 32 factors and a bias for each item, a bias for all, and
    the start of its own, 4 bytes a number; 30 client-rounds are three quarters of a round for
    each of 40 clients. Biases are zero in the first of three rounds, its own always, and then not
    sent. The change of the items that it touches goes up, at most the same."""
    whole = next(study for study in STUDIES if study.item == "synthetic-leave-one-out")
    small = {"name": "synthetic", "users": 40, "items": 150, "mean-interactions": 12}
    fast = ["rounds=3", "sampler.cohort=10"]
    tasks = [
        replace(task, options={**task.options, "table": small, **more})
        for task in whole.tasks
        for more in ({"set": fast} if task.name == "fedmf" else {},)
        if task.name in ("fedmf", "popularity")
    ]
    study = replace(whole, tasks=tuple(tasks))
    folder = folder_of(study, tmp_path, quick=False)
    jobs = study.jobs(folder.path, 1, quick=False)
    assert not run_study(folder, jobs)
    numbers = {
        job.task.name: {one.metric: one for one in job.results()[0]}
        for job in jobs
        if job.results()
    }
    fedmf = numbers["fedmf"]
    assert {*METRICS, PROBE, "gap of discounted-hits@10, activity"} <= fedmf.keys()
    parameters = 150 * (32 + 1) + 1 + (32 + 1)
    zeros = 10 * (150 + 1) + 30
    assert fedmf["bytes down"].value == 4 * (parameters * 30 - zeros) / 40
    assert 0 < fedmf["bytes up"].value <= fedmf["bytes down"].value
    assert fedmf["hits@10"].inputs["client_rounds"] == 30
    assert fedmf["hits@10"].inputs["settings_tried"] == 8
    assert numbers["popularity"][PROBE].value == CHANCE
    assert not {"bytes up", "bytes down", "epsilon"} & numbers["popularity"].keys()


@pytest.mark.parametrize("name", list(RECORDED))
def test_the_probe_of_what_is_recorded_is_at_chance(name):
    """Chance is within twice its interval, or within .01."""
    for row, numbers in RECORDED[name].rows.items():
        probe = numbers[PROBE]
        half = 0.0 if np.isnan(probe.low) else probe.high - probe.mean
        assert abs(probe.mean - CHANCE) <= max(2 * half, 0.01), row


@pytest.fixture
def table(tiny_experiment):
    """An experiment of 40 rounds of everybody, with or without the leak."""

    def make(leaky, **changes):
        made = tiny_experiment() | {
            "dataset": {"name": "synthetic", "users": 60, "items": 250, "mean-interactions": 20},
            "split": {"name": "leave-one-out", "leaky-negatives": leaky},
            "sampler": {"name": "full"},
            "rounds": 40,
        }
        made["evaluation"] = {"ks": [10], "sampled-items": 99, "fine-tune": {"epochs": 0}}
        return made | changes

    return make


@pytest.mark.parametrize("leaky", [False, True])
def test_undrawn_items_of_a_run_reveal_nothing_without_the_leak(table, leaky):
    hits = never_drawn(load(table(leaky)))["hits-of-100@10"]
    assert hits.mean() > 0.97 if leaky else abs(hits.mean() - 0.1) < 0.1


def test_draws_on_the_device_before_ranking_count_too(table):
    """Without rounds in which a user is, only fine-tuning can leak."""
    evaluation = {"ks": [10], "sampled-items": 99, "fine-tune": {"epochs": 1, "negatives": 200}}
    sampler = {"name": "fixed-size", "cohort": 1}
    leaky = load(table(True, evaluation=evaluation, sampler=sampler, rounds=1))
    assert never_drawn(leaky)["hits-of-100@10"].mean() > 0.3


def test_blocks_of_users_are_as_all_users_at_once(table, monkeypatch):
    whole = never_drawn(load(table(False, rounds=2)))
    monkeypatch.setattr("simulations.reproduce.bench._CELLS_AT_ONCE", 1000)  # four users
    parts = never_drawn(load(table(False, rounds=2)))
    for name, values in whole.items():
        np.testing.assert_allclose(parts[name], values, rtol=1e-12)
