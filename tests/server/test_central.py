# SPDX-License-Identifier: Apache-2.0
"""Experiments of centralised systems only, and the saved results of each system."""

import json
import re

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

from fedrec.baselines.private import _chosen_items
from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.evaluation.central import evaluate_baselines
from fedrec.experiment.loading import load
from fedrec.privacy.ledger import Ledger
from fedrec.runs.folder import RunFolder
from server.callbacks.base import Callback
from server.loop import Loop
from server.run import _threads
from simulations import runner

FEDERATED = ("rounds", "model", "step", "strategy", "sampler")
GRAM = {"name": "dp-gram", "epsilon": 4.0, "items": 12}
SYSTEMS = ["popularity", {**GRAM, "label": "first"}, {**GRAM, "label": "second", "epsilon": 8.0}]


@pytest.fixture
def central(tiny_experiment):
    """Makes the table of an experiment of centralised systems only."""

    def make(baselines=SYSTEMS, **more):
        table = {key: value for key, value in tiny_experiment().items() if key not in FEDERATED}
        table["evaluation"] = {"ks": [5], "baselines": baselines}
        return {**table, **more}

    return make


class Stop(Callback):
    """Interrupts a run before a system, like a killed process."""

    def __init__(self, before: int) -> None:
        super().__init__()
        self.before, self.told = before, []

    def on_baseline(self, label, number, total):
        self.told.append((label, number, total))
        if number == self.before:
            raise KeyboardInterrupt


def killed(*given):
    """Replaces the computation of a system between its two releases."""
    raise KeyboardInterrupt


def files(folder):
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.glob("baselines/*/users.csv")
    }


def test_each_system_is_evaluated_as_alone_and_saved(central, tmp_path):
    result = runner.run(central(), output=tmp_path / "run")
    experiment = load(central())
    names = experiment.evaluation.baseline_settings()
    expected = evaluate_baselines(names, Population.of(experiment), held_out="test", ks=(5,))
    assert list(result.baselines) == ["popularity", "first", "second"] and result.metrics == {}
    assert result.baselines["popularity"] == pytest.approx(expected["popularity"])
    for label, users in result.baseline_users.items():
        assert users["hits@5"].mean() == pytest.approx(result.baselines[label]["hits@5"])
        assert users.index.tolist() == result.users.index.tolist()
        assert len(users) == len(result.users) > 0
    again = RunFolder(tmp_path / "run").read_result()
    assert again.baselines == result.baselines and again.privacy == result.privacy
    assert again.baseline_users["first"].to_numpy() == pytest.approx(
        result.baseline_users["first"].to_numpy()
    )


def test_every_private_system_has_a_ledger_and_a_sentence(central, tmp_path):
    result = runner.run(central(), output=tmp_path / "run")
    assert [line.split(":")[0] for line in result.privacy[:-1]] == ["first", "second"]
    assert re.search(r"epsilon (8|7\.99\d*) at delta 1e-05", result.privacy[1])
    assert "Together they cost epsilon" in result.privacy[-1]
    for label, epsilon in (("first", 4.0), ("second", 8.0)):
        ledger = Ledger(tmp_path / "run" / "baselines" / label / "privacy.jsonl", "pld")
        assert [charge.event.phase for charge in ledger.charges] == ["counts", "gram"]
        assert ledger.spent(1e-5).epsilon == pytest.approx(epsilon, rel=1e-3)
    assert not (tmp_path / "run" / "baselines" / "popularity" / "privacy.jsonl").exists()


