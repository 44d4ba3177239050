# SPDX-License-Identifier: Apache-2.0
"""Protection of updates on the client: clipping in blocks and one by one, invalid updates, client
noise."""

import math
import re

import numpy as np
import pytest

from clients.node import Node
from clients.round import train_clients
from fedrec.errors import ClientError
from fedrec.privacy.clipping import Protection
from fedrec.protocol.messages import TrainOrder
from fedrec.protocol.updates import SparseUpdate, dense_change
from fedrec.rng import torch_stream

CLIENTS = np.arange(18)
CASES = {"plain": (), "proximal": ("step.proximal-mu=0.3",)}
SUBSETS = {"all": r".*", "tables": r"item\..*", "layers": r"layer.*"}


@pytest.fixture
def pair(load_tiny):
    """Two nodes that differ in nothing but the path, and the initial parameters."""

    def make(*overrides):
        nodes = {}
        for path in ("auto", "reference"):
            experiment = load_tiny(
                f"engine.path={path}", "step.learning-rate=0.2", "step.batch-size=4", *overrides
            )
            nodes[path] = Node(experiment, 0, 1, None)
        parameters = nodes["reference"].model.initial(torch_stream(0, "init"))
        return (
            nodes["auto"],
            nodes["reference"],
            {name: value.numpy() for name, value in parameters.items()},
        )

    return make


def asked(node, arrays, protection, clients=CLIENTS):
    """The reply, and its sums as whole arrays."""
    reply = train_clients(node, arrays, TrainOrder(1, np.asarray(clients), protection=protection))
    return reply, {name: dense_change(change) for name, change in reply.total.items()}


def raw(node, arrays, client):
    """One client's update without protection, as whole arrays, from the path `reference`."""
    order = TrainOrder(1, np.array([client]))
    return {n: dense_change(c) for n, c in train_clients(node, arrays, order).total.items()}


def length(update, order=2):
    return float(
        np.linalg.norm(np.concatenate([np.ravel(value) for value in update.values()]), order)
    )


def assert_same(got, expected, atol=1e-6):
    assert set(got) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=atol)


@pytest.fixture(params=CASES)
def raw_updates(request, pair):
    """The pair of a case, and each client's update without protection."""
    fast, slow, arrays = pair(*CASES[request.param])
    return fast, slow, arrays, [raw(slow, arrays, client) for client in CLIENTS]


def test_each_client_is_clipped_over_all_that_it_sends(raw_updates):
    """By hand from raw updates, in blocks and one by one; some exceed the clip norm and some do
    not."""
    for order in (2, 1):
        for subset in SUBSETS:
            _assert_clipped(*raw_updates, order, subset)


def _assert_clipped(fast, slow, arrays, whole, order, subset):
    names = [name for name in arrays if re.match(SUBSETS[subset], name)]
    updates = [{name: update[name] for name in names} for update in whole]
    lengths = np.array([length(update, order) for update in updates])
    norm = float(np.median(lengths))
    protection = Protection(norm, order, tuple(names))
    factors = np.minimum(1.0, norm / lengths)
    clipped = [
        {name: factor * value for name, value in update.items()}
        for factor, update in zip(factors, updates, strict=True)
    ]
    for node, some in ((fast, CLIENTS), (slow, CLIENTS[::3])):
        for client in some:
            reply, got = asked(node, arrays, protection, [client])
            assert_same(got, clipped[client])
            assert length(got, order) <= norm * (1 + 1e-7)
            assert (reply.clients, reply.weight) == (1, 1)
        reply, got = asked(node, arrays, protection)
        assert_same(got, {n: sum(update[n] for update in clipped) for n in names}, atol=1e-5)
        assert reply.clients == 18


@pytest.mark.parametrize("case", CASES)
def test_the_norm_takes_tables_and_layers_together(pair, case):
    """A client with norm S in its tables and S in its layers has norm sqrt(2) S, and is clipped by
    that."""
    fast, slow, arrays = pair(*CASES[case])
    update = raw(slow, arrays, 3)
    parts = [
        length({n: v for n, v in update.items() if ("item" in n) == table})
        for table in (True, False)
    ]
    assert min(parts) > 0.05 * max(parts)  # otherwise the test would prove nothing
    for node in (fast, slow):
        _, got = asked(node, arrays, Protection(max(parts), 2, tuple(arrays)), [3])
        assert_same(
            got, {name: value * max(parts) / math.hypot(*parts) for name, value in update.items()}
        )


@pytest.fixture
def diverging(pair):
    """The two nodes, and parameters with an item so large that training overflows for the one
    client that has it."""

    def make(value):
        own_rows_only = ("step.negatives=0", "step.low-rated=negative")
        fast, slow, arrays = pair(*own_rows_only, "step.epochs=3", "model.activation=relu")
        items = {
            client: set(slow.population.client(client).items.tolist())
            for client in CLIENTS.tolist()
        }
        client = next(
            c
            for c in items
            if items[c] - set().union(*(own for other, own in items.items() if other != c))
        )
        lone = min(
            items[client] - set().union(*(own for other, own in items.items() if other != client))
        )
        spoiled = {name: array.copy() for name, array in arrays.items()}
        spoiled["item.id"][lone] = value
        return (fast, slow), spoiled, client

    return make


