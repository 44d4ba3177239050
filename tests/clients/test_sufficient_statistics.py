# SPDX-License-Identifier: Apache-2.0
"""Statistics of many clients at once: the same updates, norms and sums as client by client."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from clients.hosting.node import Node
from clients.steps.gram import GramStep
from clients.training.blocks import train_in_blocks
from clients.training.one_client import update_of
from clients.training.round import train_clients
from fedrec.experiment.loading import load
from fedrec.privacy.protection import Protection
from fedrec.protocol.compact import network_bytes
from fedrec.protocol.messages import pack_sum
from fedrec.protocol.orders import TrainOrder
from fedrec.protocol.records import read_arrays
from fedrec.protocol.sparse_update import SparseAccumulator, dense_change
from fedrec.rng import stream, torch_stream

STEPS = [
    {"name": "counts"},
    {"name": "counts", "low-rated": 0.3},
    {"name": "gram"},
    {"name": "gram", "low-rated": 0.3, "exponent": 0.4},
    {"name": "gram", "epochs": 0},
    {"name": "transitions", "exponent": 0.4},
    {"name": "transitions", "epochs": 0},
]


@pytest.fixture(params=STEPS, ids=str)
def node(request, tiny_experiment):
    """A node whose model has fewer products than there are items, and biases that scale them."""
    ordered = request.param["name"] == "transitions"
    model = {"name": "transitions" if ordered else "item-weights", "items": 20}
    return Node(load({**tiny_experiment(), "model": model, "step": request.param}), 0, 1, None)


@pytest.fixture
def parameters(node):
    found = node.model.initial(torch_stream(0, "init"))
    biases = torch.rand(found["item.bias"].shape, generator=torch_stream(1, "biases"))
    return {**found, "item.bias": biases}


def updates(node, parameters):
    """Each client's update by the reference, `[C]` dictionaries."""
    step = node.step(node.experiment.step)
    clients = [node.population.client(client) for client in node.training.tolist()]
    return [update_of(step, parameters, data, stream(0, "x")) for data in clients]


def whole(node, parameters):
    step = node.step(node.experiment.step)
    found = list(
        train_in_blocks(node, step, node.path(step), parameters, node.training, "client", 1)
    )
    ((places, outcome),) = found
    assert places == list(range(len(node.training)))
    return outcome


def test_noise_of_clients_on_products_is_the_symmetric_part_of_noise_on_squares(node, parameters):
    """A function of squares that have noise on every number, and of no more than these. An entry
    beside the diagonal is the mean of two of them; without products the sum has them all."""
    arrays = {name: value.numpy() for name, value in parameters.items()}
    names = tuple(name for name in arrays if arrays[name].ndim == 2)
    protection = Protection(2.0, 2, names, noise_scale=0.5)
    order = TrainOrder(1, node.training, protection=protection)
    reply = train_clients(node, arrays, order)
    clipped = train_clients(
        node, arrays, replace(order, protection=replace(protection, noise_scale=0.0))
    )
    noise = {name: np.zeros(arrays[name].shape) for name in names}
    for client in node.training.tolist():
        own = protection.noisy(
            {name: np.zeros_like(one) for name, one in noise.items()}, node.noise, 1, client
        )
        noise = {name: one + own[name] for name, one in noise.items()}
    expected = {
        name: dense_change(clipped.total[name], arrays[name]) + one for name, one in noise.items()
    }
    products = expected["item.weights"]
    if node.experiment.step.name == "gram":
        expected["item.weights"] = (products + products.T) / 2
    for name, one in expected.items():
        np.testing.assert_allclose(reply.total[name], one, rtol=0, atol=1e-4)
    assert network_bytes(read_arrays(pack_sum(reply))) * reply.clients == reply.sent


def test_each_update_is_the_reference(node, parameters):
    outcome, expected = whole(node, parameters), updates(node, parameters)
    assert list(outcome.block.examples) == [one.examples for one in expected]
    assert np.isnan(outcome.losses()).all()
    for place, one in enumerate(expected):
        own = outcome.parameters_of(place)
        for name, delta in one.delta.items():
            assert torch.allclose(own[name][0] - parameters[name], delta, atol=1e-6), name
    sent = node.experiment.step.options.get("epochs", 1)
    assert any(delta.any() for one in expected for delta in one.delta.values()) == bool(sent)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("names", [None, ["item.weights"], ["item.bias"]])
def test_norms_are_those_of_the_updates(node, parameters, order, names):
    found = whole(node, parameters).norms(names, order)
    for norm, one in zip(found.tolist(), updates(node, parameters), strict=True):
        chosen = [d for name, d in one.delta.items() if names is None or name in names]
        flat = torch.cat([delta.flatten() for delta in chosen]).double()
        assert norm == pytest.approx(float(torch.linalg.vector_norm(flat, order)), rel=1e-6)


def test_sums_are_weighted_by_the_shares(node, parameters):
    outcome, expected = whole(node, parameters), updates(node, parameters)
    shares = torch.rand(len(expected), generator=torch_stream(2, "shares")).double()
    shares[0] = 0.0
    totals = {name: torch.zeros(v.shape).double() for name, v in parameters.items()}
    outcome.add_dense(totals, shares)
    for name, total in totals.items():
        deltas = zip(shares, expected, strict=True)
        assert torch.allclose(
            total, sum(s * one.delta[name].double() for s, one in deltas), atol=1e-5
        )


def test_counts_are_added_to_a_sparse_sum_and_products_are_refused(node, parameters):
    outcome = whole(node, parameters)
    shares = torch.linspace(0, 1, len(node.training)).double()
    rows = SparseAccumulator(tuple(parameters["item.bias"].shape))
    outcome.add_rows("item.bias", rows, shares)
    found = dense_change(rows.change(parameters["item.bias"].numpy()), parameters["item.bias"])
    expected = {"item.bias": torch.zeros(parameters["item.bias"].shape).double()}
    outcome.add_dense(expected, shares)
    assert found == pytest.approx(expected["item.bias"].numpy(), abs=1e-6)
    if outcome.outer:
        with pytest.raises(ValueError, match="outer products"):
            outcome.add_rows("item.weights", rows, shares)


def test_a_round_gives_the_reference_sum_with_and_without_clipping(node, parameters):
    arrays = {name: value.numpy() for name, value in parameters.items()}
    clip = Protection(clip_norm=1.5, order=2, names=tuple(parameters))
    for protection in (None, clip):
        order = TrainOrder(1, node.training, protection=protection)
        total = train_clients(node, arrays, order).total
        for name, change in total.items():
            expected = np.zeros(arrays[name].shape)
            for one in updates(node, parameters):
                flat = torch.cat([delta.flatten() for delta in one.delta.values()]).double()
                norm = float(torch.linalg.vector_norm(flat))
                factor = min(1.0, 1.5 / max(norm, 1e-12)) if protection else 1.0
                expected += factor * one.delta[name].double().numpy()
            assert dense_change(change, arrays[name]) == pytest.approx(expected, abs=1e-4)


def test_a_subclass_with_another_update_is_asked_client_by_client(node):
    class Doubled(GramStep):
        def train_block(self, parameters, block, own=None):
            raise NotImplementedError

    class Scaled(GramStep):
        def entries(self, parameters, items, weights):
            raise NotImplementedError

    made = [
        cls(cls.Config(), node.model, torch.device("cpu")) for cls in (GramStep, Doubled, Scaled)
    ]
    assert [step.whole for step in made] == [True, False, True]
