# SPDX-License-Identifier: Apache-2.0
"""A model with reserved rows equals the inner model, and nothing reads the rows."""

from __future__ import annotations

import torch

from fedrec.components.registry import MODEL
from fedrec.data.population import Population
from fedrec.models.privrec import PrivRec
from fedrec.models.reserved import Reserved
from fedrec.rng import torch_stream


def models(load_tiny):
    experiment = load_tiny()
    schema = Population.of(experiment).schema()
    base = {"name": "privrec", **experiment.model.options}
    return Reserved(Reserved.Config(base=base, rows=5), schema), PrivRec(
        experiment.settings(MODEL), schema
    )


def test_initial_parameters_are_the_same_with_zero_rows_at_the_end(load_tiny):
    reserved, plain = models(load_tiny)
    more, less = (model.initial(torch_stream(1, "init")) for model in (reserved, plain))
    assert list(more) == list(less) and reserved.item_tables == plain.item_tables == ("item.id",)
    for name, value in less.items():
        assert torch.equal(more[name][: len(value)], value)
        assert more[name].shape[0] - value.shape[0] == (5 if name == "item.id" else 0)
    assert not more["item.id"][-5:].any()


def test_scores_and_losses_do_not_see_the_rows(load_tiny):
    reserved, plain = models(load_tiny)
    parameters = {
        name: value.unsqueeze(0) for name, value in plain.initial(torch_stream(1, "init")).items()
    }
    padded = {
        **parameters,
        "item.id": torch.cat([parameters["item.id"], torch.full((1, 5, 4), 7.0)], 1),
    }
    users = tuple(torch.zeros(1, 1, dtype=torch.int64) for _ in plain.schema.user_features)
    assert torch.equal(reserved.scores(padded, users), plain.scores(parameters, users))
    assert reserved.scores(padded, users).shape == (1, plain.schema.num_items)
    predictions, labels = torch.tensor([[0.3, -1.0]]), torch.tensor([[1.0, 0.0]])
    assert torch.equal(reserved.loss(predictions, labels), plain.loss(predictions, labels))
