# SPDX-License-Identifier: Apache-2.0
"""Training in blocks gives what training one client after the other gives: updates, sums, norms, evaluations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from clients.blocks import train_in_blocks
from clients.evaluation import evaluate_clients
from clients.hosting import Node
from clients.steps.sgd import Sgd
from clients.training import train_clients
from fedrec.cohort import compiled, sizing
from fedrec.cohort.batches import Batches
from fedrec.cohort.sizing import cut_blocks
from fedrec.data.population import Population
from fedrec.errors import ClientError
from fedrec.rng import stream, torch_stream
from fedrec.row_sum import dense_change
from fedrec.wire import EvaluateOrder, TrainOrder

SETTINGS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "weight-decay": {"weight_decay": 0.1},
    "proximal": {"proximal_mu": 0.7},
    "everything": {"momentum": 0.5, "weight_decay": 0.05, "proximal_mu": 0.3, "negatives_policy": "epoch"},
    "low-rated": {"low_rated": "negative"},
    "rates": {"rates": {"item.id": 30.0, "user.gender": 0.0, "layer0.*": 0.5, "layer1.bias": 2.0}},
    "late-table": {"late_parameters": ["item.id"], "rates": {"item.id": 20.0}},
    "late-layers": {"late_parameters": ["layer?.weight", "user.*"], "late_epochs": 2},
    "frozen-table": {"rates": {"item.id": 0.0}},
    "late-everything": {
        "momentum": 0.5,
        "weight_decay": 0.05,
        "proximal_mu": 0.3,
        "late_parameters": ["item.*", "layer1.*"],
        "rates": {"item.id": 3.0},
    },
    "no-negatives": {"negatives": 0},
    "one-class": {"negatives": 0, "low_rated": "ignore"},
    "no-epoch": {"epochs": 0},
    "one-step": {"batch_size": 1_000_000},
}


@pytest.fixture(params=["compiled", "operations"])
def code(request, monkeypatch):
    """With the compiled inner loops, and with PyTorch's operations in their place."""
    if request.param == "operations":
        monkeypatch.setattr(compiled, "library", lambda: None)
    elif compiled.library() is None:
        pytest.skip("no compiled code here")


@pytest.fixture
def pair(load_tiny, code):
    """Two nodes that differ in nothing but the path, and the initial parameters."""

    def make(*overrides):
        nodes = {}
        for path in ("cohort", "reference"):
            experiment = load_tiny(f"engine.path={path}", "step.learning-rate=0.2", "step.batch-size=4", *overrides)
            nodes[path] = Node(experiment, 0, 1, None)
        parameters = nodes["reference"].model.initial(torch_stream(0, "init"))
        assert set(parameters) == set(nodes["cohort"].model.initial(torch_stream(0, "init")))
        return nodes["cohort"], nodes["reference"], {name: value.numpy() for name, value in parameters.items()}

    return make


def options(settings):
    return [f"step.{key.replace('_', '-')}={toml(value)}" for key, value in settings.items()]


def toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}" = {one!r}' for key, one in value.items()) + "}"
    return repr(value)


def whole(reply, arrays):
    """A node's sums as whole arrays."""
    return {name: dense_change(change, arrays[name]) for name, change in reply.total.items()}


