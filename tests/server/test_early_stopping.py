# SPDX-License-Identifier: Apache-2.0
"""Early stopping: stopping round and kept round follow exactly from the curve of validation users,
also if a run is interrupted or extended; test users are never used, and the effect on privacy is
reported."""

import json

import numpy as np
import pandas as pd
import pytest

import fedrec
from fedrec.errors import ExperimentError, RefusalError
from fedrec.protocol.orders import EvaluateOrder
from fedrec.runs.folder import RunFolder
from simulations import runner
from tests.runs import assert_close, assert_same_run, resumed

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
    assert result.early_stopping["stopped"] and result.early_stopping["rounds"] == last
    assert RunFolder(result.folder).status() == {"state": "finished", "round": last}


@pytest.mark.slow
@SETTINGS
def test_what_is_read_and_recommended_later_is_of_the_best_round(run_tiny, settings):
    result = run_tiny(*settings, f"rounds={ROUNDS}", WATCH)
    again = fedrec.Result.load(result.folder)
    same_ending(again, result)
    assert again.best_round == result.best_round < len(result.rounds)
    best = run_tiny(*settings, f"rounds={result.best_round}", output="best")
    pd.testing.assert_frame_equal(again.recommend(k=3), best.recommend(k=3))


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


@pytest.mark.slow
def test_more_patience_continues_and_less_is_refused(run_tiny, curve):
    values = curve(HOLDOUT)
    first = run_tiny(*HOLDOUT, f"rounds={ROUNDS}", WATCH)
    with pytest.raises(ExperimentError, match="less patience"):
        runner.resume(first.folder, ["early-stopping.patience=1"])
    longer = runner.resume(first.folder, ["early-stopping.patience=5"])
    assert (longer.best_round, len(longer.rounds)) == expected_end(values, 5)
    assert len(longer.rounds) == len(first.rounds) + 2


def test_small_gains_do_not_count(run_tiny, curve):
    values = curve(HOLDOUT)
    least = values[2] - values[0] + 1e-6  # more than was ever gained
    assert expected_end(values, PATIENCE, least) != expected_end(values, PATIENCE)
    text = WATCH.replace("}", f", min-improvement={least}}}")
    result = run_tiny(*HOLDOUT, f"rounds={ROUNDS}", text)
    assert (result.best_round, len(result.rounds)) == expected_end(values, PATIENCE, least)


def test_errors_are_watched_downwards_and_seldom(run_ratings):
    table = ("model={name='mf', factors=4, center=3.0}", "step.learning-rate=0.05", "rounds=8")
    shown = run_ratings(*table, *ON_VALIDATION, output="curve")
    result = run_ratings(*table, "early-stopping={every=2, patience=8}")
    errors = shown.rounds["rmse"].to_numpy()[1::2]
    assert result.early_stopping["metric"] == "rmse"
    np.testing.assert_array_equal(result.rounds["validation-rmse"].dropna(), errors)
    assert result.best_round == 2 * (int(np.argmin(errors)) + 1)


def test_it_uses_validation_users_regardless_of_the_evaluation(run_tiny):
    result = run_tiny(*HOLDOUT, "rounds=3", WATCH)
    shown = run_tiny(*HOLDOUT, "rounds=3", *ON_VALIDATION, output="shown")
    assert (
        result.rounds["validation-discounted-hits@5"].tolist()
        == shown.rounds["discounted-hits@5"].tolist()
    )
    assert result.rounds["discounted-hits@5"].tolist() != shown.rounds["discounted-hits@5"].tolist()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((WATCH,), "needs validation users"),
        (("split.validation-users=0.01", WATCH), "no validation user with"),
        (("split.validation-users=0.25", "early-stopping.metric='hits@7'"), "no metric 'hits@7'"),
        (("split.validation-users=0.25", "early-stopping.metric='epsilon'"), "no metric"),
        (("split.validation-users=0.25", "early-stopping.every=3"), "never evaluate"),
        (
            (
                "split={name='ratio', train=0.6, validation=0.2, test=0.2}",
                "privacy={clip-norm=1.0, noise-multiplier=1.0, mode='secure'}",
                WATCH,
            ),
            "noiseless metrics",
        ),
        (
            (
                "split.validation-users=0.25",
                "evaluation.protocol='reconstruction'",
                WATCH,
            ),
            "whole histories",
        ),
        (("split.validation-users=0.25", "early-stopping.patienc=3"), "'patience'"),
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
    assert "6 validation users, without noise" in text and "no epsilon here is about them" in text
    assert fedrec.Result.load(result.folder).privacy == result.privacy


def test_validation_users_who_train_are_reported_as_not_covered(run_tiny):
    privacy = "privacy={clip-norm=0.1, noise-multiplier=1.0, parameters=['item.*']}"
    result = run_tiny(*PRIVATE_VECTORS, "rounds=2", privacy, WATCH)
    found = [line for line in result.privacy if "training users too" in line]
    assert len(found) == 1 and "does not cover" in found[0]


def test_first_phases_do_not_use_patience_up(run_tiny):
    """No evaluation improves by 1, and three rounds belong to a first phase."""
    step = "step={name='contrastive', hidden=4, session-length=4, segment-length=2, epochs=1}"
    stages = f"strategy={{name='two-stage', stage-one={{rounds=3, {step}}}}}"
    never = "early-stopping={patience=2, min-improvement=1.0}"
    assert len(run_tiny(*HOLDOUT, "rounds=9", never).rounds) == 1 + 2
    result = run_tiny(*HOLDOUT, stages, "rounds=9", never, output="stages")
    assert (len(result.rounds), result.best_round) == (3 + 2, 1)


def test_generated_parameters_are_watched_too(run_ratings):
    """If the server generates each user's parameters, it requests the items of the validation
    rows."""
    table = (
        "model={name='metamf', generator=8, memory=8, user=4, embedding=4, rank=2, center=3.0}",
        "step={name='metamf'}",
        "strategy={name='metamf'}",
        "rounds=2",
    )
    result = run_ratings(*table, "early-stopping={}")
    shown = run_ratings(*table, *ON_VALIDATION, output="curve")
    assert result.rounds["validation-rmse"].tolist() == shown.rounds["rmse"].tolist()
    assert result.rounds["rmse"].tolist() != shown.rounds["rmse"].tolist()


def test_result_json_has_the_best_round(run_tiny):
    result = run_tiny(*HOLDOUT, f"rounds={ROUNDS}", WATCH)
    kept = json.loads((result.folder / "result.json").read_text())["early-stopping"]
    assert kept["best-round"] == result.best_round and kept["planned-rounds"] == ROUNDS
    values = result.rounds["validation-discounted-hits@5"]
    assert kept["best"] == values.max() == values[result.best_round - 1]


def test_owners_of_real_nodes_are_not_asked_for_other_rows(load_tiny):
    from clients.device.policy import Policy

    order = EvaluateOrder(1, None, None, False, "validation")
    with pytest.raises(RefusalError, match="other rows"):
        Policy().check_evaluate(load_tiny(), order)
