# SPDX-License-Identifier: Apache-2.0
"""Callbacks of a run, and those that track it."""

import builtins
import logging
import os
import socket

import pytest

from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import load
from server.callbacks.base import Callback, Tracker
from simulations import runner

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

    table = {
        **tiny_experiment(),
        "callbacks": named(("Noting", {"mark": "x"}), ("Noting", {})),
    }
    result = runner.run(table, output=tmp_path / "run")
    assert TOLD == [("x", 1), ("a", 1), ("x", 2), ("a", 2)]
    assert "mark" not in result.rounds  # each had a row of its own
    assert [one.options for one in result.experiment.callbacks] == [
        {"mark": "x"},
        {"mark": "a"},
    ]


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