def assert_same(got, expected):
    for name, value in expected.items():
        torch.testing.assert_close(torch.as_tensor(got[name]), torch.as_tensor(value), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("case", SETTINGS)
def test_sums_are_equal(pair, case, weighting):
    fast, slow, arrays = pair("step.epochs=3", *options(SETTINGS[case]))
    order = TrainOrder(1, np.arange(0, 18), weighting)
    got, expected = train_clients(fast, arrays, order), train_clients(slow, arrays, order)
    assert_same(whole(got, arrays), whole(expected, arrays))
    assert (got.clients, got.weight, got.examples) == (expected.clients, expected.weight, expected.examples)
    assert got.losses == expected.losses and got.loss == pytest.approx(expected.loss, rel=1e-4)
    assert case == "no-epoch" or any(np.abs(value).max() > 1e-3 for value in whole(expected, arrays).values())


@pytest.mark.parametrize("case", ["plain", "everything"])
@pytest.mark.parametrize("task", ["ranking", "rating"])
def test_odd_clients(pair, world, case, task):
    """Client 0 has one positive, 1 the same item twice, 2 only a low rating, 3 nothing at all."""
    fast, slow, _ = pair("step.epochs=2", *options(SETTINGS[case]))
    population: Population = world(task)
    for node in (fast, slow):
        node.__dict__["population"] = population
        del node.__dict__["model"]  # made for the population before
    parameters = slow.model.initial(torch_stream(0, "init"))
    step = fast.step(fast.experiment.step)
    clients = np.arange(4)
    for places, outcome in train_in_blocks(fast, step, parameters, clients, "client", 1):
        for member, place in enumerate(places):
            data = population.client(place)
            update = slow.step(slow.experiment.step).update(parameters, data, stream(0, "client", place, 1))
            whole = outcome.parameters_of(member)
            assert_same({n: v[0] - parameters[n] for n, v in whole.items()}, update.delta)
            norm = math.sqrt(sum(float(delta.double().square().sum()) for delta in update.delta.values()))
            assert float(outcome.norms()[member]) == pytest.approx(norm, rel=1e-4, abs=1e-7)
            loss = outcome.losses()[member]
            assert (math.isnan(loss) and math.isnan(update.loss)) or loss == pytest.approx(update.loss, rel=1e-4)


def test_evaluation_with_fine_tuning_is_equal(pair):
    fast, slow, arrays = pair("evaluation.fine-tune.epochs=3")
    order = EvaluateOrder(1, None)
    got, expected = evaluate_clients(fast, arrays, order), evaluate_clients(slow, arrays, order)
    assert got.index.equals(expected.index)
    np.testing.assert_allclose(got.to_numpy(), expected.to_numpy(), atol=1e-9)


def test_a_run_is_equal_on_both_paths(run_tiny, saved_parameters, code):
    fast = run_tiny("engine.path=cohort", output="fast")
    slow = run_tiny("engine.path=reference", output="slow")
    assert_same(saved_parameters(fast.folder), saved_parameters(slow.folder))
    assert fast.metrics == pytest.approx(slow.metrics)


def test_blocks_hold_clients_with_the_most_steps_first_and_everyone_once():
    lengths = [5, 40, 1, 40, 0, 17]
    batches = [Batches.cut([(np.zeros(n, np.int64), np.zeros(n, np.float32))], 4) for n in lengths]
    parameters = {"item.id": torch.zeros(100, 8), "w": torch.zeros(10, 10)}
    blocks = list(cut_blocks(batches, parameters, ["item.id"], memory_gib=1.0, largest=2))
    assert blocks == [[1, 3], [5, 0], [2, 4]]
    tight = list(cut_blocks(batches, parameters, ["item.id"], memory_gib=1e-9, largest=None))
    assert tight == [[1], [3], [5], [0], [2], [4]]


def test_a_gpu_takes_as_many_clients_at_once_as_its_memory_holds(load_tiny, monkeypatch):
    """And a processor as many as suit its cache, which are more with compiled code."""
    node = Node(load_tiny(), 0, 1, None)
    batches = [Batches.cut([(np.zeros(4, np.int64), np.zeros(4, np.float32))], 4)] * 40
    parameters = {"item.id": torch.zeros(100, 8)}
    for device, there, sizes in (("cpu", False, [16, 16, 8]), ("cpu", True, [32, 8]), ("cuda", False, [40])):
        node.device = torch.device(device)
        monkeypatch.setattr(sizing, "at_hand", lambda _, there=there: there)
        assert [len(block) for block in node.blocks(batches, parameters, ["item.id"])] == sizes


def test_batches_are_cut_epoch_by_epoch():
    epochs = [(np.arange(5), np.ones(5, np.float32)), (np.arange(5)[::-1], np.zeros(5, np.float32))]
    cut = Batches.cut(epochs, 3)
    assert cut.items.tolist() == [[0, 1, 2], [3, 4, 0], [4, 3, 2], [1, 0, 0]]
    assert cut.sizes.tolist() == [3, 2, 3, 2] and cut.examples == 5 and cut.last_epoch == 2
    assert cut.labels.tolist() == [[1, 1, 1], [1, 1, 0], [0, 0, 0], [0, 0, 0]]


def test_a_step_on_everything_is_hardly_wider_than_a_clients_data():
    def cut(n, batch_size):
        return Batches.cut([(np.arange(n), np.ones(n, np.float32))] * 2, batch_size)

    assert cut(20, 32).items.shape == (2, 32)  # as wide for all clients, so that they fit into one block
    assert cut(20, 1_000_000).items.shape == (2, 512) and cut(600, 1_000_000).items.shape == (2, 1024)
    assert cut(600, 1_000_000).sizes.tolist() == [600, 600] and cut(0, 1_000_000).items.shape == (0, 512)
    assert cut(600, 600).items.shape == (2, 600) and cut(600, 599).sizes.tolist() == [599, 1, 599, 1]
    parameters = {"item.id": torch.zeros(100, 8)}
    mixed = [cut(n, 10_000) for n in (600, 20, 700, 30)]
    assert list(cut_blocks(mixed, parameters, ["item.id"], memory_gib=1.0, largest=None)) == [[0, 2], [1, 3]]


def test_an_error_in_a_block_is_that_of_the_client_at_fault(pair, monkeypatch):
    """Client 5's own work fails, so a block with it fails, and the error is that of client 5 alone."""
    fast, _, arrays = pair()
    healthy = Sgd.update

    def update(self, parameters, data, random):
        if data.client == 5:
            raise RuntimeError("no such row")
        return healthy(self, parameters, data, random)

    def train_block(self, parameters, block):
        raise RuntimeError("something in this block")

    monkeypatch.setattr(Sgd, "update", update)
    monkeypatch.setattr(Sgd, "train_block", train_block)
    with pytest.raises(ClientError, match=r"(?s)client 5 failed in step 'Sgd' \(round 1, node 0\).*no such row"):
        train_clients(fast, arrays, TrainOrder(1, np.array([2, 5, 9])))
    with pytest.raises(ClientError, match=r"(?s)for none of them alone.*clients .*\b9\b.*path=reference"):
        train_clients(fast, arrays, TrainOrder(1, np.array([2, 9])))
