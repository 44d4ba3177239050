# SPDX-License-Identifier: Apache-2.0
"""The rounds of a run, its exchange with nodes, its callbacks, and what is told ahead."""

import builtins
import gc
import logging
import os
import signal
import socket
from contextlib import suppress
from types import SimpleNamespace
from typing import ClassVar, cast

import numpy as np
import pandas as pd
import pytest
from flwr.app import Error, Message, RecordDict

from fedrec.config import Config
from fedrec.errors import ClientError, ExperimentError, RunError
from fedrec.experiment.schema import load
from fedrec.runs.folder import RunFolder
from server.callbacks import Callback, Tracker
from server.checkpoint import Checkpoints
from server.nodes import DroppedReplies, Roster, answers, is_refusal, reason_of
from server.run import _announce_paths, _warn_without_user_features, execute
from simulations import runner
from simulations.engines.grid import open_grid
from strategies.sums import Reptile
from tests.runs import assert_close, parameters_in

# The rounds: callbacks, early end, divergence, reproducible files, and evaluations.


class Recorder(Callback):
    def __init__(self, stop_after=None):
        self.told, self.stop_after = [], stop_after

    def on_start(self, run, first_round, rounds):
        self.told.append(("start", first_round, rounds))

    def after_round(self, row, seconds):
        self.told.append(("round", row["round"]))
        self.row, self.seconds = row, seconds
        return row["round"] == self.stop_after

    def on_event(self, event):
        if event.text:
            self.told.append(("stage", event.text))
        if event.total:
            self.told.append(("evaluation", event.done, event.total))

    def on_end(self, result):
        self.told.append(("end", len(result.rounds)))


class Messages(Callback):
    """Counts Flower's records that exist after each round."""

    def __init__(self):
        self.counts = []

    def after_round(self, row, seconds):
        self.counts.append(sum(isinstance(one, RecordDict) for one in gc.get_objects()))
        return False


class Exploding(Reptile):
    """Finite in the first round, infinite in the second."""

    def apply(self, theta, aggregate):
        new = super().apply(theta, aggregate)
        self.rounds = getattr(self, "rounds", 0) + 1
        return {name: value * np.inf if self.rounds == 2 else value for name, value in new.items()}


class Watching(Reptile):
    """Records the nodes of the replies, in order."""

    got: ClassVar[list] = []

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        self.got.append([reply.metadata.src_node_id for reply in replies])
        return super().aggregate_train(server_round, replies)


def test_callbacks_are_called_in_order(run_tiny):
    recorder = Recorder()
    result = run_tiny(callbacks=[recorder])
    users = len(result.users)
    assert recorder.told == [
        ("stage", "training paths: step sgd: kernel"),
        ("start", 1, 2),
        ("round", 1),
        ("round", 2),
        ("stage", "evaluating the shared model"),
        ("evaluation", users, users),
        ("stage", "evaluating with fine-tuning"),
        ("evaluation", users, users),
        ("end", 2),
    ]
    assert recorder.seconds > 0 and recorder.row["num-clients"] == 6 and "hits@5" in recorder.row


def test_a_callback_can_end_the_run_after_all_were_called(run_tiny):
    """The state after the last round is saved, also between two checkpoints."""
    first, second = Recorder(stop_after=2), Recorder()
    result = run_tiny("rounds=9", "checkpoint.every=5", callbacks=[first, second])
    assert first.told == second.told and first.told[-1] == ("end", 2)
    assert ("stage", "callback Recorder ends the run after round 2") in second.told
    assert len(result.rounds) == 2
    assert RunFolder(result.folder).status() == {"state": "finished", "round": 2}
    assert_close(parameters_in(result.folder), result.parameters)


def test_divergence_leaves_the_checkpoint_of_the_round_before(run_tiny, tmp_path):
    with pytest.raises(ClientError, match="diverged in round 2"):
        run_tiny("rounds=3", f"strategy.name={__name__}:Exploding", output="broken")
    assert [file.name for file in (tmp_path / "broken" / "checkpoints").iterdir()] == [
        "round-000001.npz"
    ]
    assert RunFolder(tmp_path / "broken").status() == {"state": "failed", "round": 1}
    good = run_tiny("rounds=1", output="good")
    assert_close(parameters_in(tmp_path / "broken"), good.parameters)


