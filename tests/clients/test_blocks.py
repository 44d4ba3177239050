# SPDX-License-Identifier: Apache-2.0
"""Training in blocks equals training one client after the other: updates, sums, norms,
evaluations."""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from clients.evaluation import evaluate_clients
from clients.hosting.block_size import block_memory, cut_blocks
from clients.hosting.node import Node
from clients.steps.sgd import Sgd
from clients.training.blocks import train_in_blocks
from clients.training.one_client import update_of
from clients.training.round import train_clients
from fedrec.cohort.batches import Batches
from fedrec.data.population import Population
from fedrec.errors import ClientError
from fedrec.protocol.orders import EvaluateOrder, TrainOrder
from fedrec.rng import stream, torch_stream
from tests.clients.oracles import with_oracle
from tests.clients.rounding import assert_within_rounding, numbers, whole
from tests.runs import parameters_in

SETTINGS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "weight-decay": {"weight_decay": 0.1},
    "proximal": {"proximal_mu": 0.7},
    "everything": {
        "momentum": 0.5,
        "weight_decay": 0.05,
        "proximal_mu": 0.3,
        "negatives_policy": "epoch",
    },
    "low-rated": {"low_rated": "negative"},
    "rates": {"rates": {"item.id": 30.0, "user.gender": 0.0, "layer0.*": 0.5, "layer1.bias": 2.0}},
    "late-table": {"late_parameters": ["item.id"], "rates": {"item.id": 20.0}},
    "late-layers": {"late_parameters": ["layer?.weight", "user.*"]},
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


# not for the kernel
NOT_PLAIN = {"momentum", "weight-decay", "proximal", "everything", "late-everything"}
PATHS = ["kernel", "blocks"]


@pytest.fixture
def pair(load_tiny):
    """A node, one with the oracle in place of the step, and the initial parameters."""

    def make(path, *overrides):
        nodes = []
        for own in (path, "reference"):
            experiment = load_tiny(
                f"engine.path={own}", "step.learning-rate=0.2", "step.batch-size=4", *overrides
            )
            nodes.append(Node(experiment, 0, 1, None))
        with_oracle(nodes[1])
        parameters = nodes[1].model.initial(torch_stream(0, "init"))
        assert set(parameters) == set(nodes[0].model.initial(torch_stream(0, "init")))
        return *nodes, {name: value.numpy() for name, value in parameters.items()}

    return make


def options(settings):
    return [f"step.{key.replace('_', '-')}={toml(value)}" for key, value in settings.items()]


def toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}" = {one!r}' for key, one in value.items()) + "}"
    return repr(value)


def cases(settings):
    """A path and a case, without those that the kernel does not support."""
    return [
        (path, case)
        for path in PATHS
        for case in settings
        if path == "blocks" or case not in NOT_PLAIN
    ]


@pytest.fixture(scope="module")
def alone(load_tiny):
    """The initial parameters, and each client's update by the oracle in float32 and in float64; of
    each case once, for both paths."""

    @functools.cache
    def of(case):
        node = Node(load_tiny(*in_case("reference", case)), 0, 1, None)
        step = with_oracle(node).step(node.experiment.step)
        start = node.model.initial(torch_stream(0, "init"))
        updates = {
            dtype: [
                update_of(
                    step,
                    {name: value.to(dtype) for name, value in start.items()},
                    node.population.client(client),
                    stream(0, "client", client, 1),
                )
                for client in range(18)
            ]
            for dtype in (torch.float32, torch.float64)
        }
        return {name: value.numpy() for name, value in start.items()}, *updates.values()

    return of


def in_case(path, case):
    settings = options({"learning_rate": 0.2, "batch_size": 4, "epochs": 3, **SETTINGS[case]})
    return [f"engine.path={path}", *settings]


def weighted(updates, weights):
    """The weighted sum of updates, in float64."""
    deltas = [numbers(update.delta) for update in updates]
    return {
        name: sum(weight * delta[name] for weight, delta in zip(weights, deltas, strict=True))
        for name in deltas[0]
    }


@pytest.mark.parametrize(("path", "case"), cases(SETTINGS))
def test_sums_are_equal(load_tiny, alone, path, case):
    arrays, updates, exact = alone(case)
    node = Node(load_tiny(*in_case(path, case)), 0, 1, None)
    examples = [update.examples for update in updates]
    losses = [update.loss for update in updates if math.isfinite(update.loss)]
    for weighting, weights in (("uniform", [1] * 18), ("examples", examples)):
        got = train_clients(node, arrays, TrainOrder(1, np.arange(0, 18), weighting))
        expected = weighted(updates, weights)
        assert_within_rounding(whole(got, arrays), expected, weighted(exact, weights))
        assert (got.clients, got.weight, got.examples) == (18, sum(weights), sum(examples))
        assert got.losses == len(losses) and got.loss == pytest.approx(sum(losses), rel=1e-4)
        assert case == "no-epoch" or any(np.abs(v).max() > 1e-3 for v in expected.values())


