# SPDX-License-Identifier: Apache-2.0
"""Nodes and threads of a run on Ray come from a trial, and are those of a resumed run."""

import re

import numpy as np
import pytest
import torch

from fedrec.errors import RunError
from fedrec.experiment.loading import load
from server.callbacks.base import Callback
from simulations import measured_size as module
from simulations import runner
from simulations.cli.experiments.finishing import finish
from simulations.measured_size import measured_size
from simulations.study.runs import run_once
from tests.systems import SYSTEMS

RAY = "engine={name='ray', device='cpu'}"
ROW = 0.01  # seconds an epoch


@pytest.fixture
def trials(monkeypatch):
    """Makes each row take `ROW` seconds; the list has a line for each trial."""
    seen = []

    def epoch_of(node, cohort):
        def run(places):
            seen.append(len(places))
            return ROW * float(node.population.learned_counts(cohort[places]).sum())

        return run

    monkeypatch.setattr(module, "_epoch_of", epoch_of)
    return seen


def test_a_short_run_has_one_node_and_a_long_one_as_many_as_gain(load_tiny, trials):
    short = measured_size(load_tiny(RAY, "rounds=1"), 16)
    long = measured_size(load_tiny(RAY, "rounds=1000"), 16)
    assert short.nodes == 1 and 1 < long.nodes <= 6  # the cohort has six clients
    assert (short.threads, long.threads) == (1, 1)


def test_the_time_is_that_of_the_client_with_the_most_rows_and_of_messages(load_tiny, trials):
    experiment = load_tiny(RAY, "rounds=1000", "step.epochs=2", "sampler.cohort=3")
    found = measured_size(experiment, 5).seconds
    node = module.Node(experiment, 0, 1, None)
    rows = node.population.learned_counts(
        module.SampledCohorts.without_nodes(experiment, node.training).sample(1)
    )
    tested = ROW * node.population.learned_counts(node.evaluated).sum()  # by one epoch each
    expected = [
        2000 * ROW * max(rows.sum() / nodes, rows.max())
        + tested / nodes
        + (nodes > 1) * module._START
        + 3 * (nodes - 1)
        for nodes in range(1, 6)
    ]
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    "overrides",
    [
        ("engine={name='ray', nodes=3}",),
        (RAY, "privacy={clip-norm=1.0, noise-multiplier=1.0, mode='secure'}"),
        ("engine={name='serial'}",),
        ("engine={name='ray', ray-address='auto'}",),
        (RAY, "secure-aggregation={}"),
        (RAY, "strategy={name='flwr.serverapp.strategy:FedAvg'}"),
        (RAY, *SYSTEMS["fedrap"]),
    ],
)
def test_nodes_that_results_depend_on_are_not_chosen(load_tiny, trials, overrides):
    assert measured_size(load_tiny(*overrides), 8) is None


def test_one_core_leaves_nothing_to_choose(load_tiny, trials):
    assert measured_size(load_tiny(RAY), 1) is None and not trials


def test_threads_that_train_faster_are_taken(load_tiny, monkeypatch):
    def epoch_of(node, cohort):
        return lambda places: 0.01 * len(places) / torch.get_num_threads()

    monkeypatch.setattr(module, "_epoch_of", epoch_of)
    before = torch.get_num_threads()
    blocks = measured_size(load_tiny(RAY, "engine.path=blocks", "rounds=1"), 8)
    kernel = measured_size(load_tiny(RAY, "rounds=1"), 8)
    assert (blocks.nodes, blocks.threads) == (1, 8) and (kernel.nodes, kernel.threads) == (1, 1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    "overrides",
    [SYSTEMS["metamf"], ("step.learning-rate=1e30",)],
    ids=["clients need parameters of their own", "training diverges"],
)
def test_a_trial_that_fails_is_left_to_the_run(load_tiny, overrides):
    assert measured_size(load_tiny(RAY, *overrides), 4) is None


def test_an_error_that_is_not_ours_is_left_to_the_run(load_tiny, monkeypatch):
    def broken(node):
        raise ZeroDivisionError

    monkeypatch.setattr(module.Node, "initial", broken)
    assert measured_size(load_tiny(RAY), 4) is None


def test_threads_are_tried_for_the_chosen_nodes_alone(load_tiny, trials):
    measured_size(load_tiny(RAY, "rounds=1"), 64)
    before = len(trials)
    measured_size(load_tiny(RAY, "engine.path=blocks", "rounds=1"), 64)
    assert len(trials) == 2 * before + 2


def test_a_used_folder_is_refused_before_the_trial(load_tiny, trials, tmp_path, monkeypatch):
    monkeypatch.setattr(runner.os, "sched_getaffinity", lambda process: set(range(4)))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(RunError, match="is not empty"):
        runner.run(load_tiny(RAY), output=tmp_path)
    assert not trials


class Told(Callback):
    """Notes messages."""

    def __init__(self):
        self.lines = []

    def on_message(self, text):
        self.lines.append(text)


def test_a_run_has_what_was_measured_and_says_it(load_tiny, tmp_path, monkeypatch):
    told = Told()
    monkeypatch.setattr(runner.os, "sched_getaffinity", lambda process: set(range(4)))
    experiment = load_tiny(RAY)
    ray = runner.run(experiment, output=tmp_path / "ray", callbacks=[told])
    assert (ray.experiment.engine.nodes, ray.experiment.engine.threads) == (1, 1)
    said = re.compile(r"engine: nodes = 1 \(training takes about \d+ s, \d+ s with 4\)")
    assert any(map(said.fullmatch, told.lines))
    serial = runner.run(
        load_tiny("engine={name='serial', device='cpu', threads=1}"), output=tmp_path / "serial"
    )
    for name, value in serial.parameters.items():
        assert np.array_equal(ray.parameters[name], value), name


def test_a_run_goes_on_with_its_own_nodes(load_tiny, tmp_path, monkeypatch):
    experiment = load_tiny("engine={name='serial', device='cpu'}")
    three = load_tiny("engine={name='serial', device='cpu', nodes=3}")
    made = runner.run(three, output=tmp_path / "run")
    assert run_once(experiment, tmp_path / "run").path == made.folder
    assert finish(experiment, tmp_path / "run", True, go_on=True).experiment.engine.nodes == 3


def test_shipped_experiments_on_ray_are_measured():
    size = measured_size(load("privrec-synthetic"), 2)
    assert len(size.seconds) == 2 and size.seconds[1] > module._START
