# SPDX-License-Identifier: Apache-2.0
"""The central variational autoencoder on two groups of users with a taste each."""

from __future__ import annotations

import numpy as np
import torch

from fedrec.baselines.base import Histories
from fedrec.baselines.vae import Vae, VaeConfig


def fitted(taste, **settings):
    model = Vae(VaeConfig(hidden=8, latent=2, epochs=60, learning_rate=0.01, beta=0.1, **settings))
    model.fit(taste)
    return model


def test_it_finds_each_users_own_half(taste):
    scores = fitted(taste).scores(taste)
    own = torch.stack([scores[0::2, :10].min(1).values, scores[1::2, 10:].min(1).values])
    other = torch.stack([scores[0::2, 10:].max(1).values, scores[1::2, :10].max(1).values])
    assert (own > other).all()


def test_it_is_a_function_of_its_seed(taste):
    assert torch.equal(fitted(taste).scores(taste), fitted(taste).scores(taste))
    assert not torch.equal(fitted(taste).scores(taste), fitted(taste, seed=1).scores(taste))


def test_users_without_items_neither_train_nor_fail(taste):
    longer = Histories(20, np.append(taste.offsets, taste.offsets[-1]), taste.items, np.arange(41))
    model = fitted(longer)
    assert torch.equal(model.scores(taste), fitted(taste).scores(taste))
    assert model.scores(longer).isfinite().all()
