# SPDX-License-Identifier: Apache-2.0
"""Local SGD with a profile of the user's own items: beside plain SGD, and cosines by hand."""

import numpy as np
import pytest
import torch

from clients.evaluation import client_scorer
from clients.hosting.node import Node
from clients.steps.sgd import Sgd
from clients.training.one_client import update_of
from clients.training.round import train_clients
from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from fedrec.protocol.orders import TrainOrder
from fedrec.protocol.sparse_update import dense_change
from fedrec.rng import stream

WEIGHT = 5.0
STEP = {"epochs": 2, "batch-size": 16, "negatives": 3, "learning-rate": 0.2}
PATHS = ("kernel", "blocks", "reference")


@pytest.fixture
def node(tiny_experiment, tmp_path):
    """A node whose model has a profile, or none."""

    def make(path="auto", profile=True, **step):
        model = {"name": "privrec", "embedding": 4, "hidden": [5]}
        own = {"model": model, "step": {"name": "sgd", **STEP, **step}}
        if profile:
            own["model"] |= {"name": "privrec-profile", "similarity": WEIGHT}
            own["step"]["name"] = "sgd-profile"
        table = tiny_experiment() | own
        table["evaluation"]["fine-tune"] = {"epochs": 2}
        table["engine"]["path"] = path
        return Node(load(table), 0, 1, tmp_path / path)

    return make


def sums(one):
    """What the clients of a round send together, as whole arrays."""
    arrays = {name: value.numpy() for name, value in one.initial().items()}
    reply = train_clients(one, arrays, TrainOrder(1, one.training))
    return {name: dense_change(change, arrays[name]) for name, change in reply.total.items()}


def cosines_by_hand(table, positives):
    """The cosines of all items with the sum of the directions of some."""
    units = table / np.linalg.norm(table, axis=1, keepdims=True)
    total = units[positives].sum(0)
    return units @ total / np.linalg.norm(total)


@pytest.mark.parametrize("path", PATHS)
def test_what_is_sent_is_what_plain_sgd_sends(node, path):
    """A profile changes neither the local work nor the message."""
    found = sums(node(path, rates={"item.id": 3.0}))
    assert not found.pop("profile").any()
    wanted = sums(node(path, profile=False, rates={"item.id": 3.0}))
    assert found.keys() == wanted.keys() and wanted["item.id"].any()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize("path", PATHS)
def test_scores_are_the_tuned_network_and_cosines_of_the_tuned_embeddings(node, path):
    one, plain = node(path), node(path, profile=False)
    start, clients = one.initial(), one.evaluated[:4]
    step = one.step(one.experiment.fine_tune_step())
    found = client_scorer(one, step, start, 1)(clients)
    without = {name: value for name, value in start.items() if name != "profile"}
    sgd = plain.step(plain.experiment.fine_tune_step())
    assert type(sgd) is Sgd
    network = client_scorer(plain, sgd, without, 1)(clients)
    for place, client in enumerate(clients.tolist()):
        data = one.population.client(client)
        tuned = update_of(sgd, without, data, _stream(one, client)).delta["item.id"]
        table = (start["item.id"] + tuned).double().numpy()
        wanted = network[place].numpy() + WEIGHT * cosines_by_hand(table, data.positives)
        np.testing.assert_allclose(found[place], wanted, atol=2e-4)


@pytest.mark.parametrize("path", PATHS)
def test_the_shared_model_has_no_term(node, path):
    """Without fine-tuning nobody has a profile."""
    one, plain = node(path, epochs=0), node(path, profile=False, epochs=0)
    start, clients = one.initial(), one.evaluated
    scores = client_scorer(one, one.step(one.experiment.step), start, 1)(clients)
    del start["profile"]
    wanted = client_scorer(plain, plain.step(plain.experiment.step), start, 1)(clients)
    torch.testing.assert_close(scores, wanted)


def test_another_model_is_refused(tiny_experiment):
    one = Node(load(tiny_experiment() | {"step": {"name": "sgd-profile"}}), 0, 1, None)
    with pytest.raises(ExperimentError, match=r"model\.name = 'privrec-profile'"):
        one.step(one.experiment.step)


def _stream(one, client):
    return stream(one.experiment.seed, "fine-tune", client, 1)
