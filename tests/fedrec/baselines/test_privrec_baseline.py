# SPDX-License-Identifier: Apache-2.0
"""Centralised PrivRec: its first round by plain gradient descent, its accuracy, and users without
features."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedrec.baselines.neural.privrec import Privrec, PrivrecConfig
from fedrec.data.features import Feature, FeatureTable
from fedrec.rng import stream, torch_stream

SMALL = {"embedding": 6, "hidden": (8, 4), "negatives": 5, "batch_size": 32}


@pytest.fixture(scope="module")
def grouped(taste):
    """Users in two groups, with two side features, one of which identifies the group."""
    group = Feature.single("group", [f"g{user % 2}" for user in range(40)])
    other = Feature.single("other", [f"o{user % 3}" for user in range(40)])
    genre = Feature.multiple("genre", [["a", "b"] if item < 9 else ["c"] for item in range(20)])
    return replace(
        taste,
        user_features=FeatureTable(40, (group, other)),
        item_features=FeatureTable(20, (genre,)),
    )


def fitted(histories, **settings):
    model = Privrec(PrivrecConfig(**{**SMALL, **settings}))
    model.fit(histories)
    return model


def test_the_first_round_of_one_user_is_plain_gradient_descent(grouped):
    """Fine-tuning for a user: each batch by automatic differentiation on full tables."""
    model = fitted(grouped, rounds=1, users=1, epochs=2)
    user = int(stream(0, "baseline-privrec-users", 0).choice(40, 1, replace=False)[0])
    theta = model._model.initial(torch_stream(0, "baseline-privrec"))
    batches = model._batches(
        np.unique(grouped.block(user, user + 1).items),
        20,
        stream(0, "baseline-privrec-examples", 0, user),
    )
    codes = tuple(torch.tensor([[code]]) for code in (user % 2, user % 3))
    for step, size in enumerate(batches.sizes):
        parameters = {name: value.unsqueeze(0).requires_grad_() for name, value in theta.items()}
        items, labels = (
            torch.from_numpy(part[step, :size])[None] for part in (batches.items, batches.labels)
        )
        loss = model._model.loss(model._model.predict(parameters, codes, items), labels).sum()
        slopes = torch.autograd.grad(loss, list(parameters.values()))
        late = step >= len(batches.sizes) - batches.last_epoch
        for name, slope in zip(parameters, slopes, strict=True):
            factor = (
                1000.0 * late if name == "item.id" else 0.3 if name.startswith("layer") else 1.0
            )
            theta[name] = theta[name] - 0.3 * factor * slope[0]
    for name, value in theta.items():
        torch.testing.assert_close(model._theta[name], value, rtol=1e-4, atol=1e-5)


def test_it_finds_each_users_own_half(grouped):
    lower, upper = fitted(grouped, rounds=40, item_rate=100.0).scores(grouped).split(10, dim=1)
    assert (lower[0::2].mean(1) > upper[0::2].mean(1)).all()
    assert (lower[1::2].mean(1) < upper[1::2].mean(1)).all()


def test_users_without_known_items_are_scored(grouped):
    """Users without features and without items."""
    model = fitted(grouped, rounds=2)
    nobody = replace(
        grouped.block(0, 2), users=None, offsets=np.zeros(3, np.int64), items=np.zeros(0, np.int64)
    )
    scores = model.scores(nobody)
    assert scores.isfinite().all() and torch.equal(scores[0], scores[1])
