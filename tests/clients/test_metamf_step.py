# SPDX-License-Identifier: Apache-2.0
"""Gradients of generated parameters on a node: in blocks and one by one, for unusual clients, and
errors."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from clients.generated import requested_items
from clients.hosting.node import Node
from clients.steps.metamf import MetaMfStep
from clients.training.round import train_each
from fedrec.errors import ClientError
from fedrec.models.metamf import generate
from fedrec.protocol.client_arrays import ClientArrays
from fedrec.protocol.orders import ItemQuery, TrainOrder

STEP = {"name": "metamf"}
CLIENTS = np.arange(4)


@pytest.fixture
def nodes(load_tiny, world):
    """By path, a node of the four unusual clients of `world`: 1 has an item twice, 2 only a low
    rating, 3 no row."""

    def make(task):
        found = {}
        for path in ("auto", "reference"):
            model = (
                "model={name='metamf', user=3, memory=4, generator=5, embedding=4, rank=2,"
                " hidden=3, user-std=1.0}"
            )
            found[path] = Node(
                load_tiny(f"engine.path={path}", model, "step={name='metamf'}"), 0, 1, None
            )
            found[path].__dict__["population"] = world(task)
        return found

    return make


def message(node, clients=CLIENTS):
    """The message of a server for a round."""
    requests = requested_items(node, ItemQuery(1, clients, "train", STEP))
    values, low = generate(node.initial(), torch.from_numpy(clients), requests)
    return ClientArrays(
        requests, {name: value.numpy() for name, value in values.items()}, {"item.low": low.numpy()}
    )


def order(clients=CLIENTS):
    return TrainOrder(1, clients, step=STEP, each=True)


@pytest.mark.parametrize("task", ["rating", "ranking"])
def test_blocks_give_what_single_clients_give(nodes, task):
    both = nodes(task)
    arrays = message(both["auto"]).arrays()
    got, expected = (train_each(node, arrays, order()) for node in both.values())
    assert got.examples.tolist() == expected.examples.tolist() and (got.examples == 0).any()
    np.testing.assert_allclose(got.losses, expected.losses, rtol=1e-5)
    assert np.isnan(got.losses[got.examples == 0]).all()
    for name, value in expected.updates.arrays().items():
        np.testing.assert_allclose(got.updates.arrays()[name], value, rtol=1e-4, atol=1e-7)
    assert np.abs(got.updates.rows["item.low"]).max() > 1e-4
    assert not any(value[got.examples == 0].any() for value in got.updates.values.values())


def test_a_repeated_rating_counts_repeatedly(nodes):
    """Client 1 has only the ratings 5 and 4 of item 1 in training: the gradient depends on their
    mean."""
    node = nodes("rating")["auto"]
    given = message(node, np.array([1]))
    reply = train_each(node, given.arrays(), order(np.array([1])))
    values = {name: torch.from_numpy(value) for name, value in given.values.items()}
    assert given.requests.items.tolist() == [1]
    low = torch.from_numpy(given.rows["item.low"]).requires_grad_()
    predicted = node.model.predict({**values, "item.low": low[None]}, (), torch.tensor([[0]]))
    loss = ((predicted[0, 0] - torch.tensor([5.0, 4.0])) ** 2).mean()
    loss.backward()
    assert reply.losses[0] == pytest.approx(float(loss.detach()), rel=1e-5)
    np.testing.assert_allclose(-reply.updates.rows["item.low"], low.grad.numpy(), rtol=1e-4)


def test_rows_that_were_not_requested_are_refused(nodes):
    node = nodes("rating")["auto"]
    arrays = message(node).arrays()
    with pytest.raises(ClientError, match="not those that the clients need"):
        train_each(node, {**arrays, "items": (arrays["items"] + 1) % 6}, order())


def test_evaluation_requests_held_out_items_once(nodes):
    requests = requested_items(
        nodes("rating")["auto"], ItemQuery(1, np.array([1, 0]), "evaluate", STEP)
    )
    assert requests.clients.tolist() == [0, 1]
    assert np.split(requests.items, requests.offsets[1:-1])[0].tolist() == [2, 3]
    assert requests.items[2:].tolist() == [4]


def test_an_error_in_a_block_is_that_of_the_client_at_fault(nodes, monkeypatch):
    node = nodes("rating")["auto"]
    batches = MetaMfStep.batches
    train_block = MetaMfStep.train_block

    def marked(self, data, random):
        found = batches(self, data, random)
        return replace(found, examples=-1) if data.client == 1 else found

    def failing(self, parameters, block, own=None):
        if len(block) > 1 or block.examples == (-1,):
            raise RuntimeError("no such row" if len(block) == 1 else "something in this block")
        return train_block(self, parameters, block, own)

    monkeypatch.setattr(MetaMfStep, "batches", marked)
    monkeypatch.setattr(MetaMfStep, "train_block", failing)
    with pytest.raises(
        ClientError,
        match=r"(?s)client 1 failed in step 'MetaMfStep' \(round 1, node 0\).*no such row",
    ):
        train_each(node, message(node).arrays(), order())
    others = np.array([0, 2])
    with pytest.raises(ClientError, match=r"(?s)for none of them alone.*path=reference"):
        train_each(node, message(node, others).arrays(), order(others))