@pytest.mark.parametrize("before", [1, 2, 3])
def test_broken_off_between_two_systems_nothing_is_lost(central, tmp_path, before):
    whole = runner.run(central(), output=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        runner.run(central(), output=tmp_path / "broken", callbacks=[Stop(before)])
    assert RunFolder(tmp_path / "broken").status()["state"] == "interrupted"
    kept = files(tmp_path / "broken")
    assert len(kept) == before - 1
    watcher = Stop(99)
    resumed = runner.resume(tmp_path / "broken", callbacks=[watcher])
    assert [number for _, number, _ in watcher.told] == list(range(before, 4)), (
        "what was done is not done again"
    )
    assert resumed.baselines == whole.baselines and resumed.privacy == whole.privacy
    assert files(tmp_path / "broken") == files(tmp_path / "whole")


@pytest.mark.parametrize(("mode", "charges"), [("reproducible", 2), ("secure", 3)])
def test_a_release_that_is_repeated_is_charged_again_only_with_other_noise(
    central, tmp_path, monkeypatch, mode, charges
):
    monkeypatch.setattr(_chosen_items, "clipped_gram", killed)
    table = central([{**GRAM, "mode": mode}])
    with pytest.raises(KeyboardInterrupt):
        runner.run(table, output=tmp_path / "run")
    ledger = tmp_path / "run" / "baselines" / "dp-gram" / "privacy.jsonl"
    assert len(ledger.read_text().splitlines()) == 1
    monkeypatch.undo()
    result = runner.resume(tmp_path / "run")
    assert len(ledger.read_text().splitlines()) == charges
    spent = json.loads((tmp_path / "run" / "baselines" / "dp-gram" / "result.json").read_text())[
        "privacy"
    ]["epsilon"]
    assert spent == pytest.approx(4.0, rel=1e-3) if mode == "reproducible" else spent > 4.05
    assert f"{spent:.4g}" in result.privacy[0]


def test_noise_follows_the_experiments_seed_unless_the_system_has_its_own(central, tmp_path):
    fixed = [{**GRAM, "label": "own", "seed": 7}, {**GRAM, "label": "follows"}]
    split = {"name": "leave-one-out"}
    runs = [
        runner.run(central(fixed, seed=s, split=split), output=tmp_path / str(s)) for s in (0, 1)
    ]
    own, follows = (
        [run.baseline_users[label].to_numpy() for run in runs] for label in ("own", "follows")
    )
    assert not np.array_equal(*follows, equal_nan=True)
    assert runs[0].experiment.dataset == runs[1].experiment.dataset
    assert own[0].shape == own[1].shape


def test_together_with_a_federated_system_they_are_the_same(tiny_experiment, tmp_path):
    table = tiny_experiment()
    table["evaluation"]["baselines"] = SYSTEMS
    result = runner.run(table, output=tmp_path / "run")
    assert list(result.baselines) == ["popularity", "first", "second"]
    assert 0 <= result.metrics["hits@5"] <= 1
    assert result.baseline_users["first"].index.tolist() == result.users.index.tolist()
    assert re.match(r"first: epsilon (4|3\.999\d*) at delta 1e-05", result.privacy[0])
    assert RunFolder(tmp_path / "run").read_result().privacy == result.privacy


def test_systems_of_ratings(central, tmp_path):
    table = central(
        ["item-mean", "biased-mf", "popularity"], task="rating", split={"name": "ratio"}
    )
    del table["positive-above"]
    result = runner.run(table, output=tmp_path / "run")
    assert list(result.baselines) == ["item-mean", "biased-mf"]
    users = result.baseline_users["item-mean"]
    pooled = np.sqrt(np.average(users["rmse"] ** 2, weights=users["rows"]))
    assert result.baselines["item-mean"]["rmse"] == pytest.approx(pooled)


def test_the_number_of_threads_is_that_of_the_engine_and_only_while_it_runs(
    central, tmp_path, monkeypatch
):
    """Of torch, and of the linear algebra of numpy and scipy."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before, seen = _pools(), []
    watcher = type("Watch", (Callback,), {"on_baseline": lambda *told: seen.append(_pools())})()
    table = central(["popularity"], engine={"threads": 3})
    runner.run(table, output=tmp_path / "run", callbacks=[watcher])
    assert seen == [[3] * len(before)] and _pools() == before


def _pools():
    """Numbers of threads, of torch and of every BLAS library that is loaded."""
    libraries = [one for one in threadpool_info() if one["user_api"] == "blas"]
    return [torch.get_num_threads(), *(one["num_threads"] for one in libraries)]


def test_any_engine_runs_them_in_this_process(central, tmp_path):
    result = runner.run(central(["popularity"], engine={"name": "flower"}), output=tmp_path / "run")
    assert result.experiment.engine.nodes == 1 and result.baselines["popularity"]


def test_the_file_in_the_run_folder_has_nothing_federated_and_is_read_again(central, tmp_path):
    runner.run(central(), output=tmp_path / "run")
    experiment = RunFolder(tmp_path / "run").experiment
    assert not set(FEDERATED) & set(experiment.table()) and not experiment.federated
    assert experiment.split.options["halves"] == "random", "defaults are filled in"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"model": {"name": "privrec"}}, "rounds = 1 or more with [model]"),
        ({"privacy": {"clip-norm": 1.0, "epsilon": 1.0}}, "rounds = 1 or more with [privacy]"),
        ({"evaluation": {"baselines": []}}, "or centralised systems in evaluation.baselines"),
    ],
)
def test_half_an_experiment_is_refused(central, more, expected):
    with pytest.raises(ExperimentError) as caught:
        load(central(**more))
    assert expected in str(caught.value.expected)


@pytest.mark.parametrize(
    ("baselines", "problem", "fix"),
    [
        (["ease", "ease"], "'ease' is named twice", "label"),
        ([GRAM, {**GRAM, "label": "dp-gram"}], "'dp-gram' is named twice", "label"),
        ([{**GRAM, "label": "a/b"}], "wrong label", "label"),
        ([{**GRAM, "label": ".."}], "wrong label", "label"),
        ([{**GRAM, "label": "x", "item": 3}], "unknown key 'baselines.x.item'", "items"),
        ([{"name": "dp-gam", "label": "x"}], "unknown baseline 'dp-gam'", "dp-gram"),
    ],
)
def test_wrong_labels_and_settings_are_named(central, baselines, problem, fix):
    with pytest.raises(ExperimentError) as caught:
        load(central(baselines))
    assert problem in caught.value.problem and fix in str(caught.value.fix)


def test_commands_that_need_a_federated_system_refuse_others(central, tmp_path):
    run = RunFolder.create(runner.settle(load(central())), tmp_path / "run")
    with pytest.raises(ExperimentError, match="has no federated system"):
        Loop(run, None)


@pytest.mark.parametrize(("bound", "threads"), [("1", 1), ("8", 2), ("", 2), ("0", 2), ("2,1", 2)])
def test_threads_are_bounded_by_the_environment(bound, threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", bound)
    before = torch.get_num_threads()
    with _threads(2):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == before
