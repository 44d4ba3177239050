# SPDX-License-Identifier: Apache-2.0
"""Run folders of format 1, in which `discounted-hits` is `ndcg`, and `ndcg` is `ndcg-list`."""

import hashlib
import json
import tomllib

import numpy as np
import pytest

from fedrec.experiment.schema import Experiment
from fedrec.runs.folder import RunFolder
from fedrec.runs.result import present_names, written_names
from simulations import runner
from simulations.amend import amend
from simulations.studies.sweep import values_of

NAMED = (
    "rounds=3",
    "split.validation-users=0.25",
    "early-stopping={metric='discounted-hits@5', patience=5}",
    "evaluation.metrics=['ndcg']",
    "evaluation.shown=['hits@5', 'ndcg@5']",
    "evaluation.baselines=['popularity']",
    "checkpoint={every=1, keep=3}",
)


def earlier(text: str) -> str:
    """As an earlier version wrote it."""
    text = text.replace('"ndcg"', '"ndcg-list"').replace("ndcg@", "ndcg-list@")
    return text.replace("discounted-hits@", "ndcg@")


def make_earlier(folder, *, upto: int | None = None) -> None:
    """Give a run folder the form of an earlier version, as if its run had ended after a round."""
    about = json.loads((folder / "run.json").read_text())
    digest = about["experiment-sha256"]
    for file in [*folder.rglob("*.csv"), *folder.rglob("*.json"), folder / "experiment.toml"]:
        file.write_text(earlier(file.read_text()))
    table = tomllib.loads((folder / "experiment.toml").read_text())
    about |= {"format": 1, "experiment-sha256": Experiment.parse(table).digest()}
    (folder / "run.json").write_text(json.dumps(about))
    for file in folder.glob("checkpoints/*.npz"):
        arrays = dict(np.load(file))
        text = earlier(arrays["about"].tobytes().decode())
        text = text.replace(digest, about["experiment-sha256"])
        np.savez(file, **arrays | {"about": np.frombuffer(text.encode(), np.uint8)})
    result = json.loads((folder / "result.json").read_text())
    for name in result["tables"]:
        result["tables"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "result.json").write_text(json.dumps(result))
    if upto is not None:
        (folder / "result.json").unlink()
        (folder / "status.json").write_text(json.dumps({"state": "interrupted", "round": upto}))
        for file in sorted(folder.glob("checkpoints/*.npz"))[upto:]:
            file.unlink()


def assert_same(found, expected):
    assert found.metrics == expected.metrics and found.baselines == expected.baselines
    assert found.before_fine_tuning == expected.before_fine_tuning
    for name in ("rounds", "users", "groups"):
        assert getattr(found, name).equals(getattr(expected, name)), name
    for label, users in expected.baseline_users.items():
        assert found.baseline_users[label].equals(users)
    assert found.experiment == expected.experiment
    assert found.early_stopping == expected.early_stopping


@pytest.fixture
def present(run_tiny):
    return RunFolder(run_tiny(*NAMED).folder).read_result()


@pytest.fixture
def old(run_tiny):
    return run_tiny(*NAMED, output="old").folder


def test_an_earlier_folder_is_read_under_the_present_names(present, old):
    make_earlier(old)
    assert "ndcg-list@5" in (old / "users.csv").read_text().partition("\n")[0]
    assert "discounted" not in (old / "result.json").read_text()
    run = RunFolder(old)
    assert_same(run.read_result(), present)
    assert run.experiment.early_stopping.metric == "discounted-hits@5"
    assert values_of(run)["ndcg@5"] == present.metrics["ndcg@5"]
    for label, metrics in present.baselines.items():
        assert run.read_baseline(label)["metrics"] == metrics


def test_an_earlier_run_is_resumed_and_keeps_its_names_in_its_files(present, old):
    make_earlier(old, upto=1)
    resumed = runner.resume(old)
    assert_same(resumed, present)
    assert_same(RunFolder(old).read_result(), present)
    assert json.loads((old / "run.json").read_text())["format"] == 1
    assert "discounted" not in "".join(file.read_text() for file in old.rglob("*.csv"))


def test_an_earlier_run_is_extended(old):
    make_earlier(old)
    amend(RunFolder(old), ["rounds=4"])
    found = runner.resume(old)
    assert found.num_rounds == 4 and "validation-discounted-hits@5" in found.rounds
    assert found.experiment.evaluation.shown == ("hits@5", "ndcg@5")


@pytest.mark.parametrize(
    ("earlier_text", "present_text"),
    [
        (
            "client,hits@5,ndcg@5,recall@5,ndcg-list@5\n",
            "client,hits@5,discounted-hits@5,recall@5,ndcg@5\n",
        ),
        ('{"validation-ndcg-list@5": 0.5}', '{"validation-ndcg@5": 0.5}'),
        ('metrics = ["ndcg", "ndcg-list"]', 'metrics = ["discounted-hits", "ndcg"]'),
        ("target-ndcg@5,reconstruction-ndcg@5,ndcg-of-100@5", None),
        ('title = "ndcg of lists"', None),
    ],
)
def test_only_the_two_metrics_are_renamed(earlier_text, present_text):
    present_text = present_text or earlier_text
    assert present_names(earlier_text, 1) == present_text
    assert written_names(present_text, 1) == earlier_text
    assert present_names(earlier_text, 2) == earlier_text
