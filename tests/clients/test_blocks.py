# SPDX-License-Identifier: Apache-2.0
"""Blocks of clients: training together equals training alone, also of private parts and of
autoencoders."""

import functools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from clients.blocks import (
    _COMPILED_GIB,
    Sizes,
    block_limits,
    cut_blocks,
    train_in_blocks,
    update_of,
)
from clients.evaluation import evaluate_clients
from clients.node import Node
from clients.round import train_clients
from clients.steps.sgd import Sgd
from fedrec.components.sections import Section
from fedrec.data.population import Population
from fedrec.errors import ClientError
from fedrec.protocol.messages import EvaluateOrder, TrainOrder
from fedrec.protocol.updates import dense_change
from fedrec.rng import stream, torch_stream
from fedrec.training.block import Batches
from tests.clients.oracles import with_oracle
from tests.clients.rounding import assert_members_alike, assert_within_rounding, numbers, whole

SETTINGS = {
    "plain": {},
    "proximal": {"proximal_mu": 0.7},
    "low-rated": {"low_rated": "negative"},
    "rates": {"rates": {"item.id": 30.0, "user.gender": 0.0, "layer0.*": 0.5, "layer1.bias": 2.0}},
    "late-table": {"late_parameters": ["item.id"], "rates": {"item.id": 20.0}},
    "late-layers": {"late_parameters": ["layer?.weight", "user.*"]},
    "frozen-table": {"rates": {"item.id": 0.0}},
    "late-everything": {
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
NOT_PLAIN = {"proximal", "late-everything"}
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


@pytest.mark.parametrize(("path", "case"), cases(["plain", "proximal"]))
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


def blocks_of(batches, *given):
    """The blocks as lists."""
    return [block.tolist() for block in cut_blocks(Sizes.of(batches), *given)]


def test_blocks_hold_clients_with_the_most_steps_first_and_everyone_once():
    lengths = [5, 40, 1, 40, 0, 17]
    batches = [Batches.cut([(np.zeros(n, np.int64), np.zeros(n, np.float32))], 4) for n in lengths]
    parameters = {"item.id": torch.zeros(100, 8), "w": torch.zeros(10, 10)}
    blocks = blocks_of(batches, parameters, ["item.id"], 1.0, 2)
    assert blocks == [[1, 3], [5, 0], [2, 4]]
    tight = blocks_of(batches, parameters, ["item.id"], 1e-9, None)
    assert tight == [[1], [3], [5], [0], [2], [4]]


def test_compiled_code_on_a_processor_takes_few_clients_of_a_large_model():
    batches = [Batches.cut([(np.zeros(4, np.int64), np.zeros(4, np.float32))], 4)] * 80
    for length, expected in ((2**18, 23), (2**20, 5), (2**24, 1)):
        given = {"w": torch.zeros(length)}
        blocks = blocks_of(batches, given, [], _COMPILED_GIB, None)
        assert len(blocks[0]) == expected


def test_a_gpu_takes_as_many_clients_at_once_as_its_memory_holds(load_tiny):
    """On a CPU the size follows from the cache, and is larger in the kernel."""
    batches = [Batches.cut([(np.zeros(4, np.int64), np.zeros(4, np.float32))], 4)] * 80
    parameters = {"item.id": torch.zeros(100, 8)}
    for device, path, sizes in (
        ("cpu", "blocks", [16] * 5),
        ("cpu", "kernel", [64, 16]),
        ("cuda", "blocks", [80]),
    ):
        limits = block_limits(load_tiny().engine, torch.device(device), path, 16)
        blocks = blocks_of(batches, parameters, ["item.id"], *limits)
        assert [len(block) for block in blocks] == sizes
    one = block_limits(load_tiny("engine.path=reference").engine, torch.device("cpu"), "blocks", 16)
    assert len(blocks_of(batches, parameters, ["item.id"], *one)) == 80


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
    assert blocks_of(mixed, parameters, ["item.id"], 1.0, None) == [[0, 2], [1, 3]]


def test_an_error_in_a_block_is_that_of_the_client_at_fault(pair, monkeypatch):
    """Client 5's own work fails, so a block with it fails, and the error is that of client 5
    alone."""
    fast, _, arrays = pair("blocks")
    draw = Sgd.draw
    train_block = Sgd.train_block

    def marked(self, data, random):
        found = draw(self).batches(data, self.model.schema, random)
        return replace(found, examples=-1) if data.client == 5 else found

    def failing(self, parameters, block, client_params=None):
        if len(block) > 1 or block.examples == (-1,):
            raise RuntimeError("no such row" if len(block) == 1 else "something in this block")
        return train_block(self, parameters, block, client_params)

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


# The variational autoencoder's steps in blocks equal those client by client.

VAE = ("model={name='vae', hidden=6, latent=3}", "evaluation.fine-tune={epochs=0}")
STEPS = {
    "one-epoch": "step={name='vae', learning-rate=0.3, beta=0.7}",
    "annealed": "step={name='vae', anneal-rounds=4}",
    "no-epoch": "step={name='vae', epochs=0}",
    "vae-priors": "step={name='vae', learning-rate=0.3, priors={}}",
    "priors-by-gender": "step={name='vae', priors={features=['gender']}}",
    "sound": "step={name='dpvae', clip-norm=0.3, examples=3}",
    "paper": "step={name='dpvae', mode='paper', examples=3}",
    "all-examples": "step={name='dpvae', clip-norm=0.01, examples=100, weighting='precision'}",
    "whole-user": "step={name='dpvae', clip='user', clip-norm=0.2, participations=4}",
    "priors": "step={name='dpvae', clip-norm=0.3, priors={}, participations=4}",
    "own-priors": "step={name='dpvae', mode='paper', priors={features=['gender'], noise=false}}",
    "no-upload": "step={name='dpvae', epochs=0}",
    "autoencoder": "step={name='vae', learning-rate=0.3}",
    "autoencoder-sound": "step={name='dpvae', clip-norm=0.3, examples=3}",
    "autoencoder-paper": "step={name='dpvae', mode='paper', examples=3}",
}


@pytest.fixture
def vae_pair(load_tiny):
    """A node, one with the oracle in place of the step, and the initial parameters."""

    def make(*overrides):
        fast, slow = (
            Node(load_tiny(*VAE, *overrides, f"engine.path={p}"), 0, 1, None)
            for p in ("blocks", "reference")
        )
        with_oracle(slow)
        return fast, slow, {name: value.numpy() for name, value in slow.initial().items()}

    return make


def settings(case):
    return (STEPS[case], *["model.name='ae'"] * ("autoencoder" in case))


def close(got, expected):
    assert set(got) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(
            got[name], value, rtol=1e-4, atol=1e-6 * max(1.0, np.abs(np.asarray(value)).max())
        )


def without_noise(*nodes):
    """Large noise would hide differences between gradients, so the noise is almost zero."""
    for node in nodes:
        step = node.experiment.step
        if step.name == "dpvae":
            tiny = {**step.options, "epsilon": 1e7, "budgets": "equal", "delta": 0.1}
            table = node.experiment.model_copy(
                update={"step": Section.model_validate({"name": "dpvae", **tiny})}
            )
            node.experiment = table


@pytest.fixture
def odd(world):
    """One positive; the same item twice; only a low rating; no row; the whole catalogue."""
    population = world()
    first = population.client(0)
    everything, ones = np.arange(6), np.ones(6, np.float32)
    longest = replace(
        first, client=4, items=everything, labels=ones, positives=everything, ratings=5 * ones
    )
    return {
        **{client: population.client(client) for client in range(4)},
        4: longest,
    }, population.schema()


def given(node, odd):
    """A node that hosts these clients."""
    clients, schema = odd
    population = SimpleNamespace(
        client=clients.__getitem__, clients=lambda ids: [clients[one] for one in ids.tolist()]
    )
    population.schema = lambda: schema
    node.__dict__["population"] = population
    node.__dict__.pop("model", None)
    return node


@pytest.mark.parametrize("noise", [True, False])
@pytest.mark.parametrize("case", STEPS)
def test_odd_clients_are_equal(vae_pair, odd, case, noise):
    fast, slow = (given(node, odd) for node in vae_pair(*settings(case))[:2])
    if not noise:
        without_noise(fast, slow)
    reference = slow.step(slow.experiment.step)
    assert_members_alike(fast, reference, slow.initial(), list(odd[0].values()), close)


# Clients with private parameters, trained in blocks: equal to training one after the other, over
# several rounds.

PRIVATE_BLOCKS_SETTINGS = {
    "plain": {},
    "proximal": {"proximal-mu": 0.3},
    "items late": {"late-parameters": ["item.*"], "rates": {"item.*": 5.0, "bias": 0.0}},
}


@pytest.fixture
def nodes(tiny_experiment, tmp_path):
    """Two nodes that differ in the path, each with its own private folder."""
    from fedrec.experiment.schema import load

    def make(task, settings, model=None):
        found = []
        for path in ("auto", "reference"):
            table = tiny_experiment() | {
                "task": task,
                "split": {"name": "ratio", "stream": "dataset"},
            }
            if task == "rating":
                del table["positive-above"]
            table["model"] = model or {"name": "mf", "factors": 3, "center": 3.0}
            common = {
                "learning-rate": 0.05,
                "epochs": 3,
                "batch-size": 4,
                "private-parameters": ["user.*"],
            }
            table["step"] = {"name": "sgd", **common, **settings}
            table["evaluation"]["fine-tune"] = {"epochs": 0}
            table["engine"]["path"] = path
            found.append(Node(load(table), 0, 1, tmp_path / path))
        return found

    return make


def assert_close(got, expected):
    np.testing.assert_allclose(
        got, expected, rtol=1e-4, atol=2e-6 * max(1.0, np.abs(expected).max())
    )


@pytest.mark.slow
@pytest.mark.parametrize("task", ["rating", "ranking"])
@pytest.mark.parametrize("case", PRIVATE_BLOCKS_SETTINGS)
def test_two_rounds_are_equal(nodes, case, task):
    """The second round starts from the private state of the first one; some clients are new in
    it."""
    fast, slow = nodes(task, PRIVATE_BLOCKS_SETTINGS[case])
    arrays = {name: value.numpy() for name, value in slow.initial().items()}
    for number, clients in ((1, np.arange(0, 14)), (2, np.arange(6, 24))):
        order = TrainOrder(number, clients)
        got, expected = train_clients(fast, arrays, order), train_clients(slow, arrays, order)
        for name in arrays:
            assert_close(dense_change(got.total[name]), dense_change(expected.total[name]))
        assert got.loss == pytest.approx(expected.loss, rel=1e-4)
        assert got.examples == expected.examples
        assert not dense_change(got.total["user.factors"]).any()
        changes = {name: dense_change(got.total[name]) for name, value in arrays.items()}
        arrays = {
            name: value + changes[name].astype(np.float32) / 20 for name, value in arrays.items()
        }
    for client in range(24):
        own, other = fast.private.load(client, 3), slow.private.load(client, 3)
        assert list(own) == list(other) == ["user.factors", "user.bias"]
        for name in own:
            assert_close(own[name], other[name])
    assert (
        np.abs(
            fast.private.load(8, 3)["user.factors"] - fast.private.load(8, 2)["user.factors"]
        ).max()
        > 1e-3
    )
    order = EvaluateOrder(2, None)
    mine, others = (evaluate_clients(node, arrays, order).table for node in (fast, slow))
    np.testing.assert_allclose(mine.to_numpy(), others.to_numpy(), rtol=1e-4, atol=1e-6)
    # there is no state before the first round
    later = evaluate_clients(fast, arrays, EvaluateOrder(0, None)).table
    assert not np.allclose(later.iloc[:, 0], mine.iloc[:, 0])


NEUMF = {
    "both": {"name": "neumf", "factors": 3, "tower": [4, 5, 3]},
    "tower": {"name": "neumf", "factors": 0, "tower": [6, 4]},
}


@pytest.mark.parametrize("task", ["rating", "ranking"])
@pytest.mark.parametrize("case", NEUMF)
def test_neumf_in_the_kernel_is_equal(nodes, case, task):
    rates = {"user.*": 2.0, "item.*": 3.0, "output.*": 0.5}
    fast, slow = nodes(task, {"rates": rates}, NEUMF[case])
    assert fast.paths == {"sgd": "kernel"}
    arrays = {name: value.numpy() for name, value in slow.initial().items()}
    order = TrainOrder(1, np.arange(12))
    got, expected = (train_clients(node, arrays, order) for node in (fast, slow))
    for name in arrays:
        wanted = dense_change(expected.total[name])
        assert_close(dense_change(got.total[name]), wanted)
    assert got.loss == pytest.approx(expected.loss, rel=1e-4)
    for name, own in fast.private.load(5, 2).items():
        assert_close(own, slow.private.load(5, 2)[name])
        assert np.abs(own - arrays[name]).max() > 1e-3


def test_neumf_without_a_tower_trains_in_blocks(nodes):
    fast, _ = nodes("ranking", {}, {"name": "neumf", "factors": 3, "tower": []})
    assert fast.paths == {"sgd": "blocks (the model declares no kernel)"}


def test_private_item_tables_go_one_by_one(nodes):
    """Whole tables per client are not compatible with compact ones."""
    fast, slow = nodes("rating", {"private-parameters": ["item.bias", "user.*"]})
    arrays = {name: value.numpy() for name, value in slow.initial().items()}
    for node in (fast, slow):
        reply = train_clients(node, arrays, TrainOrder(1, np.arange(5)))
        assert not dense_change(reply.total["item.bias"]).any()
        assert node.private.load(3, 2)["item.bias"].shape == (30, 1)
