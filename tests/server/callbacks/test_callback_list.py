# SPDX-License-Identifier: Apache-2.0
"""Callbacks of an experiment: created from their settings, called in order, unable to change the
run."""

import logging

import numpy as np
import pytest

from fedrec.config import Config
from fedrec.errors import ComponentError, ExperimentError
from fedrec.experiment.loading import load
from server.callbacks.base import Callback
from server.callbacks.callback_list import CallbackList, callbacks_of

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


class Comparing(Callback):
    def on_update(self, round_number, before, after):
        TOLD.append(any(not np.array_equal(before[name], after[name]) for name in before))


class Fussy(Callback):
    def __init__(self, config):
        raise ValueError("not today")


class Unreachable(Callback):
    tracker = True

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
    assert line.startswith("Unreachable failed, and the run goes on without it: ConnectionError")
    assert "\n" not in line and "no route to host" in line


def test_named_callbacks_are_called_in_order_with_their_settings(tiny_experiment, tmp_path):
    from simulations import runner

    table = {
        **tiny_experiment(),
        "callbacks": named(("Noting", {"mark": "x"}), ("Noting", {}), ("Comparing", {})),
    }
    result = runner.run(table, output=tmp_path / "run")
    assert TOLD == [True, ("x", 1), ("a", 1), True, ("x", 2), ("a", 2)]
    assert "mark" not in result.rounds  # each had a row of its own
    assert [one.options for one in result.experiment.callbacks] == [
        {"mark": "x"},
        {"mark": "a"},
        {},
    ]


def test_a_callback_without_settings_is_named_by_a_text(tiny_experiment):
    table = {**tiny_experiment(), "callbacks": ["progress", {"name": "tensorboard"}]}
    experiment = load(table)
    assert [one.name for one in experiment.callbacks] == ["progress", "tensorboard"]
    assert load(experiment.table()).callbacks == experiment.callbacks


def test_an_experiment_without_callbacks_is_written_as_before(load_tiny):
    """Runs of earlier versions can be resumed: their digest must not change."""
    table = load_tiny().table()
    assert "callbacks" not in table


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


def test_one_that_cannot_be_made_is_named(tiny_experiment):
    experiment = load({**tiny_experiment(), "callbacks": named(("Fussy", {}))})
    with pytest.raises(
        ComponentError, match=r"callback 'Fussy' .*when it was made(?s:.*)not today"
    ):
        callbacks_of(experiment)


def test_any_callback_can_end_the_run_and_all_are_called():
    class Stopping(Callback):
        def after_round(self, row, seconds):
            return True

    callback_list = CallbackList([Stopping(), Noting(NotingConfig(mark="z"))])
    assert callback_list.after_round({"round": 7}, 0.1) and TOLD == [("z", 7)]
    assert not CallbackList([]) and not CallbackList([]).after_round({"round": 1}, 0.1)
    assert CallbackList([Comparing()]).compares and not callback_list.compares
