# SPDX-License-Identifier: Apache-2.0
"""Flower's own strategies run unchanged on fedrec's clients, and can be resumed."""

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAdam

from fedrec.components.registry import MODEL
from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.models.privrec import PrivRec
from fedrec.protocol.messages import unpack_parameters
from fedrec.protocol.zero_copy import from_record, to_record
from fedrec.rng import torch_stream
from fedrec.runs.folder import RunFolder
from server.run import execute
from server.strategy_state import lasting_state, restore_strategy, strategy_state
from simulations import runner
from simulations.engines.serial import open_grid
from tests.runs import assert_same_run, parameters_in, resumed

FLOWER = "flwr.serverapp.strategy"


def initial(experiment):
    model = PrivRec(experiment.settings(MODEL), Population.of(experiment).schema())
    return {
        name: value.numpy()
        for name, value in model.initial(torch_stream(experiment.seed, "init")).items()
    }


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("FedAdam", {"eta": 0.05}),
        ("FedProx", {"proximal-mu": 0.1}),
        ("FedMedian", {}),
        ("Krum", {"num-malicious-nodes": 1}),
        ("FedAvgM", {"server-momentum": 0.5}),
    ],
)
def test_stock_strategy_trains(run_tiny, name, settings):
    overrides = [
        f"strategy.name={FLOWER}:{name}",
        *(f"strategy.{key}={value}" for key, value in settings.items()),
    ]
    result = run_tiny("engine.nodes=4", *overrides)
    start, end = initial(result.experiment), parameters_in(result.folder)
    assert list(result.rounds["round"]) == [1, 2] and np.isfinite(result.rounds["loss"]).all()
    for array_name, before in start.items():
        after = end[array_name]
        assert (
            after.dtype == before.dtype and after.shape == before.shape and np.isfinite(after).all()
        )
    assert not np.array_equal(start["item.id"], end["item.id"])
    assert np.isfinite(result.users["hits@5"]).all()


def test_one_step_of_fedadam_by_hand(load_tiny, tmp_path):
    """Flower's Adam: mean of the nodes by examples, moments from zero, rate corrected with the
    round's number + 1."""
    experiment = runner.settle(
        load_tiny("rounds=1", f"strategy.name={FLOWER}:FedAdam", "strategy.eta=0.05")
    )
    replies = []
    with open_grid(RunFolder.create(experiment, tmp_path / "run")) as grid:
        send = grid.send_and_receive

        def watch(messages, *, timeout=None):
            answers = send(messages, timeout=timeout)
            replies.extend(answer for answer in answers if answer.metadata.message_type == "train")
            return answers

        grid.send_and_receive = watch
        result = execute(RunFolder(tmp_path / "run"), grid)
    assert len(replies) == 2
    weights = [
        next(iter(reply.content.metric_records.values()))["num-examples"] for reply in replies
    ]
    arrays = [unpack_parameters(reply.content) for reply in replies]
    beta1, beta2, tau, eta = 0.9, 0.99, 1e-3, 0.05
    rate = eta * np.sqrt(1 - beta2**2) / (1 - beta1**2)
    for name, before in initial(experiment).items():
        mean = np.average([one[name].astype(np.float64) for one in arrays], axis=0, weights=weights)
        delta = mean - before
        step = rate * (1 - beta1) * delta / (np.sqrt(1 - beta2) * np.abs(delta) + tau)
        np.testing.assert_allclose(result.parameters[name], before + step, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["FedAdam", "FedAvgM"])
def test_a_strategy_with_memory_is_resumed_as_if_unbroken(run_tiny, name):
    overrides = ["rounds=4", f"strategy.name={FLOWER}:{name}"]
    if name == "FedAvgM":
        overrides += ["strategy.server-momentum=0.9"]
    whole = run_tiny(*overrides, output="whole")
    assert_same_run(resumed(run_tiny, *overrides, after=2), whole)


def test_a_strategy_that_waits_for_more_nodes_than_there_are_is_refused(run_tiny):
    with pytest.raises(ExperimentError) as caught:
        run_tiny("engine.nodes=1", f"strategy.name={FLOWER}:FedAdam")
    assert "min-available-nodes" in caught.value.fix and caught.value.got == "1"


def test_what_a_later_round_may_change_is_copied():
    live, fixed = np.arange(3), np.ones(2)
    view = live[1:]
    view.flags.writeable = fixed.flags.writeable = False
    strategy = FedAdam()
    strategy.live, strategy.view, strategy.fixed = live, view, fixed
    memory = lasting_state(strategy)
    live += 1
    assert memory["live/array/"].tolist() == [0, 1, 2] and memory["view/array/"].tolist() == [1, 2]
    assert memory["fixed/array/"] is fixed


def test_the_state_of_a_strategy_is_all_attributes_with_arrays(identity):
    arrays = {"w": np.arange(3, dtype=np.float32), "a/b": np.array(2.5)}
    strategy = FedAdam(eta=0.25)
    strategy.m_t = arrays
    strategy.history = [arrays["w"], arrays["w"] * 2]
    strategy.last = arrays["w"] * 3
    strategy.record, strategy.rounds_seen = to_record(arrays), 7
    memory = strategy_state(strategy)
    assert all(isinstance(value, np.ndarray) for value in memory.values())
    fresh = FedAdam()
    restore_strategy(fresh, memory)
    assert (
        fresh.eta == 0.25 and fresh.rounds_seen == 7 and isinstance(fresh.min_available_nodes, int)
    )
    assert all(np.array_equal(fresh.m_t[name], value) for name, value in arrays.items())
    assert [part.tolist() for part in fresh.history] == [[0, 1, 2], [0, 2, 4]]
    assert fresh.last.tolist() == [0, 3, 6]
    assert all(
        np.array_equal(from_record(fresh.record)[name], value) for name, value in arrays.items()
    )