@pytest.mark.parametrize(("path", "case"), cases(["plain", "everything"]))
@pytest.mark.parametrize("task", ["ranking", "rating"])
def test_odd_clients(pair, world, path, case, task):
    """Client 0 has one positive, 1 the same item twice, 2 only a low rating, 3 no row."""
    fast, slow, _ = pair(path, "step.epochs=2", *options(SETTINGS[case]))
    population: Population = world(task)
    for node in (fast, slow):
        node.__dict__["population"] = population
        del node.__dict__["model"]  # made for the population before
    parameters = slow.model.initial(torch_stream(0, "init"))
    step = fast.step(fast.experiment.step)
    clients = np.arange(4)
    for places, outcome in train_in_blocks(
        fast, step, fast.path(step), parameters, clients, "client", 1
    ):
        for member, place in enumerate(places):
            data = population.client(place)
            oracle = slow.step(slow.experiment.step)
            update = update_of(oracle, parameters, data, stream(0, "client", place, 1))
            wide = {name: value.double() for name, value in parameters.items()}
            exact = update_of(oracle, wide, data, stream(0, "client", place, 1)).delta
            whole = outcome.parameters_of(member)
            got = {name: (value[0] - parameters[name]).numpy() for name, value in whole.items()}
            assert_within_rounding(got, numbers(update.delta), numbers(exact))
            norm = math.sqrt(
                sum(float(delta.double().square().sum()) for delta in update.delta.values())
            )
            assert float(outcome.norms()[member]) == pytest.approx(norm, rel=1e-4, abs=1e-7)
            loss = outcome.losses()[member]
            assert (math.isnan(loss) and math.isnan(update.loss)) or loss == pytest.approx(
                update.loss, rel=1e-4
            )


@pytest.mark.parametrize("path", PATHS)
def test_evaluation_with_fine_tuning_is_equal(pair, path):
    fast, slow, arrays = pair(path, "evaluation.fine-tune.epochs=3")
    order = EvaluateOrder(1, None)
    got, expected = (evaluate_clients(node, arrays, order).table for node in (fast, slow))
    assert got.index.equals(expected.index)
    np.testing.assert_allclose(got.to_numpy(), expected.to_numpy(), atol=1e-9)


@pytest.mark.parametrize("path", PATHS)
def test_a_run_is_equal_to_the_reference(run_tiny, path):
    fast = run_tiny(f"engine.path={path}", output="fast")
    slow = run_tiny("engine.path=reference", output="slow")
    wanted = parameters_in(slow.folder)
    for name, value in parameters_in(fast.folder).items():
        np.testing.assert_allclose(
            value, wanted[name], rtol=1e-4, atol=1e-5 * np.abs(wanted[name]).max()
        )
    assert fast.metrics == pytest.approx(slow.metrics)


def test_a_clients_update_is_the_same_to_the_bit_in_any_company(pair):
    """The kernel trains one client after the other, without state between them."""
    fast, _, arrays = pair(
        "kernel", "model.hidden=[8, 5]", "model.activation='tanh'", "step.epochs=3"
    )
    together = {}
    parameters = {name: torch.from_numpy(value) for name, value in arrays.items()}
    step = fast.step(fast.experiment.step)
    for clients in (np.arange(18), np.arange(3, 9), np.array([7])):
        for places, outcome in train_in_blocks(
            fast, step, fast.path(step), parameters, clients, "client", 1
        ):
            for member, place in enumerate(places):
                own = outcome.parameters_of(member)
                first = together.setdefault(int(clients[place]), own)
                assert all(torch.equal(first[name], own[name]) for name in own)


def test_blocks_hold_clients_with_the_most_steps_first_and_everyone_once():
    lengths = [5, 40, 1, 40, 0, 17]
    batches = [Batches.cut([(np.zeros(n, np.int64), np.zeros(n, np.float32))], 4) for n in lengths]
    parameters = {"item.id": torch.zeros(100, 8), "w": torch.zeros(10, 10)}
    blocks = list(cut_blocks(batches, parameters, ["item.id"], memory_gib=1.0, largest=2))
    assert blocks == [[1, 3], [5, 0], [2, 4]]
    tight = list(cut_blocks(batches, parameters, ["item.id"], memory_gib=1e-9, largest=None))
    assert tight == [[1], [3], [5], [0], [2], [4]]