def test_a_checkpoint_that_cannot_be_written_ends_the_run(run_tiny, monkeypatch, tmp_path):
    def full(self, state):
        raise RunError("cannot write", expected="free space", got="none", fix="free some")

    monkeypatch.setattr(Checkpoints, "save", full)
    with pytest.raises(RunError, match="cannot write"):
        run_tiny("rounds=3")
    assert RunFolder(tmp_path / "run").status() == {"state": "failed", "round": 1}


def test_an_empty_cohort_is_a_round_that_changes_nothing(run_tiny):
    result = run_tiny("sampler={name='poisson', cohort=1e-9}", "rounds=1")
    assert result.rounds["num-clients"].tolist() == [0] and "loss" not in result.rounds
    assert result.parameters["layer0.bias"].tolist() == [0] * 8


@pytest.mark.parametrize(
    ("every", "evaluated"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (4, [4, 5]), (0, [])]
)
def test_evaluation_every_so_many_rounds_and_after_the_last(run_tiny, every, evaluated):
    rounds = run_tiny("rounds=5", f"evaluation.every={every}").rounds
    found = rounds["round"][rounds["hits@5"].notna()].tolist() if "hits@5" in rounds else []
    assert found == evaluated


def test_the_last_evaluation_takes_all_users_with_and_without_fine_tuning(run_tiny):
    result = run_tiny(
        "evaluation.users=1", "evaluation.fine-tune.epochs=5", "step.learning-rate=0.5"
    )
    assert len(result.users) == 6 and result.users.index.is_monotonic_increasing
    assert result.metrics["mrr"] == pytest.approx(result.users["mrr"].mean())
    assert result.before_fine_tuning.keys() == result.metrics.keys()
    assert result.before_fine_tuning != result.metrics
    shared = run_tiny(
        "evaluation.users=1",
        "evaluation.fine-tune.epochs=0",
        "step.learning-rate=0.5",
        output="shared",
    )
    assert shared.before_fine_tuning == {} and shared.metrics == result.before_fine_tuning


def test_the_order_in_which_nodes_answer_does_not_matter(load_tiny, tmp_path):
    found = []
    for turned in (False, True):
        experiment = load_tiny(
            "engine.nodes=5", f"strategy.name={__name__}:Watching", "sampler.cohort=18"
        )
        run = RunFolder.create(runner.settle(experiment), tmp_path / str(turned))
        with open_grid(run) as grid:
            send = grid.send_and_receive
            if turned:
                grid.send_and_receive = lambda messages, send=send, **more: send(messages, **more)[
                    ::-1
                ]
            found.append(execute(run, grid))
    assert Watching.got == 4 * [[2, 3, 4, 5, 6]]
    assert all(
        np.array_equal(found[0].parameters[name], found[1].parameters[name])
        for name in found[0].parameters
    )
    pd.testing.assert_frame_equal(found[0].users, found[1].users)
    pd.testing.assert_frame_equal(found[0].groups, found[1].groups)


def test_dropped_replies_are_in_rounds_csv_and_stated_at_the_end(load_tiny, tmp_path):
    experiment = load_tiny("engine.nodes=3", "engine.max-failures=0.5", "rounds=3")
    run, asked = RunFolder.create(runner.settle(experiment), tmp_path / "run"), []
    with open_grid(run) as grid:
        send = grid.send_and_receive

        def losing(messages, **more):
            """Lose the reply of node 2 in the second round."""
            replies, kind = list(send(messages, **more)), messages[0].metadata.message_type
            asked.append(kind)
            lost = kind == "train" and asked.count("train") == 2
            return [one for one in replies if not (lost and one.metadata.src_node_id == 2)]

        grid.send_and_receive = losing
        execute(run, grid)
    found = run.read_result()
    assert found.rounds["dropped-replies"].tolist()[1:] == [1, 0]
    assert found.rounds["dropped-or-bounded"][1] == "node 2: no reply before the deadline"
    assert any(line.startswith("Replies of nodes: 1 dropped") for line in found.privacy)


def test_messages_of_a_round_do_not_stay_until_python_looks_for_cycles(run_tiny):
    gc.collect()
    counted = Messages()
    gc.disable()
    try:
        run_tiny("rounds=6", callbacks=[counted])
    finally:
        gc.enable()
    assert len(counted.counts) == 6 and counted.counts[-1] <= counted.counts[1]


