# SPDX-License-Identifier: Apache-2.0
"""Parameters by which a server would learn a client's items from who answers are refused by every
node alike, before a client's data are read."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from clients.device.received_parameters import refuse_unsound
from clients.hosting.node import Node
from clients.local.own_noise import OwnNoiseConfig, OwnNoiseStep
from clients.step import Update
from clients.steps.sgd import Sgd
from clients.training.round import train_clients
from clients.training.update_sum import UpdateSum
from fedrec.data.client_data import ClientData
from fedrec.errors import ClientError, RefusalError
from fedrec.privacy.protection import Protection
from fedrec.protocol.orders import TrainOrder
from fedrec.protocol.sparse_update import dense_change
from tests.clients.device.test_device_node import cut, own

THETA = {"table": np.ones((4, 2), np.float32), "bias": np.zeros(1, np.float32)}
SHAPES = {name: value.shape for name, value in THETA.items()}


def with_row(value):
    table = THETA["table"].copy()
    table[2] = value
    return {**THETA, "table": table}


def test_the_experiments_own_parameters_are_accepted():
    refuse_unsound(THETA, SHAPES, 1.0)


@pytest.mark.parametrize(
    "hostile",
    [
        with_row(np.nan),
        with_row(np.inf),
        with_row(-np.inf),
        with_row(-3.0),
        {**THETA, "table": THETA["table"][:3]},
        {**THETA, "table": THETA["table"].astype(np.float64)},
        {"table": THETA["table"]},
        {**THETA, "more": THETA["bias"]},
    ],
)
def test_all_others_are_refused(hostile):
    with pytest.raises(RefusalError, match="refuses the parameters"):
        refuse_unsound(hostile, SHAPES, 2.0)


def test_a_node_refuses_them_whether_or_not_its_clients_use_the_row(load_tiny, tmp_path):
    experiment = load_tiny()
    cut(experiment, [tmp_path])
    node = own(experiment, tmp_path)
    theta = {name: value.numpy().copy() for name, value in node.initial().items()}
    node.check_parameters(theta)
    theta[next(iter(theta))][-1] = np.nan
    with pytest.raises(RefusalError, match="largest-parameter"):
        node.check_parameters(theta)


@pytest.mark.parametrize("path", ["kernel", "blocks", "reference"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_clients_whose_training_diverges_send_their_noise_alone(load_tiny, path, value):
    """Whether or not they changed the row of the table that is not finite."""
    node = Node(load_tiny(f"engine.path={path}", "rounds=1"), 0, 1, None)
    theta = {name: start.numpy().copy() for name, start in node.initial().items()}
    table = next(name for name in theta if name in node.model.item_tables)
    theta[table][3] = value
    protection = Protection(0.5, 2, tuple(theta), noise_scale=1.0)
    order = TrainOrder(1, np.arange(24), "uniform", protection=protection)
    answer = train_clients(node, theta, order)
    zeros = UpdateSum(theta, (), "uniform", protection, node.noise, 1)
    for client in range(24):
        zeros.add(client, Update({n: torch.zeros(v.shape) for n, v in theta.items()}, 0, math.nan))
    assert answer.clients == 24
    noise = zeros.sum()
    for name, start in theta.items():
        assert np.isfinite(dense_change(answer.total[name], start)).all()
    # nobody's update of that row is finite
    found, expected = (dense_change(one.total[table], theta[table])[3] for one in (answer, noise))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("path", ["auto", "reference"])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_a_client_whose_training_fails_counts_as_zero_on_a_real_node(
    load_tiny, tmp_path, monkeypatch, path, noise
):
    """Under protection; the server sees neither an error nor a smaller count."""
    experiment = load_tiny(f"engine.path={path}")
    cut(experiment, [tmp_path])
    node = own(experiment, tmp_path, place=0, numbers=True)
    theta = {name: start.numpy().copy() for name, start in node.initial().items()}
    batches, update, clients = Sgd.batches, Sgd.update, node.training[:4]

    def failing(original):
        def work(self, *given):
            data = next(one for one in given if isinstance(one, ClientData))
            if data.client == clients[2]:
                raise ZeroDivisionError
            return original(self, *given)

        return work

    monkeypatch.setattr(Sgd, "batches", failing(batches))
    monkeypatch.setattr(Sgd, "update", failing(update))
    protection = Protection(0.5, 2, tuple(theta), noise_scale=noise)
    answer = train_clients(node, theta, TrainOrder(1, clients, "uniform", protection=protection))
    assert answer.clients == 4 and answer.weight == 4
    bare = TrainOrder(1, clients, "uniform")
    with pytest.raises(ClientError):  # a plain sum, whose failure may be told
        train_clients(node, theta, bare)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_own_noise_of_a_client_covers_a_gradient_that_diverged(value):
    step = SimpleNamespace(config=OwnNoiseConfig(noise="reproducible"))

    def uploaded(mean):
        draws = np.random.default_rng(1)
        return OwnNoiseStep.uploaded(step, mean, 1.0, torch.ones(1), 3, draws)[None]  # type: ignore

    diverged = torch.zeros(3)
    diverged[0] = value
    np.testing.assert_array_equal(uploaded(diverged), uploaded(torch.zeros(3)))
