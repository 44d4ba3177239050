# SPDX-License-Identifier: Apache-2.0
"""Meta matrix factorization: generated parameters and predictions, against dense layers and one-hot
products."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedrec.data.features import FeatureTable
from fedrec.data.schema import Schema
from fedrec.errors import ExperimentError
from fedrec.models.metamf import MetaMf, MetaMfConfig, generate
from fedrec.protocol.client_arrays import ItemRequests
from fedrec.rng import torch_stream

ITEMS, USERS = 11, 7


@pytest.fixture
def model():
    config = MetaMfConfig(
        user=5, memory=6, generator=9, embedding=4, rank=2, hidden=3, user_std=1.0
    )
    return MetaMf(config, Schema(ITEMS, FeatureTable(ITEMS, ()), (), "rating", USERS))


@pytest.fixture
def parameters(model):
    return model.initial(torch_stream(3, "init"))


def dense_prediction(p, user, item):
    """One rating by the paper's formula: the user's whole item table times the item's one-hot
    row."""
    vector = F.one_hot(torch.tensor(user), USERS).float() @ p["user.id"] @ p["memory"]
    hidden = {
        h: F.relu(vector @ p[f"{h}.hidden.weight"] + p[f"{h}.hidden.bias"])
        for h in ("layer0", "layer1", "item")
    }
    low = torch.einsum("ikh,h->ik", p["item.low.matrix"], hidden["item"]) + p["item.low.offset"]
    rise = (hidden["item"] @ p["item.rise.matrix"] + p["item.rise.offset"]).reshape(2, 4)
    embedding = F.one_hot(torch.tensor(item), ITEMS).float() @ (low @ rise)
    first = (hidden["layer0"] @ p["layer0.weight.matrix"] + p["layer0.weight.offset"]).reshape(4, 3)
    bias = hidden["layer0"] @ p["layer0.bias.matrix"] + p["layer0.bias.offset"]
    second = hidden["layer1"] @ p["layer1.weight.matrix"] + p["layer1.weight.offset"]
    last = hidden["layer1"] @ p["layer1.bias.matrix"] + p["layer1.bias.offset"]
    return F.relu(embedding @ first + bias) @ second + last[0]


def test_whole_tables_predict_as_one_hot_products_do(model, parameters):
    users = torch.tensor([6, 0, 3])
    values, low = generate(parameters, users, None)
    scores = model.scores({**values, "item.low": low}, ())
    expected = [
        [float(dense_prediction(parameters, u, i)) for i in range(ITEMS)] for u in users.tolist()
    ]
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-4, atol=1e-6)
    assert np.std(expected) > 0.01  # users differ, and so do items


def test_requested_rows_are_those_of_the_whole_tables(parameters):
    users = torch.tensor([1, 4, 6])
    requests = ItemRequests.of(
        users.numpy(), [np.array([0, 10]), np.array([], dtype=np.int64), np.array([3, 4, 10])]
    )
    _, low = generate(parameters, users, requests)
    _, whole = generate(parameters, users, None)
    expected = torch.stack([whole[0, 0], whole[0, 10], whole[2, 3], whole[2, 4], whole[2, 10]])
    torch.testing.assert_close(low, expected, rtol=1e-5, atol=1e-6)


def test_gradients_of_requested_rows_are_right(parameters):
    """The closed-form backward pass against finite differences, also for an item requested
    twice."""
    double = {name: value.double().requires_grad_() for name, value in parameters.items()}
    users, lists = torch.tensor([1, 4]), [np.array([0, 10]), np.array([3, 10])]
    requests = ItemRequests.of(users.numpy(), lists)
    names = ("user.id", "item.low.matrix", "item.low.offset", "item.hidden.weight")

    def rows(*values):
        return generate({**double, **dict(zip(names, values, strict=True))}, users, requests)[1]

    assert torch.autograd.gradcheck(rows, tuple(double[name] for name in names))


def test_only_requested_rows_get_a_gradient(parameters):
    leaves = {name: value.requires_grad_() for name, value in parameters.items()}
    _, low = generate(
        leaves,
        torch.tensor([1, 4]),
        ItemRequests.of(np.array([1, 4]), [np.array([2]), np.array([2, 7])]),
    )
    low.square().sum().backward()
    touched = leaves["item.low.matrix"].grad.abs().sum((1, 2)).nonzero()[:, 0]
    assert touched.tolist() == [2, 7]
    assert leaves["user.id"].grad.abs().sum(1).nonzero()[:, 0].tolist() == [1, 4]


def test_compact_rows_predict_as_whole_tables(model, parameters):
    users = torch.tensor([2, 5])
    values, whole = generate(parameters, users, None)
    items = torch.tensor([[1, 9, 9], [0, 1, 10]])
    touched = torch.tensor([[1, 9, 0], [0, 1, 10]])
    rows = torch.tensor([[0, 1, 1], [0, 1, 2]])
    compact = torch.stack([whole[c][touched[c]] for c in range(2)])
    got = model.predict({**values, "item.low": compact}, (), items, rows=rows)
    torch.testing.assert_close(got, model.predict({**values, "item.low": whole}, (), items))


def test_the_servers_parameters_are_refused_on_the_device(model, parameters):
    with pytest.raises(ExperimentError, match="parameters that the server generates"):
        model.predict(
            {name: value.unsqueeze(0) for name, value in parameters.items()},
            (),
            torch.tensor([[1]]),
        )


def test_another_models_parameters_generate_nothing():
    with pytest.raises(ExperimentError, match="cannot generate parameters"):
        generate({"item.id": torch.zeros(3, 2)}, torch.tensor([0]), None)
