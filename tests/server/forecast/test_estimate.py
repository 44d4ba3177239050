# SPDX-License-Identifier: Apache-2.0
"""The forecast comes from a trial without side effects, and has the right order of magnitude."""

from __future__ import annotations

import numpy as np
import pytest

from server.callbacks.base import Callback


class Listening(Callback):
    def __init__(self):
        self.found, self.seconds = [], []

    def on_estimate(self, estimate):
        self.found.append(estimate)

    def after_round(self, row, seconds):
        self.seconds.append(seconds)
        return False


def test_a_forecast_is_made_and_changes_nothing(run_tiny, saved_parameters):
    ear = Listening()
    with_it = run_tiny("rounds=3", output="with", callbacks=[ear])
    without = run_tiny("rounds=3", output="without")
    (found,) = ear.found
    assert found.seconds == pytest.approx(3 * found.round_seconds) and 0 < found.round_seconds < 60
    assert 0.1 < found.memory_gib < 20
    for name, value in saved_parameters(without.folder).items():
        np.testing.assert_array_equal(saved_parameters(with_it.folder)[name], value)


@pytest.mark.parametrize("override", ["step.epochs=0", 'step.private-parameters=["layer1.*"]'])
def test_no_forecast_where_there_is_nothing_to_measure_or_something_to_spoil(run_tiny, override):
    ear = Listening()
    run_tiny(override, "rounds=1", output="run", callbacks=[ear])
    assert ear.found == []
