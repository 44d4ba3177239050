# SPDX-License-Identifier: Apache-2.0
"""The check of a GPU runs without one."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import ROOT, Budget, apart, step_row


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_row_says_what_differs_and_what_waits():
    row = step_row("linear-synthetic", "counts")
    assert row["difference"] == 0 and "users_per_second" not in row
    assert any(place.startswith("clients/training/update_sum.py:") for place in row["waits"])


def test_what_there_is_no_time_for_is_noted():
    budget = Budget(100.0)
    budget.begun -= 80
    assert not budget.allows("steps", "mf") and budget.allows("cohorts", "64 users")
    assert budget.left_out == ["steps: mf"]


def test_a_step_that_fails_does_not_end_the_check(monkeypatch):
    def fails(name, step):
        raise ValueError("no")

    monkeypatch.setattr(gpu_check, "step_row", fails)
    rows = gpu_check.steps(Budget(600.0))
    assert rows["mf-ml1m, sgd"] == {"failed": "ValueError: no"}


def test_apart_is_relative():
    ours = {"a": torch.tensor([3.0, 4.5]).numpy()}
    assert apart(ours, {"a": torch.tensor([3.0, 4.0]).numpy()}) == pytest.approx(0.1)


@pytest.mark.slow
def test_the_command_writes_one_file(tmp_path):
    file = tmp_path / "check.json"
    command = [sys.executable, "benchmarks/gpu_check.py", "--minutes", "0.02", "--output", file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    report = json.loads(file.read_text())
    assert set(report) == {"machine", "tests", "steps", "cohorts", "loop", "left_out", "seconds"}
    assert "tests: stopped" in report["left_out"] and done.returncode == 1
