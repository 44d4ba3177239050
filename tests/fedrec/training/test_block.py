# SPDX-License-Identifier: Apache-2.0
"""Blocks and layers with a cohort dimension, recorded steps, and second-order gradients."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fedrec.data.interactions import FeatureTable, Schema
from fedrec.models.mf import Mf, MfConfig
from fedrec.nn.layers import gather_rows, mean_rows, perceptron, row_shares, weighted_cross_entropy
from fedrec.training.block import Batches, Block, _numbered
from fedrec.training.recorded_steps import run_steps
from fedrec.training.sgd import SgdSettings, descend

# Blocks of clients.


@pytest.mark.parametrize("catalogue", [1, 50, 5_000_000])
@pytest.mark.parametrize("order", ["C", "F"])
def test_items_are_numbered_as_numpy_does(catalogue, order):
    """Of clients with no, one and several steps, with padding anywhere."""
    random = np.random.default_rng(catalogue)
    steps = np.array([3, 0, 1, 5, 2])
    references = random.integers(catalogue, size=(steps.sum(), 12))
    real = random.random(references.shape) < 0.7
    real[-2:] = False  # the last client has padding alone
    ends = steps.cumsum()
    given = [
        (references[start:end].copy(order), real[start:end].copy(order))
        for start, end in zip(ends - steps, ends, strict=True)
    ]
    table, counts, places = _numbered(given)
    for client, (items, there) in enumerate(given):
        own = items[there]
        wanted, number = np.unique(own, return_inverse=True)
        assert np.array_equal(table[client, : counts[client]], wanted)
        assert not table[client, counts[client] :].any()
        assert np.array_equal(places[client][there], number)
        assert not places[client][~there].any()


def test_weights_are_one_over_the_size_of_a_batch_and_begins_are_steps():
    def cut(count):
        return Batches.cut([(np.arange(count), np.ones(count, dtype=np.float32))] * 3, 4)

    block = Block.of([(), ()], [cut(6), cut(1)], torch.device("cpu"))
    assert block.weights[:, 0].tolist() == [[0.25] * 4, [0.5, 0.5, 0, 0]] * 3
    assert block.weights[:3, 1].tolist() == [[1, 0, 0, 0]] * 3 and not block.weights[3:, 1].any()
    assert block.steps == [6, 3]
    losses = torch.arange(12.0).view(6, 2)
    assert block.last_epoch_means(losses).tolist() == [9.0, 5.0]


# Layers with a cohort dimension against torch.nn client by client, and their derivatives.

COHORT_LAYERS_ACTIVATIONS = {
    "identity": nn.Identity,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
}


def draw(*shape, seed=0):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64
    )


def test_rows_are_averaged_over_the_codes_that_are_there():
    table = torch.tensor([[[1.0, 10], [2, 20], [3, 30]]])
    codes = torch.tensor([[[0, 2], [1, -1], [-1, -1]]])
    expected = [[[2, 20], [2, 20], [0, 0]]]
    assert mean_rows(table, codes).tolist() == expected
    assert mean_rows(table, row_shares(codes, 3)).tolist() == expected


def test_shares_of_a_single_code_are_one_hot():
    assert row_shares(torch.tensor([[2], [-1]]), 3).tolist() == [[0, 0, 1], [0, 0, 0]]


def test_rows_are_taken_from_each_clients_own_table():
    tables = torch.arange(12.0).view(2, 3, 2)
    index = torch.tensor([[2], [0]])
    assert gather_rows(tables, index).tolist() == [[[4, 5]], [[6, 7]]]


@pytest.mark.parametrize("activation", COHORT_LAYERS_ACTIVATIONS)
def test_perceptron_is_that_of_torch(activation):
    """Two clients; the input is the concatenation of one user part (one row) and two item parts."""
    user, items = draw(2, 1, 3), [draw(2, 4, 2), draw(2, 4, 5)]
    weights = [draw(2, 10, 6), draw(2, 6, 4), draw(2, 4, 1)]
    biases = [draw(2, 6), draw(2, 4), draw(2, 1)]
    leaves = [value.requires_grad_() for value in (user, *items, *weights, *biases)]
    outputs = perceptron([[user], items], weights, biases, activation)
    gradients = torch.autograd.grad(outputs.square().sum(), leaves)
    for client in range(2):
        layers = [
            nn.Linear(10, 6),
            COHORT_LAYERS_ACTIVATIONS[activation](),
            nn.Linear(6, 4),
            COHORT_LAYERS_ACTIVATIONS[activation](),
            nn.Linear(4, 1),
        ]
        network, linear = nn.Sequential(*layers).double(), layers[::2]
        for layer, weight, bias in zip(linear, weights, biases, strict=True):
            layer.weight.data = weight[client].detach().T.clone()
            layer.bias.data = bias[client].detach().clone()
        own = [part.detach()[client].clone().requires_grad_() for part in (user, *items)]
        expected = network(torch.cat([own[0].expand(4, -1), *own[1:]], 1))
        torch.testing.assert_close(outputs[client].detach(), expected.detach()[:, 0])
        expected.square().sum().backward()
        wanted = [*own, *(layer.weight for layer in linear), *(layer.bias for layer in linear)]
        for place, (gradient, leaf) in enumerate(zip(gradients, wanted, strict=True)):
            torch.testing.assert_close(
                gradient[client], leaf.grad.T if 3 <= place < 6 else leaf.grad
            )


def test_weighted_cross_entropy_is_that_of_torch():
    logits = draw(2, 5).requires_grad_()
    labels, weights = (draw(2, 5, seed=1) > 0).double(), draw(2, 5, seed=2).abs()
    scale = torch.tensor([2.0, -1.0], dtype=torch.float64)
    (weighted_cross_entropy(logits, labels, weights) * scale).sum().backward()
    plain = logits.detach().clone().requires_grad_()
    losses = nn.functional.binary_cross_entropy_with_logits(plain, labels, reduction="none")
    ((losses * weights).sum(-1) * scale).sum().backward()
    torch.testing.assert_close(logits.grad, plain.grad)
    found = weighted_cross_entropy(logits.detach(), labels, weights)
    torch.testing.assert_close(found, (losses.detach() * weights).sum(-1))


# Steps of a block that are recorded once and replayed.


class Repeater:
    """Does again what it recorded; notes when."""

    def __init__(self):
        self.noted = []

    @contextmanager
    def entered(self):
        self.noted.append("begun")
        yield
        self.noted.append("ended")

    def record(self, work):
        self.noted.append("recorded")
        return SimpleNamespace(replay=work)


@pytest.fixture
def recorder(monkeypatch):
    made = Repeater()
    monkeypatch.setattr("fedrec.training.recorded_steps.recorder_of", lambda device: made)
    return made


def block_of(*counts):
    """Clients with so many steps of one example."""
    batches = [
        Batches.cut([(np.arange(count), np.ones(count, dtype=np.float32))], 1) for count in counts
    ]
    return Block.of([()] * len(counts), batches, torch.device("cpu"))


class Counting:
    """A step that adds its items to a sum of each client; notes the clients of each call."""

    def __init__(self, clients):
        self.sums = torch.zeros(clients, dtype=torch.int64)
        self.calls = []

    def __call__(self, block, step, active):
        own = block.items[step, :active, 0] + 1
        if block.training is not None:
            own = own.where(block.training[:active], 0)
        self.sums[:active] += own
        self.calls.append((active, block.number is not None))
        return own.float()


def test_every_client_takes_its_own_steps_in_their_order(recorder):
    counts = (12, 9, 9, 6, 5, 3, 1, 1)
    block, steps = block_of(*counts), Counting(8)
    losses = run_steps(block, steps)
    assert steps.sums.tolist() == [sum(range(1, count + 1)) for count in counts]
    for client, count in enumerate(counts):
        assert losses[:count, client].tolist() == list(range(1, count + 1))
    # 8, 6, 6, 5, 5 clients, then 4, 3, 3, 3; three steps of the last are not worth a recording
    assert steps.calls == [(8, True)] * 5 + [(4, True)] * 4 + [(1, False)] * 3
    assert recorder.noted == ["begun", "recorded", "recorded", "ended"]


@pytest.mark.parametrize("recorded", [True, False])
def test_steps_of_two_kinds_are_not_one_recording(recorder, recorded):
    block, steps = block_of(10, 10), Counting(2)
    run_steps(block, steps, kind=lambda step: step < 4, capturable=recorded)
    assert steps.sums.tolist() == [55, 55]
    assert recorder.noted == (["begun", *["recorded"] * 2, "ended"] if recorded else [])


class Shrinking:
    """A loss that does not depend on a client's examples, so that only their number matters."""

    capturable = True

    def __call__(self, parameters, block, step, active):
        return parameters["user.factors"].square().sum(-1)


def test_clients_who_have_ended_stay_as_they_are(recorder):
    """Each step multiplies a client's factors by the same number."""
    counts = (12, 9, 5, 1)
    model = Mf(MfConfig(factors=2), Schema(12, FeatureTable(12), (), "ranking"))
    start = model.initial(torch.Generator().manual_seed(0))
    found = descend(model, start, block_of(*counts), SgdSettings(0.1), Shrinking())
    for client, count in enumerate(counts):
        wanted = start["user.factors"] * (1 - 2 * 0.1) ** count
        torch.testing.assert_close(found.values("user.factors")[client], wanted)
    assert "recorded" in recorder.noted
