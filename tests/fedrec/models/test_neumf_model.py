# SPDX-License-Identifier: Apache-2.0
"""Federated NeuMF against the centralised one: equal logits, and one client's step equals its
gradient."""

import pytest
import torch

from clients.hosting.node import Node
from clients.training.one_client import update_of
from fedrec.baselines.neural.neumf import CentralNeumf, CentralNeumfConfig
from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from fedrec.rng import stream

PARTS = [(4, (6, 5, 3)), (4, ()), (0, (6, 3)), (2, (4, 1))]


@pytest.fixture
def pair(tiny_experiment):
    """A node with the federated model, and the centralised one with the same parameters and its
    user's row."""

    def make(factors, tower):
        table = tiny_experiment() | {
            "model": {"name": "neumf", "factors": factors, "tower": list(tower)},
            "step": {
                "name": "sgd",
                "epochs": 1,
                "batch-size": 10**6,
                "private-parameters": ["user.*"],
            },
        }
        node = Node(load(table), 0, 1, None)
        start = {name: value.double() for name, value in node.initial().items()}
        central = CentralNeumf(CentralNeumfConfig(factors=factors, tower=tower))
        layers = range(max(0, len(tower) - 1))
        central.shared = {"h": start["output.weight"][:, 0], "b": start["output.bias"][0]}
        central.shared |= {f"W{n}": start[f"tower{n}.weight"].T for n in layers}
        central.shared |= {f"b{n}": start[f"tower{n}.bias"] for n in layers}
        parts = [part for part, there in (("factors", factors), ("tower", tower)) if there]
        user, items = (
            torch.cat([start[f"{who}.{part}"] for part in parts], -1) for who in ("user", "item")
        )
        return node, start, central, user, items

    return make


@pytest.mark.parametrize(("factors", "tower"), PARTS)
def test_logits_are_those_of_the_centralised_model(pair, factors, tower):
    node, start, central, user, items = pair(factors, tower)
    stacked = {name: value.unsqueeze(0) for name, value in start.items()}
    found = node.model.scores(stacked, ())[0]
    torch.testing.assert_close(found, central.joined_logits(user, items))


@pytest.mark.parametrize(("factors", "tower"), PARTS)
def test_one_clients_step_is_the_gradient_of_the_centralised_loss(pair, factors, tower):
    """All examples of a client in one batch, against automatic differentiation of the baseline's
    cross-entropy."""
    node, start, central, user, items = pair(factors, tower)
    step, data = node.step(node.experiment.step), node.population.client(int(node.training[0]))
    own, labels = step._examples(data, stream(0, "client", data.client, 1))
    user, items = user.requires_grad_(), items.requires_grad_()
    central.shared = {name: value.requires_grad_() for name, value in central.shared.items()}
    logits = central.joined_logits(user, items[torch.from_numpy(own)])
    torch.nn.functional.binary_cross_entropy_with_logits(
        logits, torch.from_numpy(labels).double()
    ).backward()
    delta = update_of(step, start, data, stream(0, "client", data.client, 1)).delta
    rate, wide = step.config.learning_rate, factors
    parts = [
        (name, piece) for name, piece in (("factors", slice(0, wide)), ("tower", slice(wide, None)))
    ]
    for part, piece in parts:
        if f"user.{part}" in delta:
            torch.testing.assert_close(delta[f"user.{part}"], -rate * user.grad[piece])
            torch.testing.assert_close(delta[f"item.{part}"], -rate * items.grad[:, piece])
    grads = {name: value.grad for name, value in central.shared.items()}
    torch.testing.assert_close(delta["output.weight"][:, 0], -rate * grads["h"])
    torch.testing.assert_close(delta["output.bias"][0], -rate * grads["b"])
    for n in range(max(0, len(tower) - 1)):
        torch.testing.assert_close(delta[f"tower{n}.weight"], -rate * grads[f"W{n}"].T)
        torch.testing.assert_close(delta[f"tower{n}.bias"], -rate * grads[f"b{n}"])


@pytest.mark.parametrize(("factors", "tower"), [(0, []), (4, [5, 3]), (4, [6])])
def test_shapes_that_cannot_be_are_refused(pair, factors, tower):
    with pytest.raises(ExperimentError, match="tower"):
        pair(factors, tower)


def test_users_rows_stay_on_the_device(pair):
    node = pair(4, (6, 3))[0]
    names = node.step(node.experiment.step).private_names(list(node.initial()))
    assert sorted(names) == ["user.factors", "user.tower"]
    assert node.initial()["item.tower"].isfinite().all()
