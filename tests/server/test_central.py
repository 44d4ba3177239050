# SPDX-License-Identifier: Apache-2.0
"""Centralised systems in a run, and early stopping."""

import json
import re

import numpy as np
import pandas as pd
import pytest
import torch
from threadpoolctl import threadpool_info

import fedrec
from fedrec.baselines.private import ranking as private_base
from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.evaluation.central import evaluate_baselines
from fedrec.experiment.schema import load
from fedrec.privacy.accounting.accountant import Ledger
from fedrec.runs.folder import RunFolder
from server.callbacks import Callback
from server.run import _Loop
from simulations import runner
from tests.runs import assert_close, assert_same_run, resumed

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

    def on_event(self, event):
        if not event.system:
            return
        number = int(event.text.removeprefix("system ").partition("/")[0])
        self.told.append(number)
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
    assert "private systems of this run cost epsilon" in result.privacy[-1]
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
    assert watcher.told == list(range(before, 4)), "what was done is not done again"
    assert resumed.baselines == whole.baselines and resumed.privacy == whole.privacy
    assert files(tmp_path / "broken") == files(tmp_path / "whole")


def test_a_release_that_is_repeated_with_the_same_noise_is_charged_once(
    central, tmp_path, monkeypatch
):
    monkeypatch.setattr(private_base, "_clipped_gram", killed)
    table = central([GRAM])
    with pytest.raises(KeyboardInterrupt):
        runner.run(table, output=tmp_path / "run")
    ledger = tmp_path / "run" / "baselines" / "dp-gram" / "privacy.jsonl"
    assert len(ledger.read_text().splitlines()) == 1
    monkeypatch.undo()
    result = runner.resume(tmp_path / "run")
    assert len(ledger.read_text().splitlines()) == 2
    spent = json.loads((tmp_path / "run" / "baselines" / "dp-gram" / "result.json").read_text())[
        "privacy"
    ]["epsilon"]
    assert spent == pytest.approx(4.0, rel=1e-3)
    assert f"{spent:.4g}" in result.privacy[0]


def test_the_number_of_threads_is_that_of_the_engine_and_only_while_it_runs(
    central, tmp_path, monkeypatch
):
    """Of torch, and of the linear algebra of numpy and scipy."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before, seen = _pools(), []

    def watched(self, event):
        if event.system:
            seen.append(_pools())

    watcher = type("Watch", (Callback,), {"on_event": watched})()
    table = central(["popularity"], engine={"threads": 3})
    runner.run(table, output=tmp_path / "run", callbacks=[watcher])
    assert seen == [[3] * len(before)] and _pools() == before


def _pools():
    """Numbers of threads, of torch and of every BLAS library that is loaded."""
    libraries = [one for one in threadpool_info() if one["user_api"] == "blas"]
    return [torch.get_num_threads(), *(one["num_threads"] for one in libraries)]


@pytest.mark.parametrize(
    ("baselines", "problem", "fix"),
    [
        (["ease", "ease"], "duplicate baseline 'ease'", "label"),
        ([GRAM, {**GRAM, "label": "dp-gram"}], "duplicate baseline 'dp-gram'", "label"),
        ([{**GRAM, "label": "a/b"}], "wrong value for 'baselines.dp-gram.label'", "label"),
        ([{**GRAM, "label": ".."}], "wrong value for 'baselines.dp-gram.label'", "label"),
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
        _Loop(run, None)


# Early stopping: stopping round and kept round follow exactly from the curve of validation users,
# also if a run is interrupted or extended; test users are never used, and the effect on privacy is
# reported.

ROUNDS, PATIENCE = 14, 3
WATCH = f"early-stopping={{metric='discounted-hits@5', patience={PATIENCE}}}"
HOLDOUT = ("split.validation-users=0.25", "seed=2")
PRIVATE_VECTORS = (
    "seed=0",
    "split={name='ratio', train=0.6, validation=0.2, test=0.2}",
    "model={name='mf', factors=4}",
    "step={name='sgd', learning-rate=0.5, epochs=2, private-parameters=['user.*'],"
    " late-parameters=['item.*']}",
    "strategy={name='fed-adam', server-lr=0.05}",
    "sampler.cohort=12",
    "evaluation.fine-tune={epochs=0}",
    "checkpoint={every=1, keep=2}",
)
ON_VALIDATION = ("evaluation.held-out='validation'", "evaluation.users=1000")
SETTINGS = pytest.mark.parametrize(
    "settings",
    [HOLDOUT, (*PRIVATE_VECTORS, "split.stream=dataset")],
    ids=["held-out users", "private user vectors"],
)


def expected_end(values, patience, least=0.0):
    """Best round and last round of a curve with one value per round, and the number of evaluations
    since."""
    best, at = values[0], 1
    for number, value in enumerate(values[1:], 2):
        if value - best > least:
            best, at = value, number
        elif number - at == patience:
            return at, number
    return at, len(values)


@pytest.fixture
def curve(run_tiny):
    """Discounted hits of validation users after each round, by the ordinary evaluation."""

    def measured(settings):
        result = run_tiny(*settings, f"rounds={ROUNDS}", *ON_VALIDATION, output="curve")
        return result.rounds["discounted-hits@5"].tolist()

    return measured


@pytest.fixture
def run_ratings(tiny_experiment, tmp_path):
    """Runs the tiny experiment on ratings, each user's rows divided."""

    def run(*overrides, output="run"):
        table = tiny_experiment()
        del table["positive-above"]
        fixed = ("task='rating'", PRIVATE_VECTORS[1], "evaluation.fine-tune={epochs=0}")
        return runner.run(table, [*fixed, *overrides], output=tmp_path / output)

    return run