def test_number_of_nodes_changes_no_more_than_the_last_digits(run_tiny):
    one, four = (run_tiny(f"engine.nodes={nodes}", output=str(nodes)) for nodes in (1, 4))
    assert_close(four.parameters, one.parameters, rtol=1e-5, atol=1e-7)


def test_a_skipped_baseline_is_reported_once(run_tiny, caplog, monkeypatch):
    """EASE takes at most five items here, reported in one line of the log, which the command line
    prints; callbacks print nothing more."""
    told = []

    class Listener(Callback):
        def on_event(self, event):
            told.append(event.text)

    monkeypatch.setattr("fedrec.baselines.closed_form._MOST_ITEMS", 5)
    result = run_tiny("evaluation.baselines=['ials', 'ease']", callbacks=[Listener()])
    assert list(result.baselines) == ["ials"]
    (line,) = [text for text in [*told, *caplog.messages] if "left out" in text]
    assert line.startswith("baseline ease is left out: 30 items")
    assert line in (result.folder / "log.txt").read_text()
    assert {"coverage@5", "gini@5", "map@5"} <= set(result.baselines["ials"])
    assert result.gaps.index[0] == "activity" and (result.gaps["hits@5"].dropna() >= 0).all()


class Dropping(Callback):
    """Is interrupted in round 2, and drops the exception, as native code may."""

    def after_round(self, row, seconds):
        if row["round"] == 2:
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)


