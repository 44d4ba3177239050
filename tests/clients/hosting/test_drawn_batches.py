# SPDX-License-Identifier: Apache-2.0
"""Batches that were drawn to name a client's items are those that it trains on, and are drawn
once."""

import numpy as np
import pytest

from clients.generated import requested_items
from clients.hosting.drawn_batches import DrawnBatches
from clients.hosting.node import Node
from clients.steps.personal.fedgnn import FedgnnStep
from clients.steps.personal.gpfedrec import GpfedrecStep
from clients.training.round import train_each
from fedrec.cohort.batches import Batches
from fedrec.experiment.loading import load
from fedrec.protocol.client_arrays import ClientArrays
from fedrec.protocol.orders import ItemQuery, TrainOrder
from fedrec.rng import stream

STEP = {"name": "gpfedrec", "epochs": 2, "batch-size": 8, "negatives": 2, "learning-rate": 0.1}


@pytest.fixture
def node(tiny_experiment, tmp_path_factory):
    def make(step=STEP, model=None):
        model = model or {"name": "gpfedrec", "embedding": 3, "hidden": [4]}
        folder = tmp_path_factory.mktemp("node")
        return Node(load(tiny_experiment() | {"model": model, "step": step}), 0, 1, folder)

    return make


@pytest.fixture
def drawn(monkeypatch):
    """Clients whose batches were drawn, in order."""
    found = []
    batches = GpfedrecStep.batches

    def counted(step, data, random):
        found.append(data.client)
        return batches(step, data, random)

    monkeypatch.setattr(GpfedrecStep, "batches", counted)
    return found


def asked(node, clients, round_=1):
    return requested_items(node, ItemQuery(round_, clients, "train", STEP))


def trained(node, requests, round_=1):
    rows = node.initial()["item.id"].numpy()[requests.items]
    given = ClientArrays(requests, {}, {"item.id": rows, "item.guide": rows})
    order = TrainOrder(round_, requests.clients, step=STEP, each=True)
    return train_each(node, given.arrays(), order).updates.rows["item.id"]


def test_clients_train_on_what_was_drawn_for_the_request(node, drawn):
    asking = node()
    clients = asking.training[:4]
    requests = asked(asking, clients)
    found = trained(asking, requests)
    assert drawn == clients.tolist()
    assert trained(node(), requests).tobytes() == found.tobytes()  # a node that was not asked
    assert trained(asking, requests).tobytes() == found.tobytes()  # and a second time
    assert drawn == 3 * clients.tolist() and found.any()


@pytest.mark.parametrize("later", [{"round_": 2}, {"settings": {"negatives": 3}}, {"client": 8}])
def test_other_work_is_drawn_anew(node, later):
    own = node()
    step = own.step(own.experiment.step)
    asked_for = DrawnBatches()
    asked_for.keep(step, 1, 7, Batches.whole([]))
    other = node(STEP | later.get("settings", {}))
    wanted = other.step(other.experiment.step), later.get("round_", 1), later.get("client", 7)
    assert asked_for.take(*wanted) is None


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [("gpfedrec", GpfedrecStep, STEP), ("fedgnn", FedgnnStep, {"name": "fedgnn", "pseudo": 7})],
)
def test_a_client_asks_for_the_items_of_its_batches(node, name, kind, settings):
    own = node(settings, {"name": name, "embedding": 4})
    clients = own.training[:3]
    requests = requested_items(own, ItemQuery(1, clients, "train", settings))
    step = kind(own.step(own.experiment.step).config, own.model, own.device)
    for client, items in zip(
        clients.tolist(), np.split(requests.items, requests.offsets[1:-1]), strict=True
    ):
        data = own.population.client(client)
        references, named = step.batches(data, stream(0, "client", client, 1)).references()
        assert items.tolist() == sorted(set(references[named].tolist())) and len(items) > 5
