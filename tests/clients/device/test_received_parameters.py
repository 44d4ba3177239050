# SPDX-License-Identifier: Apache-2.0
"""Parameters by which a server would learn a client's items from who answers are refused by every
node alike, before a client's data are read."""

import numpy as np
import pytest
import torch

from clients.device.received_parameters import refuse_unsound
from clients.hosting.node import Node
from clients.local.one_by_one import Update, as_block
from clients.steps.dpvae import DpVae, DpVaeConfig
from clients.steps.sgd import Sgd
from clients.training.round import train_clients
from clients.training.update_sum import UpdateSum
from fedrec.data.client_data import ClientData
from fedrec.errors import ClientError, RefusalError
from fedrec.privacy.protection import Protection
from fedrec.protocol.orders import TrainOrder
from fedrec.protocol.secure import MaskOrder
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
    start = {name: torch.from_numpy(value) for name, value in theta.items()}
    zeros = UpdateSum(theta, (), "uniform", protection, node.noise, 1)
    for client in range(24):
        zeros.add_block([client], as_block(start, Update({})))
    assert answer.clients == 24
    noise = zeros.sum()
    for name, start in theta.items():
        assert np.isfinite(dense_change(answer.total[name], start)).all()
    # nobody's update of that row is finite
    found, expected = (dense_change(one.total[table], theta[table])[3] for one in (answer, noise))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def failing(monkeypatch, step, client):
    """Makes the work of a client fail; returns the clients that were worked on, in order."""
    worked = []

    def watched(original):
        def work(self, *given):
            data = next(one for one in given if isinstance(one, ClientData))
            if len(data.items):
                worked.append(data.client)
                if data.client == client:
                    raise ZeroDivisionError
            return original(self, *given)

        return work

    monkeypatch.setattr(step, "batches", watched(step.batches))
    return worked


@pytest.mark.parametrize("path", ["auto", "reference"])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_a_client_whose_training_fails_counts_as_zero_on_a_real_node(
    load_tiny, tmp_path, monkeypatch, path, noise
):
    """Under protection; the server sees neither an error nor a smaller count, nor a second training
    in the duration."""
    experiment = load_tiny(f"engine.path={path}")
    cut(experiment, [tmp_path])
    node = own(experiment, tmp_path, place=0, numbers=True)
    theta = {name: start.numpy().copy() for name, start in node.initial().items()}
    clients = node.training[:4]
    worked = failing(monkeypatch, Sgd, clients[2])
    protection = Protection(0.5, 2, tuple(theta), noise_scale=noise)
    answer = train_clients(node, theta, TrainOrder(1, clients, "uniform", protection=protection))
    assert answer.clients == 4 and answer.weight == 4
    assert worked == clients.tolist()
    bare = TrainOrder(1, clients, "uniform")
    with pytest.raises(ClientError):  # a plain sum, whose failure may be told
        train_clients(node, theta, bare)


@pytest.mark.parametrize("path", ["auto", "blocks", "reference"])
def test_a_client_that_diverges_in_a_masked_sum_counts_as_zero_on_a_real_node(
    load_tiny, tmp_path, monkeypatch, caplog, path
):
    """Otherwise the sum could not be encoded, and all clients of the node would be missing."""
    experiment = load_tiny(f"engine.path={path}")
    cut(experiment, [tmp_path])
    node = own(experiment, tmp_path, place=0, numbers=True)
    theta = {name: start.numpy().copy() for name, start in node.initial().items()}
    features = node.population.client(int(node.training[2])).features
    rows = [name for name in theta if name.startswith("user")]
    monkeypatch.setattr(node, "check_parameters", lambda arrays: None)
    for name, codes in zip(rows, features, strict=True):
        theta[name][codes] = np.nan  # of the user features of some clients
    masked = TrainOrder(1, node.training, "uniform", secure=MaskOrder(b"", b"", b""))
    answer = train_clients(node, theta, masked)
    assert answer.clients == answer.weight == len(node.training) and "diverged" in caplog.text
    assert all(np.isfinite(dense_change(answer.total[n], theta[n])).all() for n in theta)


def test_a_block_that_fails_is_not_trained_again_on_a_real_node(load_tiny, tmp_path, monkeypatch):
    """Its clients are trained alone, so it is known which one fails."""
    experiment = load_tiny("engine.path=blocks")
    cut(experiment, [tmp_path])
    node = own(experiment, tmp_path, place=0, numbers=True)
    theta = {name: start.numpy().copy() for name, start in node.initial().items()}
    clients = node.training[:4]
    blocks = []

    def train_block(self, parameters, block, own=None):
        blocks.append(len(block))
        raise ZeroDivisionError

    monkeypatch.setattr(Sgd, "train_block", train_block)
    protection = Protection(0.5, 2, tuple(theta))
    answer = train_clients(node, theta, TrainOrder(1, clients, "uniform", protection=protection))
    assert blocks == [1, 1, 1, 1] and answer.clients == 4
    assert not any(dense_change(answer.total[n], v).any() for n, v in theta.items())


@pytest.mark.parametrize("path", ["auto", "reference"])
def test_a_client_that_fails_in_a_step_with_own_noise_sends_the_noise_alone(
    load_tiny, tmp_path, monkeypatch, path
):
    """The node answers, and all clients are in the sum."""
    vae = ("model.name=vae", "step.name=dpvae", "step.noise=secure", "step.budgets=equal")
    experiment = load_tiny(*vae, f"engine.path={path}")
    cut(experiment, [tmp_path])
    node = own(experiment, tmp_path, place=0, numbers=True)
    theta = {name: start.numpy().copy() for name, start in node.initial().items()}
    clients = node.training[:4]
    worked = failing(monkeypatch, DpVae, clients[2])
    every = train_clients(node, theta, TrainOrder(1, clients, "uniform"))
    one = train_clients(node, theta, TrainOrder(2, clients[2:3], "uniform"))
    assert worked == [*clients.tolist(), clients[2]]
    assert (every.clients, every.examples, one.clients, one.examples) == (4, 4, 1, 1)
    config = node.step(experiment.step).config
    std = config.gradient_multiplier(0) * config.clip_norm * config.learning_rate
    noise = np.concatenate([dense_change(one.total[n], v).ravel() for n, v in theta.items()])
    assert 0.8 * std < noise.std() < 1.2 * std


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_own_noise_of_a_client_covers_a_gradient_that_diverged(value):
    step = object.__new__(DpVae)
    step.config = DpVaeConfig(noise="reproducible")

    def uploaded(mean):
        draws = np.random.default_rng(1)
        return step.uploaded(mean, 1.0, torch.ones(1), 3, draws)[None]

    diverged = torch.zeros(3)
    diverged[0] = value
    np.testing.assert_array_equal(uploaded(diverged), uploaded(torch.zeros(3)))
