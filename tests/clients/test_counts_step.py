# SPDX-License-Identifier: Apache-2.0
"""Counting: the sum of the clients' updates is the number of clients who like each item, on every
path."""

import numpy as np
import pytest

from clients.hosting.node import Node
from clients.steps.counts import Counts
from clients.training.round import train_clients
from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from fedrec.privacy.protection import Protection
from fedrec.protocol.orders import TrainOrder
from fedrec.protocol.sparse_update import dense_change
from fedrec.rng import torch_stream


def summed(node, protection=None):
    arrays = {
        name: value.numpy() for name, value in node.model.initial(torch_stream(0, "init")).items()
    }
    total = train_clients(node, arrays, TrainOrder(1, node.training, protection=protection)).total
    return {name: dense_change(change, arrays[name]) for name, change in total.items()}


def likes(node):
    """`bool [clients, items]` from the dataset itself: training rows rated above 3."""
    data, rows = node.population.interactions, node.population.partition.train_rows
    rows = rows[data.ratings[rows] > 3]
    table = np.zeros((data.num_users, data.num_items), dtype=bool)
    table[data.users[rows], data.items[rows]] = True
    return table[node.training]


def test_a_subclass_with_another_update_is_signed_unless_it_declares_otherwise():
    class Renamed(Counts):
        pass

    class Negated(Counts):
        def train_block(self, parameters, block, own=None):
            raise NotImplementedError

    class Shifted(Counts):
        def entries(self, parameters, items, weights):
            raise NotImplementedError

    class Halved(Negated):
        contributions = "non-negative"

    found = [step.contributions for step in (Counts, Renamed, Negated, Shifted, Halved)]
    assert found == ["non-negative", "non-negative", "signed", "signed", "non-negative"]


def test_a_model_without_biases_is_refused(load_tiny):
    with pytest.raises(ExperimentError, match=r"item\.bias"):
        Node(load_tiny("step={name='counts'}"), 0, 1, None).initial()


@pytest.mark.parametrize("path", ["reference", "blocks"])
@pytest.mark.parametrize("model", ["privrec", "item-weights"])
def test_every_path_counts_alike_for_all_models(tiny_experiment, path, model):
    """`item.bias` is an item table in one model and a dense parameter in the other."""
    table = {**tiny_experiment(), "step": {"name": "counts"}}
    table["model"] = {"name": model} | ({"item-bias": True} if model == "privrec" else {})
    table["engine"]["path"] = path
    node = Node(load(table), 0, 1, None)
    assert node.path(node.step(node.experiment.step)).name == path
    found = summed(node)
    assert np.array_equal(found.pop("item.bias")[:, 0], likes(node).sum(0))
    assert not any(change.any() for change in found.values())
    clipped = summed(node, Protection(clip_norm=1.5, order=2, names=("item.bias",)))
    factors = np.minimum(1, 1.5 / np.maximum(np.sqrt(likes(node).sum(1)), 1e-9))
    expected = (likes(node) * factors[:, None]).sum(0)
    assert clipped["item.bias"][:, 0] == pytest.approx(expected, rel=1e-5)


def test_with_no_epochs_nothing_is_counted(tiny_experiment):
    table = {**tiny_experiment(), "step": {"name": "counts", "epochs": 0}}
    found = summed(Node(load({**table, "model": {"name": "item-weights"}}), 0, 1, None))
    assert not any(change.any() for change in found.values())
