# SPDX-License-Identifier: Apache-2.0
"""A bench on a dataset so small that a cell runs in a second."""

import json

import pytest

from simulations.bench.declaration import bench
from simulations.cli import app
from simulations.cli.options import command_of

SYNTHETIC = {"name": "synthetic", "users": 40, "items": 150, "mean-interactions": 12}


@pytest.fixture
def small(monkeypatch):
    """The bench with its synthetic dataset in small, also for commands."""
    whole = bench()
    tiny = whole.datasets["synthetic"].model_copy(
        update={"dataset": SYNTHETIC, "rounds": 3, "cohort": 10}
    )
    found = whole.model_copy(update={"datasets": {**whole.datasets, "synthetic": tiny}})
    monkeypatch.setattr("simulations.bench.declaration.bench", lambda *further: found)
    return found


@pytest.fixture(scope="session")
def command():
    """Calls `fedrec`; returns its exit code."""

    def call(*words):
        try:
            return command_of(app)(list(map(str, words)), standalone_mode=False) or 0
        except SystemExit as ended:
            return ended.code

    return call


@pytest.fixture
def results_of():
    """The entries in a folder of `fedrec bench run`."""
    return lambda folder: json.loads((folder / "results.json").read_text())