def test_an_interruption_that_was_dropped_ends_the_run_before_the_next_round(run_tiny, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_tiny("rounds=5", callbacks=[Dropping()])
    status = RunFolder(tmp_path / "run").status()
    assert (status["state"], status["round"]) == ("interrupted", 2)


# The record of dropped replies: columns of rounds.csv, and a sentence at the end.


def test_the_end_of_a_run_states_the_totals_also_of_a_resumed_one():
    record = DroppedReplies(always=True)
    for reason in ("first", "second"):
        record.dropped(7, f"{reason}\n  long {'x' * 1000}")
    record.bounded(8, "norm of the update")
    row = record.after_round(1, None)
    assert row["dropped-or-bounded"].startswith("node 7: first long x") and "\n" not in str(row)
    assert len(row["dropped-or-bounded"]) < 800
    resumed = DroppedReplies(always=True)
    resumed.restore(record.memory())
    resumed.dropped(None, "its metrics: in the final evaluation")
    table = resumed.report(3)
    (line,) = table["in words"]
    assert line.startswith("Replies of nodes: 3 dropped or missing, 1 scaled down, in 1 of 3 round")
    assert "node 7 2, node 8 1" in line and table["dropped"] == 3


def test_in_mode_secure_nothing_is_recorded():
    """A node can fail only if a client of it was drawn."""
    record = DroppedReplies(always=True, secret=True)
    untouched = record.memory()["totals"].tobytes()
    record.dropped(7, "no reply before the deadline")
    record.bounded(7, "norm of the update")
    assert record.after_round(1, None) == {} and record.report(1) == {}
    assert record.memory()["totals"].tobytes() == untouched


# Replies: which are accepted, and the error if too many failed.


def replies(good, *errors):
    asked = [Message(RecordDict(), 2 + place, "train") for place in range(good + len(errors))]
    failed = [
        Message(Error(2, text), reply_to=message)
        for text, message in zip(errors, asked, strict=False)
    ]
    return failed + [Message(RecordDict(), reply_to=message) for message in asked[len(errors) :]]


def refused(found, **settings):
    with pytest.raises(ClientError) as caught:
        answers(found, **settings)
    return caught.value


@pytest.mark.usefixtures("identity")
@pytest.mark.parametrize(("share", "fine"), [(0.25, True), (0.249, False), (1.0, True)])
def test_a_share_of_failures_is_tolerated(share, fine, caplog):
    found = replies(3, "client 7 failed")
    with caplog.at_level(logging.WARNING, "fedrec"):
        if fine:
            assert answers(found, sent=[2, 3, 4, 5], max_failures=share) == found[1:]
        else:
            assert f"{share:g}" in refused(found, sent=[2, 3, 4, 5], max_failures=share).expected
    assert "node 2 failed: client 7 failed" in caplog.text


@pytest.mark.usefixtures("identity")
def test_a_missing_reply_is_a_failure(caplog):
    error = refused(replies(3), sent=[2, 3, 4, 5], max_failures=0.0)
    assert error.problem == "1 of 4 nodes failed" and error.got == "no reply before the deadline"
    assert "engine.timeout" in error.fix and "1 of 4 nodes did not reply before" in caplog.text
    assert len(answers(replies(3), sent=[2, 3, 4, 5], max_failures=0.3)) == 3


@pytest.mark.usefixtures("identity")
def test_a_nodes_error_is_read_without_the_class_of_its_exception():
    error = Error(2, "<class 'fedrec.errors.RefusalError'>:<'no room\n  got: 'x''>")
    assert reason_of(error) == "no room\n  got: 'x'" and is_refusal(error)
    other = Error(2, "<class 'fedrec.errors.ClientError'>:<'RefusalError'>")
    assert reason_of(other) == "RefusalError" and not is_refusal(other)
    assert reason_of(Error(0, "ended by signal 9")) == "ended by signal 9"


# Callbacks of an experiment: created from their settings, called in order, unable to change the
# run.

TOLD: list = []


class NotingConfig(Config):
    mark: str = "a"
    """What it writes down."""


class Noting(Callback):
    Config = NotingConfig

    def after_round(self, row, seconds):
        row["mark"] = self.config.mark
        TOLD.append((self.config.mark, row["round"]))
        return False


class Unreachable(Tracker):
    def on_start(self, run, first_round, rounds):
        TOLD.append("start")
        raise ConnectionError("no route\nto host")

    def after_round(self, row, seconds):
        TOLD.append("round")
        return True


@pytest.fixture(autouse=True)
def nothing_told():
    TOLD.clear()


def named(*callbacks):
    return [{"name": f"{__name__}:{name}", **settings} for name, settings in callbacks]


def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(run_tiny, caplog):
    with caplog.at_level(logging.WARNING, "fedrec"):
        result = run_tiny("callbacks=" + str([f"{__name__}:Unreachable"]))
    assert len(result.rounds) == 2 and TOLD == ["start"]
    (line,) = [record.getMessage() for record in caplog.records if record.name == "fedrec"]
    assert line.startswith("Unreachable failed, and the run continues without it: ConnectionError")
    assert "\n" not in line and "no route to host" in line


def test_named_callbacks_are_called_in_order_with_their_settings(tiny_experiment, tmp_path):
    from simulations import runner

    table = {**tiny_experiment(), "callbacks": named(("Noting", {"mark": "x"}), ("Noting", {}))}
    result = runner.run(table, output=tmp_path / "run")
    assert TOLD == [("x", 1), ("a", 1), ("x", 2), ("a", 2)]
    assert "mark" not in result.rounds  # each had a row of its own
    assert [one.options for one in result.experiment.callbacks] == [{"mark": "x"}, {"mark": "a"}]


@pytest.mark.parametrize(
    ("callbacks", "words"),
    [
        (named(("Noting", {"marc": "x"})), ["callbacks.0.marc", "did you mean 'mark'"]),
        ([{"name": "progres"}], ["unknown callback 'progres'", "did you mean 'progress'"]),
        ([{"mark": "x"}], ["callbacks.0.name"]),
        (named(("Missing", {})), ["is not a callback"]),
    ],
)
def test_a_wrong_callback_is_named_before_anything_runs(tiny_experiment, callbacks, words):
    with pytest.raises(ExperimentError) as caught:
        load({**tiny_experiment(), "callbacks": callbacks})
    assert all(word in caught.value.text() for word in words), caught.value.text()


# Runs in TensorBoard and MLflow: these tools read the same numbers as in the run folder.

NAMED = "callbacks=[{{name='{}'}}]"


def test_tensorboard_reads_the_rounds_of_a_run_and_of_its_extension(run_tiny):
    pytest.importorskip("tensorboard", reason="extra 'track' is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = runner.resume(run_tiny(NAMED.format("tensorboard")).folder, ["rounds=3"])
    events = EventAccumulator(str(result.folder / "tensorboard"))
    events.Reload()
    found = {event.step: event.value for event in events.Scalars("round/hits@5")}
    expected = dict(zip(result.rounds["round"], result.rounds["hits@5"], strict=True))
    assert found == pytest.approx(expected)
    assert events.Scalars("final/hits@5")[-1].value == pytest.approx(result.metrics["hits@5"])


@pytest.mark.slow
def test_mlflow_finds_settings_rounds_and_one_run_for_a_resumed_one(
    run_tiny, tmp_path, monkeypatch
):
    mlflow = pytest.importorskip("mlflow", reason="extra 'track' is not installed")
    monkeypatch.setenv("FEDREC_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    result = runner.resume(run_tiny(NAMED.format("mlflow")).folder, ["rounds=3"])
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    place = client.get_experiment_by_name("tiny")
    (run,) = client.search_runs([place.experiment_id])
    history = client.get_metric_history(run.info.run_id, "hits-at-5")
    assert [point.step for point in history] == [1, 2, 3]
    assert [point.value for point in history] == pytest.approx(list(result.rounds["hits@5"]))
    assert run.data.params["strategy.name"] == "reptile" and run.info.status == "FINISHED"
    assert run.data.metrics["final/hits-at-5"] == pytest.approx(result.metrics["hits@5"])


def test_a_run_does_not_depend_on_an_mlflow_server(run_tiny, monkeypatch, caplog):
    pytest.importorskip("mlflow", reason="extra 'track' is not installed")
    for name in ("TIMEOUT", "MAX_RETRIES"):
        monkeypatch.delenv(f"MLFLOW_HTTP_REQUEST_{name}", raising=False)
    with socket.socket() as bound:  # bound without listening: connections are refused
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{bound.getsockname()[1]}")
        with caplog.at_level(logging.WARNING, "fedrec"):
            result = run_tiny(NAMED.format("mlflow"))
    assert result.metrics and os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "5"
    (line,) = [record.getMessage() for record in caplog.records if record.name == "fedrec"]
    assert line.startswith("Mlflow failed, and the run continues without it") and "\n" not in line


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils"), ("mlflow", "mlflow")])
def test_a_missing_package_names_the_extra_and_leaves_no_folder(
    run_tiny, tmp_path, monkeypatch, name, module
):
    """Reported before anything runs, so that no folder is left behind."""
    original = builtins.__import__

    def without(asked, *arguments, **more):
        if asked == module or asked.startswith(f"{module}.tensorboard"):
            raise ImportError(asked)
        return original(asked, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ExperimentError, match=r"fedrec\[track\]"):
        run_tiny(NAMED.format(name))
    assert not (tmp_path / "run").exists()


# What is said of training paths, and compiled before the first round.


@pytest.mark.parametrize(
    ("paths", "wanted"),
    [
        ({"sgd": "kernel"}, ["train_clients"]),
        ({"sequence": "blocks", "fedrap": "kernel"}, ["train_additive"]),
        ({"sgd": "blocks (a reason)"}, []),
        ({"os:system": "kernel"}, []),
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_what_nodes_need_is_compiled_once(monkeypatch, paths, wanted, cached):
    """Of the experiment's own steps: what nodes report names nothing that is imported."""
    called = []
    monkeypatch.setattr("server.run.is_compiled", lambda *_, **__: cached)
    monkeypatch.setattr("fedrec.training.kernel.compile_ahead", called.append)
    lines = []
    roster = SimpleNamespace(presences=[SimpleNamespace(paths=paths)] * 2)
    own = [name for name in paths if ":" not in name]
    _announce_paths(cast(Roster, roster), own, lines.append)
    assert called == ([] if cached else wanted) and len(lines) == 1 + len(called)
    assert all(f"step {step}: {path}" in lines[0] for step, path in paths.items())


# The warning about users whom a model cannot tell apart.


@pytest.mark.parametrize(
    ("model", "parameters", "warned"),
    [
        ("{name='privrec'}", ["item.id"], True),
        ("{name='privrec'}", ["item.id", "user.group"], False),
        ("{name='privrec', features=false}", ["item.id"], False),
        ("{name='mf'}", ["item.factors"], False),
    ],
)
def test_a_model_of_features_is_warned_of_data_without_features(
    load_tiny, caplog, model, parameters, warned
):
    _warn_without_user_features(load_tiny(f"model={model}"), parameters)
    assert any("represents users by features" in line for line in caplog.messages) == warned
