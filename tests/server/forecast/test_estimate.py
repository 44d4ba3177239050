# SPDX-License-Identifier: Apache-2.0
"""The forecast comes from a trial without side effects, and has the right order of magnitude."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from server.callbacks.base import Callback
from server.forecast import estimate
from server.forecast.estimate import extrapolated as estimated
from tests.runs import assert_same_run


class Listening(Callback):
    def __init__(self):
        self.found, self.seconds = [], []

    def on_estimate(self, estimate):
        self.found.append(estimate)

    def after_round(self, row, seconds):
        self.seconds.append(seconds)
        return False


def test_a_forecast_is_made_and_changes_nothing(run_tiny):
    ear = Listening()
    with_it = run_tiny("rounds=3", output="with", callbacks=[ear])
    without = run_tiny("rounds=3", output="without")
    (found,) = ear.found
    assert found.seconds == pytest.approx(3 * found.round_seconds) and 0 < found.round_seconds < 60
    assert 0.1 < found.memory_gib < 20
    assert_same_run(with_it, without)


def test_a_time_that_does_not_grow_with_the_clients_is_counted_once():
    # 0.08 s for a message, 0.001 s per client
    seconds = estimated([(8, 0.088), (64, 0.144)], 1064)
    assert seconds == pytest.approx(0.08 + 1.064)


@pytest.mark.parametrize(
    ("trials", "expected"),
    [
        ([(8, 0.6)], 75.0),
        ([(8, 0.6), (8, 0.5)], 62.5),
        ([(8, 0.2), (64, 0.1)], 0.1),
        ([(8, 0.001), (64, 1.0)], 1.0 + 936 / 64),
    ],
)
def test_the_time_of_a_round_lies_between_that_of_a_trial_and_its_multiple(trials, expected):
    assert estimated(trials, 1000) == pytest.approx(expected)


def test_trials_go_on_until_the_clients_make_a_difference(monkeypatch):
    taken = []

    def trial(experiment, roster, grid, parameters, clients):
        taken.append(len(clients))
        return 0.08 + 0.001 * len(clients)

    monkeypatch.setattr(estimate, "_trial", trial)
    step = SimpleNamespace(options={"epochs": 2})
    experiment: Any = SimpleNamespace(step=step, rounds=3, engine=SimpleNamespace(name="serial"))
    roster: Any = SimpleNamespace(
        work_of=lambda clients: np.ones(len(clients), dtype=int), nodes=[1], presences=[]
    )
    found = estimate.estimate(experiment, roster, None, {}, np.arange(4000))  # pyright: ignore[reportArgumentType]
    assert taken == [8, 8, 64, 512]
    assert found is not None and found.round_seconds == pytest.approx(2 * (0.08 + 4.0))


@pytest.mark.parametrize("override", ["step.epochs=0", 'step.private-parameters=["layer1.*"]'])
def test_no_forecast_where_there_is_nothing_to_measure_or_something_to_spoil(run_tiny, override):
    ear = Listening()
    run_tiny(override, "rounds=1", output="run", callbacks=[ear])
    assert ear.found == []
