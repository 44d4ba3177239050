# SPDX-License-Identifier: Apache-2.0
"""Models: autoencoders, matrix factorization, NeuMF and MetaMF."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Independent, Multinomial, Normal, kl_divergence
from torch.nn import functional as F

from fedrec.baselines.training import CentralNeumf, CentralNeumfConfig
from fedrec.data.interactions import FeatureTable, Schema
from fedrec.errors import ExperimentError
from fedrec.models.mf import Mf, MfConfig, Neumf, NeumfConfig
from fedrec.models.personal import MetaMf, MetaMfConfig, generate
from fedrec.models.vae import Ae, Draw, Prior, Vae, VaeConfig, divergence
from fedrec.protocol.updates import ItemRequests
from fedrec.rng import torch_stream

# Both autoencoders against `nn.Linear`, `torch.distributions` and the paper's parameter counts.

USERS, ITEMS = 3, 7
HISTORIES = torch.tensor([[[1.0, 0, 1, 0, 1, 0, 0], [0, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 1]]])


def schema(items=ITEMS, task="ranking", users=0):
    return Schema(items, FeatureTable(items, ()), (), task, users)


def shifted(model):
    """Parameters whose biases differ from zero, so that a missing one is detected."""
    return {
        name: (value + 0.1 * torch.arange(value.numel()).view(value.shape).sin()).unsqueeze(0)
        for name, value in model.initial(torch.Generator().manual_seed(1)).items()
    }


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
    model = Vae(VaeConfig(hidden=hidden, latent=latent), schema(items))
    fresh = model.initial(torch.Generator().manual_seed(0))
    assert sum(value.numel() for value in fresh.values()) == count


@pytest.mark.parametrize("kind", [Vae, Ae])
def test_scores_and_the_bound_equal_those_of_plain_modules_and_distributions(kind):
    """The code of the denoising autoencoder has no noise and no divergence."""
    model = kind(kind.Config(hidden=5, latent=2), schema())
    parameters = shifted(model)
    noisy = kind is Vae
    assert noisy == any(name.startswith("log-variance") for name in parameters)
    generator = torch.Generator().manual_seed(3)
    draw = Draw(
        torch.rand(1, USERS, ITEMS, generator=generator) > 0.4,
        torch.randn(1, USERS, 2, generator=generator),
    )
    mean = torch.randn(1, USERS, 2, generator=generator)
    variance = torch.rand(1, USERS, 2, generator=generator) + 0.5
    encoder, to_mean, decoder, output = (
        linear(parameters, name) for name in ("encoder", "mean", "decoder", "output")
    )
    unit = HISTORIES[0] / HISTORIES[0].norm(dim=1, keepdim=True)
    exact = output(torch.tanh(decoder(to_mean(torch.tanh(encoder(unit))))))
    for scale in (1, 4):  # how much a user has makes no difference
        torch.testing.assert_close(model.history_scores(parameters, scale * HISTORIES)[0], exact)
    hidden = torch.tanh(encoder(unit * draw.mask[0] / 0.5))
    codes, kl = to_mean(hidden), torch.zeros(USERS)
    if noisy:
        posterior = Normal(codes, (linear(parameters, "log-variance")(hidden) / 2).exp())
        codes = codes + draw.noise[0] * posterior.stddev
        prior = Independent(Normal(mean[0], variance[0].sqrt()), 1)
        kl = kl_divergence(Independent(posterior, 1), prior)
    logits = output(torch.tanh(decoder(codes)))
    counts = HISTORIES[0].sum(-1)
    likelihood = [
        Multinomial(int(count), logits=own).log_prob(history)
        for count, own, history in zip(counts, logits, HISTORIES[0], strict=True)
    ]
    ways = torch.lgamma(counts + 1)  # of ordering distinct items; no parameter changes it
    given = Prior(mean, variance) if noisy else None
    found = model.negative_elbo(parameters, HISTORIES, draw, 0.3, given)[0]
    expected = 0.3 * kl - torch.stack(likelihood) + ways
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_without_priors_the_divergence_is_that_from_the_standard_gaussian():
    mean, log_variance = torch.randn(4, 3), torch.randn(4, 3)
    standard = Prior(torch.zeros(3), torch.ones(3))
    torch.testing.assert_close(
        divergence(mean, log_variance), divergence(mean, log_variance, standard)
    )
    assert divergence(torch.zeros(3), torch.zeros(3)) == 0


def test_ratings_and_single_items_are_refused():
    with pytest.raises(ExperimentError, match="task = 'ranking'"):
        Vae(VaeConfig(), schema(task="rating"))
    with pytest.raises(ExperimentError, match="cannot predict single items"):
        Vae(VaeConfig(), schema()).predict({}, (), torch.zeros(1, 1, dtype=torch.int64))


# Matrix factorization: predictions equal the sum of their terms.


def test_a_prediction_is_biases_and_a_product():
    model = Mf(MfConfig(factors=3, center=3.5), schema(5, "rating"))
    fresh = model.initial(torch_stream(1, "init"))
    assert fresh["bias"].tolist() == [3.5]
    assert not fresh["item.bias"].any() and not fresh["user.bias"].any()
    random = np.random.default_rng(0)
    own = {n: torch.from_numpy(random.normal(size=(2, *v.shape))) for n, v in fresh.items()}
    whole = torch.arange(5).expand(2, -1)
    for shared in (False, True):  # as among clients with private factors
        for name in ("item.factors", "item.bias") if shared else ():
            own[name] = own[name][:1].expand(2, *own[name].shape[1:])
        products = torch.einsum("cif,cf->ci", own["item.factors"], own["user.factors"])
        expected = products + own["bias"] + own["user.bias"] + own["item.bias"][..., 0]
        torch.testing.assert_close(model.predict(own, (), whole), expected)
        torch.testing.assert_close(model.scores(own, ()), expected)


def test_without_biases_a_prediction_is_the_product_alone():
    model = Mf(MfConfig(factors=3, biases=False), schema(5))
    fresh = model.initial(torch_stream(1, "init"))
    assert sorted(fresh) == ["item.factors", "user.factors"]
    assert model.item_tables == ("item.factors",)
    assert Mf.item_tables == ("item.factors", "item.bias")
    scores = model.scores({name: value.unsqueeze(0) for name, value in fresh.items()}, ())
    torch.testing.assert_close(scores[0], fresh["item.factors"] @ fresh["user.factors"])
    with pytest.raises(ValueError, match="biases = true"):
        MfConfig(biases=False, center=3.5)


PARTS = [(4, (6, 5, 3)), (4, ()), (0, (6, 3)), (2, (4, 1))]


@pytest.mark.parametrize(("factors", "tower"), PARTS)
def test_logits_are_those_of_the_centralised_model(factors, tower):
    """Of the same parameters, and of its user's row."""
    model = Neumf(NeumfConfig(factors=factors, tower=tower), schema())
    start = {n: v.double() for n, v in model.initial(torch_stream(1, "init")).items()}
    central = CentralNeumf(CentralNeumfConfig(factors=factors, tower=tower))
    layers = range(max(0, len(tower) - 1))
    central.shared = {"h": start["output.weight"][:, 0], "b": start["output.bias"][0]}
    central.shared |= {f"W{n}": start[f"tower{n}.weight"].T for n in layers}
    central.shared |= {f"b{n}": start[f"tower{n}.bias"] for n in layers}
    parts = [part for part, there in (("factors", factors), ("tower", tower)) if there]
    user, items = (
        torch.cat([start[f"{who}.{part}"] for part in parts], -1) for who in ("user", "item")
    )
    found = model.scores({name: value.unsqueeze(0) for name, value in start.items()}, ())[0]
    torch.testing.assert_close(found, central._joined_logits(user, items))


