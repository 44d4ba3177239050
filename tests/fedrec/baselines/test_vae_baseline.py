# SPDX-License-Identifier: Apache-2.0
"""The centralised autoencoders on two groups of users."""

import numpy as np
import pytest
import torch

from fedrec.baselines.base import Histories
from fedrec.baselines.neural.ae import CentralAe, CentralAeConfig
from fedrec.baselines.neural.vae import CentralVae, CentralVaeConfig
from fedrec.errors import ExperimentError


@pytest.fixture(params=[CentralVae, CentralAe])
def fitted(request):
    def fit(taste, **settings):
        beta = {"beta": 0.1} if request.param is CentralVae else {}
        model = request.param(
            request.param.Config(
                hidden=8, latent=2, epochs=60, learning_rate=0.01, **beta, **settings
            )
        )
        model.fit(taste)
        return model

    return fit


def test_it_finds_each_users_own_half(taste, fitted):
    scores = fitted(taste).scores(taste)
    own = torch.stack([scores[0::2, :10].min(1).values, scores[1::2, 10:].min(1).values])
    other = torch.stack([scores[0::2, 10:].max(1).values, scores[1::2, :10].max(1).values])
    assert (own > other).float().mean() > 0.9


@pytest.mark.slow
def test_users_without_items_neither_train_nor_fail(taste, fitted):
    longer = Histories(20, np.append(taste.offsets, taste.offsets[-1]), taste.items, np.arange(41))
    model = fitted(longer)
    assert torch.equal(model.scores(taste), fitted(taste).scores(taste))
    assert model.scores(longer).isfinite().all()


def test_an_autoencoder_has_no_distribution_of_codes(taste):
    """It has no divergence term, and its network has no layer of variances."""
    with pytest.raises(ExperimentError, match="beta"):
        CentralAeConfig.parse({"beta": 0.5})
    model = CentralAe(CentralAeConfig(hidden=8, latent=2, epochs=1))
    model.fit(taste)
    variational = CentralVae(CentralVaeConfig(hidden=8, latent=2, epochs=1))
    variational.fit(taste)
    assert set(variational.parameters) - set(model.parameters) == {
        "log-variance.weight",
        "log-variance.bias",
    }
