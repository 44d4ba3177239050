# SPDX-License-Identifier: Apache-2.0
"""The autoencoder against an implementation with `nn.Linear`."""

import pytest
import torch
from torch import nn

from fedrec.data.features import FeatureTable
from fedrec.data.schema import Schema
from fedrec.errors import ExperimentError
from fedrec.models.ae import Ae, AeConfig
from fedrec.models.vae import Draw, Prior

USERS, ITEMS = 3, 7


@pytest.fixture
def model():
    return Ae(AeConfig(hidden=5, latent=2), Schema(ITEMS, FeatureTable(ITEMS, ()), (), "ranking"))


@pytest.fixture
def parameters(model):
    # Biases differ from zero, so that a missing one is detected.
    fresh = model.initial(torch.Generator().manual_seed(1))
    return {
        n: (v + 0.1 * torch.arange(v.numel()).view(v.shape).sin()).unsqueeze(0)
        for n, v in fresh.items()
    }


def layers(parameters):
    for name in ("encoder", "mean", "decoder", "output"):
        layer = nn.Linear(*parameters[f"{name}.weight"].shape[1:])
        layer.load_state_dict(
            {"weight": parameters[f"{name}.weight"][0].T, "bias": parameters[f"{name}.bias"][0]}
        )
        yield layer


def test_scores_and_loss_equal_those_of_plain_modules(model, parameters):
    histories = torch.tensor(
        [[[1.0, 0, 1, 0, 1, 0, 0], [0, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 1]]]
    )
    network = nn.Sequential(*(part for layer in layers(parameters) for part in (layer, nn.Tanh())))
    encoder, _, code, _, decoder, _, output, _ = network
    unit = histories[0] / histories[0].norm(dim=1, keepdim=True)

    def logits(inputs):
        return output(torch.tanh(decoder(code(torch.tanh(encoder(inputs))))))

    torch.testing.assert_close(model.history_scores(parameters, histories)[0], logits(unit))
    kept = torch.rand(1, USERS, ITEMS, generator=torch.Generator().manual_seed(3)) > 0.4
    # the code has no noise
    draws = [Draw(kept, torch.full((1, USERS, 2), value)) for value in (0.0, 5.0)]
    expected = [
        nn.functional.cross_entropy(
            logits(unit * kept[0] / 0.5)[u], histories[0, u] / histories[0, u].sum()
        )
        * histories[0, u].sum()
        for u in range(USERS)
    ]
    for draw in draws:
        got = model.negative_elbo(parameters, histories, draw, beta=0.7)[0]
        torch.testing.assert_close(got, torch.stack(expected))


def test_there_are_no_variances_and_no_priors(model, parameters):
    assert sum(v.numel() for v in parameters.values()) == (7 * 5 + 5) + (5 * 2 + 2) + (
        2 * 5 + 5
    ) + (5 * 7 + 7)
    draw, prior = model.draw((1, USERS), torch.Generator()), Prior(torch.zeros(2), torch.ones(2))
    with pytest.raises(ExperimentError, match="no prior"):
        model.parts(parameters, torch.ones(1, USERS, ITEMS), draw, prior)
