# SPDX-License-Identifier: Apache-2.0
"""The variational autoencoder against `nn.Linear`, `torch.distributions` and the paper's parameter
counts."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Independent, Multinomial, Normal, kl_divergence

from fedrec.data.features import FeatureTable
from fedrec.data.schema import Schema
from fedrec.errors import ExperimentError
from fedrec.models.vae import Draw, Prior, Vae, VaeConfig, divergence

USERS, ITEMS = 3, 7


def make(items=ITEMS, task="ranking", **settings):
    return Vae(VaeConfig(**settings), Schema(items, FeatureTable(items, ()), (), task))


@pytest.fixture
def model():
    return make(hidden=5, latent=2)


@pytest.fixture
def parameters(model):
    # Biases away from zero, so that a forgotten one shows.
    fresh = model.initial(torch.Generator().manual_seed(1))
    return {
        n: (v + 0.1 * torch.arange(v.numel()).view(v.shape).sin()).unsqueeze(0)
        for n, v in fresh.items()
    }


@pytest.fixture
def histories():
    return torch.tensor([[[1.0, 0, 1, 0, 1, 0, 0], [0, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 1]]])


def linear(parameters, name):
    layer = nn.Linear(*parameters[f"{name}.weight"].shape[1:])
    layer.load_state_dict(
        {"weight": parameters[f"{name}.weight"][0].T, "bias": parameters[f"{name}.bias"][0]}
    )
    return layer


# Table 3 of the paper; the catalogues are those before its pre-processing.
@pytest.mark.parametrize(
    ("items", "hidden", "latent", "count"),
    [(1682, 80, 20, 275_802), (26_744, 100, 30, 5_384_804), (17_770, 100, 50, 3_587_070)],
)
def test_numbers_of_parameters_are_those_of_table_3(items, hidden, latent, count):
    fresh = make(items, hidden=hidden, latent=latent).initial(torch.Generator().manual_seed(0))
    assert sum(value.numel() for value in fresh.values()) == count


def test_the_bound_equals_that_of_plain_modules_and_distributions(model, parameters, histories):
    generator = torch.Generator().manual_seed(3)
    draw = Draw(
        torch.rand(1, USERS, ITEMS, generator=generator) > 0.4,
        torch.randn(1, USERS, 2, generator=generator),
    )
    mean = torch.randn(1, USERS, 2, generator=generator)
    variance = torch.rand(1, USERS, 2, generator=generator) + 0.5
    names = ["encoder", "mean", "log-variance", "decoder", "output"]
    encoder, to_mean, to_log_variance, decoder, output = (
        linear(parameters, name) for name in names
    )
    lengths = histories[0].square().sum(-1, keepdim=True).sqrt()
    hidden = torch.tanh(encoder(histories[0] / lengths * draw.kept[0] / 0.5))
    posterior = Normal(to_mean(hidden), (to_log_variance(hidden) / 2).exp())
    logits = output(torch.tanh(decoder(posterior.mean + draw.noise[0] * posterior.stddev)))
    counts = histories[0].sum(-1)
    for user in range(USERS):
        chances = Multinomial(int(counts[user]), logits=logits[user])
        ways = torch.lgamma(counts[user] + 1)  # of ordering distinct items; no parameter changes it
        likelihood = chances.log_prob(histories[0, user]) - ways
        theirs = Normal(mean[0, user], variance[0, user].sqrt())
        own = Normal(posterior.mean[user], posterior.stddev[user])
        kl = kl_divergence(Independent(own, 1), Independent(theirs, 1))
        got = model.negative_elbo(parameters, histories, draw, 0.3, Prior(mean, variance))[0, user]
        torch.testing.assert_close(got, 0.3 * kl - likelihood, rtol=1e-5, atol=1e-5)


def test_without_priors_the_divergence_is_that_from_the_standard_gaussian():
    mean, log_variance = torch.randn(4, 3), torch.randn(4, 3)
    standard = Prior(torch.zeros(3), torch.ones(3))
    torch.testing.assert_close(
        divergence(mean, log_variance), divergence(mean, log_variance, standard)
    )
    assert divergence(torch.zeros(3), torch.zeros(3)) == 0


def test_targets_choose_what_is_reconstructed(model, parameters, histories):
    draw = model.draw((1, USERS), torch.Generator().manual_seed(0))
    whole = model.negative_elbo(parameters, histories, draw, 0.0)
    parts = []
    for item in range(ITEMS):
        one = torch.zeros_like(histories)
        one[..., item] = histories[..., item]
        parts.append(model.negative_elbo(parameters, histories, draw, 0.0, targets=one))
    torch.testing.assert_close(torch.stack(parts).sum(0), whole)


def test_each_slice_has_its_own_parameters(model, histories):
    slices = [model.initial(torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    stacked = {name: torch.stack([one[name] for one in slices]) for name in slices[0]}
    both = model.history_scores(stacked, histories.expand(2, -1, -1))
    for place, one in enumerate(slices):
        alone = model.history_scores(
            {name: value.unsqueeze(0) for name, value in one.items()}, histories
        )
        torch.testing.assert_close(both[place], alone[0])
    assert not torch.allclose(both[0], both[1])


def test_scores_are_the_same_each_time_and_do_not_depend_on_how_much_a_user_has(
    model, parameters, histories
):
    first = model.history_scores(parameters, histories)
    assert torch.equal(first, model.history_scores(parameters, histories))
    torch.testing.assert_close(first, model.history_scores(parameters, 4 * histories))


def test_a_user_without_history_has_scores(model, parameters):
    assert model.history_scores(parameters, torch.zeros(1, 1, ITEMS)).isfinite().all()


def test_a_history_marks_the_items(model):
    assert model.history(np.array([1, 4])).tolist() == [[[0, 1, 0, 0, 1, 0, 0]]]


def test_about_half_of_the_items_are_kept():
    kept = make(2000, dropout=0.25).draw((1, 4), torch.Generator().manual_seed(0)).kept
    assert abs(kept.float().mean() - 0.75) < 0.02  # 4 standard deviations


def test_ratings_and_single_items_are_refused(model, parameters):
    with pytest.raises(ExperimentError, match="predicts no ratings"):
        make(task="rating")
    with pytest.raises(ExperimentError, match="whole history"):
        model.predict(parameters, (), torch.zeros(1, 1, dtype=torch.int64))