# Meta matrix factorization: generated parameters and predictions, against dense layers and one-hot
# products.

METAMF_ITEMS, METAMF_USERS = 11, 7


@pytest.fixture
def model():
    config = MetaMfConfig(
        user=5, memory=6, generator=9, embedding=4, rank=2, hidden=3, user_std=1.0
    )
    return MetaMf(config, schema(METAMF_ITEMS, "rating", METAMF_USERS))


@pytest.fixture
def parameters(model):
    return model.initial(torch_stream(3, "init"))


def dense_prediction(p, user, item):
    """One rating by the paper's formula: the user's whole item table times the item's one-hot
    row."""
    vector = F.one_hot(torch.tensor(user), METAMF_USERS).float() @ p["user.id"] @ p["memory"]
    hidden = {
        h: F.relu(vector @ p[f"{h}.hidden.weight"] + p[f"{h}.hidden.bias"])
        for h in ("layer0", "layer1", "item")
    }
    low = torch.einsum("ikh,h->ik", p["item.low.matrix"], hidden["item"]) + p["item.low.offset"]
    rise = (hidden["item"] @ p["item.rise.matrix"] + p["item.rise.offset"]).reshape(2, 4)
    embedding = F.one_hot(torch.tensor(item), METAMF_ITEMS).float() @ (low @ rise)
    first = (hidden["layer0"] @ p["layer0.weight.matrix"] + p["layer0.weight.offset"]).reshape(4, 3)
    bias = hidden["layer0"] @ p["layer0.bias.matrix"] + p["layer0.bias.offset"]
    second = hidden["layer1"] @ p["layer1.weight.matrix"] + p["layer1.weight.offset"]
    last = hidden["layer1"] @ p["layer1.bias.matrix"] + p["layer1.bias.offset"]
    return F.relu(embedding @ first + bias) @ second + last[0]


def test_whole_tables_predict_as_one_hot_products_do(model, parameters):
    users = torch.tensor([6, 0, 3])
    values, low = generate(parameters, users, None)
    scores = model.scores({**values, "item.low": low}, ())
    expected = [
        [float(dense_prediction(parameters, u, i)) for i in range(METAMF_ITEMS)]
        for u in users.tolist()
    ]
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-4, atol=1e-6)
    assert np.std(expected) > 0.01  # users differ, and so do items


def test_requested_rows_are_those_of_the_whole_tables(parameters):
    users = torch.tensor([1, 4, 6])
    requests = ItemRequests.of(
        users.numpy(), [np.array([0, 10]), np.array([], dtype=np.int64), np.array([3, 4, 10])]
    )
    _, low = generate(parameters, users, requests)
    _, whole = generate(parameters, users, None)
    expected = torch.stack([whole[0, 0], whole[0, 10], whole[2, 3], whole[2, 4], whole[2, 10]])
    torch.testing.assert_close(low, expected, rtol=1e-5, atol=1e-6)


def test_the_servers_parameters_are_refused_on_the_device(model, parameters):
    with pytest.raises(ExperimentError, match="parameters that the server generates"):
        model.predict(
            {name: value.unsqueeze(0) for name, value in parameters.items()},
            (),
            torch.tensor([[1]]),
        )
    with pytest.raises(ExperimentError, match="cannot generate parameters"):
        generate({"item.id": torch.zeros(3, 2)}, torch.tensor([0]), None)
