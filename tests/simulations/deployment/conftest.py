# SPDX-License-Identifier: Apache-2.0
"""Deployments that several tests share."""

import copy

import pytest

from tests.simulations.deployment.federation import Federation

SMALL = {
    "name": "small",
    "rounds": 3,
    "positive-above": 3.0,
    "dataset": {
        "name": "synthetic",
        "users": 24,
        "items": 30,
        "mean-interactions": 8,
        "min-interactions": 4,
    },
    "split": {"name": "user-holdout", "test-users": 0.25},
    "model": {"name": "privrec", "embedding": 4, "hidden": [8]},
    "step": {"name": "sgd", "epochs": 1, "batch-size": 8},
    "sampler": {"name": "fixed-size", "cohort": 12},
    "evaluation": {"every": 0, "users": 4, "ks": [5], "fine-tune": {"epochs": 1}},
    "engine": {"threads": 1, "device": "cpu", "timeout": 180.0, "path": "reference", "nodes": 2},
}


@pytest.fixture(scope="session")
def small():
    """A fresh table of a small experiment."""
    return lambda: copy.deepcopy(SMALL)


@pytest.fixture(scope="session")
def federation(small, tmp_path_factory):
    """A running deployment of one server and two nodes for all tests, because starting one takes
    longer than most of them."""
    made = Federation(tmp_path_factory.mktemp("deployment") / "loopback", small())
    try:
        yield made.up()
    finally:
        made.down()