def same_ending(one, other):
    assert one.metrics == other.metrics
    assert_close(one.parameters, other.parameters)
    pd.testing.assert_frame_equal(one.users, other.users)


@pytest.mark.slow
@SETTINGS
def test_it_ends_by_the_curve_with_what_a_run_of_the_best_round_has(run_tiny, curve, settings):
    best, last = expected_end(curve(settings), PATIENCE)
    assert 1 < best < last < ROUNDS  # otherwise this test would prove nothing
    result = run_tiny(*settings, f"rounds={ROUNDS}", WATCH)
    assert (result.best_round, len(result.rounds)) == (best, last)
    same_ending(result, run_tiny(*settings, f"rounds={best}", output="best"))
    same_ending(fedrec.Result.load(result.folder), result)
    assert result.early_stopping["stopped"] and result.early_stopping["rounds"] == last
    assert RunFolder(result.folder).status() == {"state": "finished", "round": last}


@pytest.mark.slow
@SETTINGS
@pytest.mark.parametrize("broken", [2, 6])
def test_a_broken_run_ends_as_an_unbroken_one(run_tiny, settings, broken):
    whole = run_tiny(*settings, f"rounds={ROUNDS}", WATCH, output="whole")
    assert len(whole.rounds) >= 6
    result = resumed(run_tiny, *settings, f"rounds={ROUNDS}", WATCH, after=broken)
    same_ending(result, whole)
    assert_same_run(result, whole)
    assert result.early_stopping == whole.early_stopping


def test_an_extended_run_is_one_that_had_more_rounds_from_the_start(run_tiny):
    whole = run_tiny(*HOLDOUT, f"rounds={ROUNDS}", WATCH, output="whole")
    short = run_tiny(*HOLDOUT, "rounds=4", WATCH, output="short")
    assert not short.early_stopping["stopped"]
    same_ending(runner.resume(short.folder, [f"rounds={ROUNDS}"]), whole)


def test_errors_are_watched_downwards(run_ratings):
    table = ("model={name='mf', factors=4, center=3.0}", "step.learning-rate=0.05", "rounds=8")
    shown = run_ratings(*table, *ON_VALIDATION, output="curve")
    result = run_ratings(*table, "early-stopping={patience=8}")
    errors = shown.rounds["rmse"].to_numpy()
    assert result.early_stopping["metric"] == "rmse"
    np.testing.assert_array_equal(result.rounds["validation-rmse"], errors)
    assert result.best_round == int(np.argmin(errors)) + 1


USERS = "split.validation-users=0.25"
SECURE = "privacy={clip-norm=1.0, noise-multiplier=1.0, mode='secure'}"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((WATCH,), "needs validation users"),
        (("split.validation-users=0.01", WATCH), "no validation user with"),
        ((USERS, "early-stopping.metric='hits@7'"), "unknown early-stopping metric 'hits@7'"),
        ((PRIVATE_VECTORS[1], SECURE, WATCH), "noiseless metrics"),
        ((USERS, "evaluation.protocol='reconstruction'", WATCH), "whole histories"),
        ((USERS, "early-stopping.patienc=3"), "'patience'"),
    ],
)
def test_what_cannot_be_watched_is_refused_before_anything_runs(
    run_tiny, tmp_path, overrides, words
):
    with pytest.raises(ExperimentError) as caught:
        run_tiny(*overrides)
    assert words in caught.value.text()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_fewer_rounds_are_charged_and_the_report_names_who_is_not_covered(run_tiny):
    privacy = "privacy={clip-norm=0.1, epsilon=8.0, backend='pld'}"
    result = run_tiny(*HOLDOUT, f"rounds={ROUNDS}", privacy, "early-stopping.patience=1")
    rounds = len(result.rounds)
    assert rounds < ROUNDS
    ledger = (result.folder / "privacy.jsonl").read_text().splitlines()
    assert len(ledger) == rounds
    whole = run_tiny(*HOLDOUT, f"rounds={ROUNDS}", privacy, output="whole")
    spent = whole.rounds["epsilon"]
    assert result.rounds["epsilon"].tolist() == spent.tolist()[:rounds]
    assert spent.iloc[-1] <= 8.0
    text = " ".join(result.privacy)
    assert f"{rounds} of {ROUNDS} rounds were run, and these alone are charged" in text
    assert "6 validation users, without noise" in text and "no epsilon here covers them" in text
    assert fedrec.Result.load(result.folder).privacy == result.privacy


def test_validation_users_who_train_are_reported_as_not_covered(run_tiny):
    privacy = "privacy={clip-norm=0.1, noise-multiplier=1.0, parameters=['item.*']}"
    result = run_tiny(*PRIVATE_VECTORS, "rounds=2", privacy, WATCH)
    found = [line for line in result.privacy if "training users too" in line]
    assert len(found) == 1 and "does not cover" in found[0]


def test_first_phases_do_not_use_patience_up(run_tiny):
    """No evaluation improves by 1, and three rounds belong to a first phase."""
    step = "step={name='contrastive', hidden=4, session-length=4, epochs=1}"
    stages = f"strategy={{name='two-stage', stage-one={{rounds=3, {step}}}}}"
    never = "early-stopping={patience=2, min-improvement=1.0}"
    assert len(run_tiny(*HOLDOUT, "rounds=9", never).rounds) == 1 + 2
    result = run_tiny(*HOLDOUT, stages, "rounds=9", never, output="stages")
    assert (len(result.rounds), result.best_round) == (3 + 2, 1)