def test_compiled_code_on_a_processor_takes_few_clients_of_a_large_model():
    cpu = torch.device("cpu")
    batches = [Batches.cut([(np.zeros(4, np.int64), np.zeros(4, np.float32))], 4)] * 40
    small = block_memory(cpu, True, 1.0)
    for length, expected in ((2**18, 23), (2**20, 5), (2**24, 1)):
        given = {"w": torch.zeros(length)}
        blocks = cut_blocks(batches, given, [], memory_gib=small, largest=None)
        assert len(next(blocks)) == expected
    assert block_memory(cpu, True, 1e-3) == 1e-3
    assert block_memory(cpu, False, 1.0) == block_memory(torch.device("cuda"), True, 1.0) == 1.0


def test_a_gpu_takes_as_many_clients_at_once_as_its_memory_holds(load_tiny):
    """On a CPU the size follows from the cache, and is larger in the kernel."""
    node = Node(load_tiny(), 0, 1, None)
    batches = [Batches.cut([(np.zeros(4, np.int64), np.zeros(4, np.float32))], 4)] * 40
    parameters = {"item.id": torch.zeros(100, 8)}
    for device, path, sizes in (
        ("cpu", "blocks", [16, 16, 8]),
        ("cpu", "kernel", [32, 8]),
        ("cuda", "blocks", [40]),
    ):
        node.device = torch.device(device)
        assert [
            len(block) for block in node.blocks(batches, parameters, ["item.id"], path == "kernel")
        ] == sizes


def test_batches_are_cut_epoch_by_epoch():
    epochs = [(np.arange(5), np.ones(5, np.float32)), (np.arange(5)[::-1], np.zeros(5, np.float32))]
    cut = Batches.cut(epochs, 3)
    assert cut.items.tolist() == [[0, 1, 2], [3, 4, 0], [4, 3, 2], [1, 0, 0]]
    assert cut.sizes.tolist() == [3, 2, 3, 2] and cut.examples == 5 and cut.last_epoch == 2
    assert cut.labels.tolist() == [[1, 1, 1], [1, 1, 0], [0, 0, 0], [0, 0, 0]]


def test_a_step_on_everything_is_hardly_wider_than_a_clients_data():
    def cut(n, batch_size):
        return Batches.cut([(np.arange(n), np.ones(n, np.float32))] * 2, batch_size)

    # the same width for all clients, so that they fit into one block
    assert cut(20, 32).items.shape == (2, 32)
    assert cut(20, 1_000_000).items.shape == (2, 512)
    assert cut(600, 1_000_000).items.shape == (2, 1024)
    assert cut(600, 1_000_000).sizes.tolist() == [600, 600]
    assert cut(0, 1_000_000).items.shape == (0, 512)
    assert cut(600, 600).items.shape == (2, 600)
    assert cut(600, 599).sizes.tolist() == [599, 1, 599, 1]
    parameters = {"item.id": torch.zeros(100, 8)}
    mixed = [cut(n, 10_000) for n in (600, 20, 700, 30)]
    assert list(cut_blocks(mixed, parameters, ["item.id"], memory_gib=1.0, largest=None)) == [
        [0, 2],
        [1, 3],
    ]


def test_an_error_in_a_block_is_that_of_the_client_at_fault(pair, monkeypatch):
    """Client 5's own work fails, so a block with it fails, and the error is that of client 5
    alone."""
    fast, _, arrays = pair("blocks")
    batches = Sgd.batches
    train_block = Sgd.train_block

    def marked(self, data, random):
        found = batches(self, data, random)
        return replace(found, examples=-1) if data.client == 5 else found

    def failing(self, parameters, block, own=None):
        if len(block) > 1 or block.examples == (-1,):
            raise RuntimeError("no such row" if len(block) == 1 else "something in this block")
        return train_block(self, parameters, block, own)

    monkeypatch.setattr(Sgd, "batches", marked)
    monkeypatch.setattr(Sgd, "train_block", failing)
    with pytest.raises(
        ClientError, match=r"(?s)client 5 failed in step 'Sgd' \(round 1, node 0\).*no such row"
    ):
        train_clients(fast, arrays, TrainOrder(1, np.array([2, 5, 9])))
    with pytest.raises(
        ClientError, match=r"(?s)for none of them alone.*clients .*\b9\b.*path=reference"
    ):
        train_clients(fast, arrays, TrainOrder(1, np.array([2, 9])))
