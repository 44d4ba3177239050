# SPDX-License-Identifier: Apache-2.0
"""Runs in TensorBoard and MLflow: these tools read the same numbers as in the run folder."""

import builtins
import logging
import os
import socket
import time

import pytest

from fedrec.errors import ExperimentError
from simulations import runner

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
    assert line.startswith("Mlflow failed, and the run goes on without it") and "\n" not in line


@pytest.mark.slow
def test_an_mlflow_database_that_cannot_be_opened_is_given_up_at_once(
    run_tiny, tmp_path, monkeypatch, caplog
):
    pytest.importorskip("mlflow", reason="extra 'track' is not installed")
    (tmp_path / "folder.db").mkdir()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'folder.db'}")
    monkeypatch.setattr(time, "sleep", lambda seconds: seconds < 0.1 or pytest.fail("a wait"))
    with caplog.at_level(logging.WARNING, "fedrec"):
        assert run_tiny(NAMED.format("mlflow")).metrics
    (line,) = [record.getMessage() for record in caplog.records if record.name == "fedrec"]
    assert "unable to open database file" in line


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