@pytest.mark.parametrize("path", [0, 1], ids=["blocks", "reference"])
def test_a_client_that_diverges_adds_exactly_nothing(diverging, path):
    """The others' sums equal those of a round without the client, which is still counted."""
    nodes, arrays, client = diverging(3e38)
    node, others = nodes[path], CLIENTS[client != CLIENTS]
    with pytest.raises(ClientError, match="diverged"):
        raw(nodes[1], arrays, client)  # without protection it ends the round
    protection = Protection(0.5, 2, tuple(arrays))
    alone, nothing = asked(node, arrays, protection, [client])
    assert (alone.clients, alone.weight) == (1, 1)
    assert all(not value.any() and np.isfinite(value).all() for value in nothing.values())
    reply, got = asked(node, arrays, protection)
    without, expected = asked(node, arrays, protection, others)
    assert reply.clients == without.clients + 1 == 18
    assert math.isfinite(reply.loss)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-8)
    assert any(value.any() for value in expected.values())


@pytest.mark.parametrize("path", [0, 1], ids=["blocks", "reference"])
def test_a_client_with_huge_numbers_is_cut_to_the_clip_norm(diverging, path):
    nodes, arrays, client = diverging(1e4)
    update = raw(nodes[1], arrays, client)
    assert 1e2 < length(update) < math.inf
    _, got = asked(nodes[path], arrays, Protection(0.5, 2, tuple(arrays)), [client])
    assert length(got) == pytest.approx(0.5, rel=1e-4) and length(got) <= 0.5 * (1 + 1e-7)


@pytest.mark.parametrize("path", [0, 1], ids=["blocks", "reference"])
def test_a_client_without_training_rows_adds_zero_and_is_not_clipped(pair, world, path):
    node, arrays = pair()[path], None
    node.__dict__["population"] = world()
    node.__dict__.pop("model", None)
    arrays = {
        name: value.numpy() for name, value in node.model.initial(torch_stream(0, "init")).items()
    }
    reply, got = asked(node, arrays, Protection(0.5, 2, tuple(arrays)), [3])
    assert (reply.clients, reply.losses) == (1, 0)
    assert not any(value.any() for value in got.values())


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
@pytest.mark.parametrize("path", [0, 1], ids=["blocks", "reference"])
def test_own_noise_is_on_every_coordinate_of_every_client(pair, path, mechanism):
    """Also rows of the item table that no client touches; the scale is that of the order, and
    clients' noise differs."""
    make = ("model.embedding=64", "dataset.items=400")
    nodes, arrays = pair(*make)[:2], pair(*make)[2]
    order = 1 if mechanism == "laplace" else 2
    quiet = Protection(0.5, order, tuple(arrays))
    noisy = Protection(0.5, order, tuple(arrays), noise_scale=2.0, mechanism=mechanism)
    noises = []
    for client in (3, 4):
        (reply, got) = asked(nodes[path], arrays, noisy, [client])
        (_, clipped) = asked(nodes[path], arrays, quiet, [client])
        assert not any(isinstance(change, SparseUpdate) for change in reply.total.values())
        noises.append(np.concatenate([(got[name] - clipped[name]).ravel() for name in arrays]))
    per_std = {"gaussian": (2.0, 1 / 2), "laplace": (2.0 * math.sqrt(2), 5 / 4)}
    std, spread = per_std[mechanism]
    for noise in noises:
        assert noise.all() and abs(noise.std() / std - 1) < 5 * math.sqrt(spread / noise.size)
    assert abs(np.corrcoef(*noises)[0, 1]) < 5 / math.sqrt(noises[0].size)
    _, both = asked(nodes[path], arrays, noisy, [3, 4])
    _, quiet_both = asked(nodes[path], arrays, quiet, [3, 4])
    summed = np.concatenate([(both[name] - quiet_both[name]).ravel() for name in arrays])
    np.testing.assert_allclose(summed, noises[0] + noises[1], atol=1e-5)


@pytest.mark.parametrize("path", [0, 1], ids=["blocks", "reference"])
def test_a_client_that_diverges_still_sends_noise(diverging, path):
    """Only noise: an upload without noise would reveal that the client failed."""
    nodes, arrays, client = diverging(3e38)
    noisy = Protection(0.5, 2, tuple(arrays), noise_scale=2.0)
    _, got = asked(nodes[path], arrays, noisy, [client])
    noise = np.concatenate([value.ravel() for value in got.values()])
    assert noise.all() and abs(noise.std() / 2 - 1) < 5 / math.sqrt(2 * noise.size)


@pytest.mark.parametrize("path", [0, 1], ids=["blocks", "reference"])
def test_silent_clients_report_neither_losses_nor_examples(pair, path):
    node, arrays = pair()[path], pair()[2]
    told, _ = asked(node, arrays, Protection(0.5, 2, tuple(arrays)))
    silent, _ = asked(node, arrays, Protection(0.5, 2, tuple(arrays), silent=True))
    assert told.examples > 0 and told.loss > 0 and told.losses == 18
    assert (silent.examples, silent.loss, silent.losses) == (0, 0, 0) and silent.clients == 18


def test_a_protection_survives_the_wire():
    protection = Protection(0.1 + 0.2, 1, ("a", "b"), 1 / 3, "laplace", silent=True)
    assert Protection.read(protection.text()) == protection
