# SPDX-License-Identifier: Apache-2.0
"""Gradients of `blocks` can be differentiated again, as second-order methods need, with the
reference's result."""

import numpy as np
import pytest
import torch

from clients.hosting.node import Node
from fedrec.cohort.descent import Recommending
from fedrec.rng import stream, torch_stream
from tests.clients.oracles import with_oracle


def curvature(loss, values, directions):
    """Product of the Hessian and a direction, by parameter, and its part from the gradients of all
    parameters."""
    leaves = [value.clone().requires_grad_() for value in values]
    first = torch.autograd.grad(
        loss(leaves).sum(), leaves, create_graph=True, allow_unused=True, materialize_grads=True
    )
    product = sum(
        (gradient * direction).sum() for gradient, direction in zip(first, directions, strict=True)
    )
    return torch.autograd.grad(product, leaves, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("task", ["ranking", "rating"])
def test_second_derivatives_are_those_of_the_reference(load_tiny, world, task):
    """For three clients at once on gathered item rows, against one at a time on whole tables, in
    float64."""
    overrides = [
        "model.hidden=[6, 5]",
        "model.activation='tanh'",
        "model.item-bias=true",
        "step.batch-size=4",
    ]
    node = Node(load_tiny(*overrides), 0, 1, None)
    node.__dict__["population"] = world(task)
    step, model, clients = node.step(node.experiment.step), node.model, [0, 1]
    oracle = with_oracle(node).step(node.experiment.step)
    start = {name: value.double() for name, value in model.initial(torch_stream(0, "init")).items()}
    start = {
        n: v + 0.3 * torch.randn(v.shape, generator=torch.Generator().manual_seed(1), dtype=v.dtype)
        for n, v in start.items()
    }
    data = [node.population.client(client) for client in clients]
    batches = [step.batches(one, stream(0, "client", one.client, 1)) for one in data]
    order = sorted(range(len(clients)), key=lambda place: -len(batches[place].sizes))
    block = step.block(
        [data[place].features for place in order], [batches[place] for place in order], node.device
    )
    object.__setattr__(block, "labels", block.labels.double())
    names, active = list(start), block.active[0]
    directions = {
        name: torch.randn(
            value.shape, generator=torch.Generator().manual_seed(2), dtype=value.dtype
        )
        for name, value in start.items()
    }

    def of_all(name, value):
        """A dense parameter of all clients, or the rows of the first step's items of a table."""
        return (
            value[block.items[0, :active]]
            if name in model.item_tables
            else value.expand(active, *value.shape)
        )

    objective = Recommending(model)
    got = curvature(
        lambda leaves: objective(dict(zip(names, leaves, strict=True)), block, 0, active),
        [of_all(name, start[name]).clone() for name in names],
        [of_all(name, directions[name]) for name in names],
    )
    for member, place in enumerate(order[:active]):
        size = int(batches[place].sizes[0])
        items = batches[place].items[0, :size]
        labels = batches[place].labels[0, :size].astype(np.float64)
        users = tuple(torch.from_numpy(codes).unsqueeze(0) for codes in data[place].features)
        one = oracle._loss(users, items, labels)
        wanted = curvature(
            lambda leaves, one=one: one(
                {n: leaf.unsqueeze(0) for n, leaf in zip(names, leaves, strict=True)}
            ),
            list(start.values()),
            list(directions.values()),
        )
        for name, mine, whole in zip(names, got, wanted, strict=True):
            if name in model.item_tables:
                table = torch.zeros_like(whole)
                mine = table.index_add(0, block.items[0, member, :size], mine[member, :size])
            else:
                mine = mine[member]
            torch.testing.assert_close(mine, whole, rtol=1e-9, atol=1e-12)
            assert not name.startswith("layer0") or bool(whole.any())
