# SPDX-License-Identifier: Apache-2.0
"""Federated transitions against the centralised system."""

import copy

import numpy as np
import pytest
import torch

import fedrec
from clients.steps.transitions import TransitionsStep
from fedrec.baselines.base import Histories
from fedrec.baselines.transitions import TransitionsBaseline
from fedrec.data.cache import POPULATIONS
from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from strategies.transitions import _denoised

RECENCY = {"window": 4, "decay": 0.6}


@pytest.fixture
def table(tiny_experiment):
    found = copy.deepcopy(tiny_experiment())
    found |= {
        "rounds": 2,
        "split": {"name": "leave-one-out"},
        "model": {"name": "transitions", **RECENCY},
        "step": {"name": "transitions"},
        "strategy": {"name": "popularity-start", "main": {"name": "transitions"}},
        "sampler": {"name": "full"},
    }
    baselines = [{"name": "transitions", **RECENCY}]
    found["evaluation"] = {"every": 0, "ks": [5], "baselines": baselines}
    return found


@pytest.mark.parametrize("path", ["auto", "reference"])
def test_weights_and_metrics_are_those_of_the_centralised_system(table, tmp_path, path):
    result = fedrec.run({**table, "engine": {"path": path}}, output=tmp_path / "run")
    population = POPULATIONS.population(load(table))
    offsets, items = population.sequences(population.training_clients)
    central = TransitionsBaseline(TransitionsBaseline.Config(**RECENCY))
    size = population.interactions.num_items
    central.fit(Histories(size, offsets, items))
    expected = central._weights.toarray()
    np.testing.assert_allclose(result.parameters["item.weights"], expected, atol=1e-6)
    own, other = result.metrics, result.baselines["transitions"]
    assert {name: own[name] for name in other} == pytest.approx(other, abs=1e-6)


def test_sequences_are_in_the_order_of_time(table):
    population = POPULATIONS.population(load(table))
    clients = population.training_clients[:5]
    offsets, items = population.sequences(clients)
    for place, client in enumerate(clients.tolist()):
        data = population.client(client)
        own = data.order()
        expected = data.items[own][data.labels[own] > 0]
        assert items[offsets[place] : offsets[place + 1]].tolist() == expected.tolist()


def test_a_model_without_transitions_is_refused(table):
    model = load({**table, "model": {"name": "item-weights"}, "step": {"name": "gram"}})
    schema = POPULATIONS.population(model).schema()
    from fedrec.models.item_weights import ItemWeights

    linear = ItemWeights(ItemWeights.Config(), schema)
    with pytest.raises(ExperimentError, match="no transitions"):
        TransitionsStep(TransitionsStep.Config(), linear, torch.device("cpu"))


def test_noise_alone_is_left_out_and_a_strong_direction_is_not():
    generator = torch.Generator().manual_seed(0)
    size, std = 200, 3.0
    noise = std * torch.randn(size, size, dtype=torch.float64, generator=generator)
    edge = 2 * std * size**0.5
    assert _denoised(noise, 1.05 * edge, 12).abs().max() == 0
    left, right = torch.rand(2, size, dtype=torch.float64, generator=generator)
    signal = 40 * torch.outer(left, right)
    error = torch.linalg.matrix_norm(_denoised(signal + noise, edge, 12) - signal)
    assert error < 0.2 * torch.linalg.matrix_norm(noise)
