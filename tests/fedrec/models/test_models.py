# SPDX-License-Identifier: Apache-2.0
"""Models: autoencoders, matrix factorization, NeuMF and MetaMF."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Independent, Multinomial, Normal, kl_divergence
from torch.nn import functional as F

from clients.node import Node
from fedrec.baselines.central import CentralNeumf, CentralNeumfConfig
from fedrec.data.features import FeatureTable
from fedrec.data.interactions import Schema
from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from fedrec.models.metamf import MetaMf, MetaMfConfig, generate
from fedrec.models.mf import Mf, MfConfig
from fedrec.models.vae import Ae, AeConfig, Draw, Prior, Vae, VaeConfig, divergence
from fedrec.protocol.client_arrays import ItemRequests
from fedrec.rng import torch_stream

# The autoencoder against an implementation with `nn.Linear`.

USERS, ITEMS = 3, 7


def shifted(model):
    """Parameters whose biases differ from zero, so that a missing one is detected."""
    return {
        name: (value + 0.1 * torch.arange(value.numel()).view(value.shape).sin()).unsqueeze(0)
        for name, value in model.initial(torch.Generator().manual_seed(1)).items()
    }


@pytest.fixture
def model():
    return Ae(AeConfig(hidden=5, latent=2), Schema(ITEMS, FeatureTable(ITEMS, ()), (), "ranking"))


@pytest.fixture
def parameters(model):
    return shifted(model)


def test_scores_and_loss_equal_those_of_plain_modules(model, parameters, histories):
    encoder, code, decoder, output = (
        linear(parameters, name) for name in ("encoder", "mean", "decoder", "output")
    )
    unit = histories[0] / histories[0].norm(dim=1, keepdim=True)

    def logits(inputs):
        return output(torch.tanh(decoder(code(torch.tanh(encoder(inputs))))))

    for scale in (1, 4):  # how much a user has makes no difference
        scores = model.history_scores(parameters, scale * histories)[0]
        torch.testing.assert_close(scores, logits(unit))
    assert not any(name.startswith("log-variance") for name in parameters)
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


# The variational autoencoder against `nn.Linear`, `torch.distributions` and the paper's parameter
# counts.

VAE_USERS, VAE_ITEMS = 3, 7


def make(items=VAE_ITEMS, task="ranking", **settings):
    return Vae(VaeConfig(**settings), Schema(items, FeatureTable(items, ()), (), task))


@pytest.fixture
def model_of_vae():
    return make(hidden=5, latent=2)


@pytest.fixture
def parameters_of_vae(model_of_vae):
    return shifted(model_of_vae)


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


def test_the_bound_equals_that_of_plain_modules_and_distributions(
    model_of_vae, parameters_of_vae, histories
):
    generator = torch.Generator().manual_seed(3)
    draw = Draw(
        torch.rand(1, VAE_USERS, VAE_ITEMS, generator=generator) > 0.4,
        torch.randn(1, VAE_USERS, 2, generator=generator),
    )
    mean = torch.randn(1, VAE_USERS, 2, generator=generator)
    variance = torch.rand(1, VAE_USERS, 2, generator=generator) + 0.5
    names = ["encoder", "mean", "log-variance", "decoder", "output"]
    encoder, to_mean, to_log_variance, decoder, output = (
        linear(parameters_of_vae, name) for name in names
    )
    lengths = histories[0].square().sum(-1, keepdim=True).sqrt()
    hidden = torch.tanh(encoder(histories[0] / lengths * draw.mask[0] / 0.5))
    posterior = Normal(to_mean(hidden), (to_log_variance(hidden) / 2).exp())
    logits = output(torch.tanh(decoder(posterior.mean + draw.noise[0] * posterior.stddev)))
    counts = histories[0].sum(-1)
    for user in range(VAE_USERS):
        chances = Multinomial(int(counts[user]), logits=logits[user])
        ways = torch.lgamma(counts[user] + 1)  # of ordering distinct items; no parameter changes it
        likelihood = chances.log_prob(histories[0, user]) - ways
        theirs = Normal(mean[0, user], variance[0, user].sqrt())
        own = Normal(posterior.mean[user], posterior.stddev[user])
        kl = kl_divergence(Independent(own, 1), Independent(theirs, 1))
        got = model_of_vae.negative_elbo(
            parameters_of_vae, histories, draw, 0.3, Prior(mean, variance)
        )[0, user]
        torch.testing.assert_close(got, 0.3 * kl - likelihood, rtol=1e-5, atol=1e-5)


def test_without_priors_the_divergence_is_that_from_the_standard_gaussian():
    mean, log_variance = torch.randn(4, 3), torch.randn(4, 3)
    standard = Prior(torch.zeros(3), torch.ones(3))
    torch.testing.assert_close(
        divergence(mean, log_variance), divergence(mean, log_variance, standard)
    )
    assert divergence(torch.zeros(3), torch.zeros(3)) == 0


def test_ratings_and_single_items_are_refused(model_of_vae, parameters_of_vae):
    with pytest.raises(ExperimentError, match="task = 'ranking'"):
        make(task="rating")
    with pytest.raises(ExperimentError, match="cannot predict single items"):
        model_of_vae.predict(parameters_of_vae, (), torch.zeros(1, 1, dtype=torch.int64))


# Matrix factorization: predictions equal the sum of their terms.


def test_a_prediction_is_biases_and_a_product():
    model = Mf(MfConfig(factors=3, center=3.5), Schema(5, FeatureTable(5, ()), (), "rating"))
    fresh = model.initial(torch_stream(1, "init"))
    assert fresh["bias"].tolist() == [3.5]
    assert not fresh["item.bias"].any()
    assert not fresh["user.bias"].any()
    random = np.random.default_rng(0)
    own = {n: random.normal(size=(2, *v.shape)).astype(np.float32) for n, v in fresh.items()}
    items = np.array([[4, 0, 4], [1, 2, 3]])
    got = model.predict(
        {n: torch.from_numpy(v) for n, v in own.items()}, (), torch.from_numpy(items)
    )
    for c in range(2):
        p = {name: value[c].astype(np.float64) for name, value in own.items()}
        expected = [
            p["bias"][0]
            + p["user.bias"][0]
            + p["item.bias"][i, 0]
            + p["item.factors"][i] @ p["user.factors"]
            for i in items[c]
        ]
        np.testing.assert_allclose(got[c].numpy(), expected, rtol=1e-5)
    scores = model.scores({n: torch.from_numpy(v) for n, v in own.items()}, ())
    torch.testing.assert_close(scores[0, [4, 0, 4]], got[0])
    given = {n: torch.from_numpy(v) for n, v in own.items()}
    for name in ("item.factors", "item.bias"):  # shared, as among clients with private factors
        given[name] = given[name][:1].expand(2, *given[name].shape[1:])
    wanted = model.predict(given, (), torch.arange(5).expand(2, -1))
    torch.testing.assert_close(model.scores(given, ()), wanted)


def test_without_biases_a_prediction_is_the_product_alone():
    model = Mf(MfConfig(factors=3, biases=False), Schema(5, FeatureTable(5, ()), (), "ranking"))
    fresh = model.initial(torch_stream(1, "init"))
    assert sorted(fresh) == ["item.factors", "user.factors"] and model.item_tables == (
        "item.factors",
    )
    assert Mf.item_tables == ("item.factors", "item.bias")
    scores = model.scores({name: value.unsqueeze(0) for name, value in fresh.items()}, ())
    np.testing.assert_allclose(
        scores[0].numpy(), fresh["item.factors"].numpy() @ fresh["user.factors"].numpy(), 1e-5
    )
    with pytest.raises(ValueError, match="biases = true"):
        MfConfig(biases=False, center=3.5)


PARTS = [(4, (6, 5, 3)), (4, ()), (0, (6, 3)), (2, (4, 1))]


@pytest.fixture
def pair(tiny_experiment):
    """A node with the federated model, and the centralised one with the same parameters and its
    user's row."""

    def make(factors, tower):
        table = tiny_experiment() | {
            "model": {"name": "neumf", "factors": factors, "tower": list(tower)},
            "step": {
                "name": "sgd",
                "epochs": 1,
                "batch-size": 10**6,
                "private-parameters": ["user.*"],
            },
        }
        node = Node(load(table), 0, 1, None)
        start = {name: value.double() for name, value in node.initial().items()}
        central = CentralNeumf(CentralNeumfConfig(factors=factors, tower=tower))
        layers = range(max(0, len(tower) - 1))
        central.shared = {"h": start["output.weight"][:, 0], "b": start["output.bias"][0]}
        central.shared |= {f"W{n}": start[f"tower{n}.weight"].T for n in layers}
        central.shared |= {f"b{n}": start[f"tower{n}.bias"] for n in layers}
        parts = [part for part, there in (("factors", factors), ("tower", tower)) if there]
        user, items = (
            torch.cat([start[f"{who}.{part}"] for part in parts], -1) for who in ("user", "item")
        )
        return node, start, central, user, items

    return make


@pytest.mark.parametrize(("factors", "tower"), PARTS)
def test_logits_are_those_of_the_centralised_model(pair, factors, tower):
    node, start, central, user, items = pair(factors, tower)
    stacked = {name: value.unsqueeze(0) for name, value in start.items()}
    found = node.model.scores(stacked, ())[0]
    torch.testing.assert_close(found, central.joined_logits(user, items))


# Meta matrix factorization: generated parameters and predictions, against dense layers and one-hot
# products.

METAMF_ITEMS, METAMF_USERS = 11, 7


@pytest.fixture
def model_of_metamf():
    config = MetaMfConfig(
        user=5, memory=6, generator=9, embedding=4, rank=2, hidden=3, user_std=1.0
    )
    return MetaMf(
        config, Schema(METAMF_ITEMS, FeatureTable(METAMF_ITEMS, ()), (), "rating", METAMF_USERS)
    )


@pytest.fixture
def parameters_of_metamf(model_of_metamf):
    return model_of_metamf.initial(torch_stream(3, "init"))


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


def test_whole_tables_predict_as_one_hot_products_do(model_of_metamf, parameters_of_metamf):
    users = torch.tensor([6, 0, 3])
    values, low = generate(parameters_of_metamf, users, None)
    scores = model_of_metamf.scores({**values, "item.low": low}, ())
    expected = [
        [float(dense_prediction(parameters_of_metamf, u, i)) for i in range(METAMF_ITEMS)]
        for u in users.tolist()
    ]
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-4, atol=1e-6)
    assert np.std(expected) > 0.01  # users differ, and so do items


def test_requested_rows_are_those_of_the_whole_tables(parameters_of_metamf):
    users = torch.tensor([1, 4, 6])
    requests = ItemRequests.of(
        users.numpy(), [np.array([0, 10]), np.array([], dtype=np.int64), np.array([3, 4, 10])]
    )
    _, low = generate(parameters_of_metamf, users, requests)
    _, whole = generate(parameters_of_metamf, users, None)
    expected = torch.stack([whole[0, 0], whole[0, 10], whole[2, 3], whole[2, 4], whole[2, 10]])
    torch.testing.assert_close(low, expected, rtol=1e-5, atol=1e-6)


def test_gradients_of_requested_rows_are_right(parameters_of_metamf):
    """The closed-form backward pass against finite differences, also for an item requested
    twice."""
    double = {name: value.double().requires_grad_() for name, value in parameters_of_metamf.items()}
    users, lists = torch.tensor([1, 4]), [np.array([0, 10]), np.array([3, 10])]
    requests = ItemRequests.of(users.numpy(), lists)
    names = ("user.id", "item.low.matrix", "item.low.offset", "item.hidden.weight")

    def rows(*values):
        return generate({**double, **dict(zip(names, values, strict=True))}, users, requests)[1]

    assert torch.autograd.gradcheck(rows, tuple(double[name] for name in names))


def test_the_servers_parameters_are_refused_on_the_device(model_of_metamf, parameters_of_metamf):
    with pytest.raises(ExperimentError, match="parameters that the server generates"):
        model_of_metamf.predict(
            {name: value.unsqueeze(0) for name, value in parameters_of_metamf.items()},
            (),
            torch.tensor([[1]]),
        )
    with pytest.raises(ExperimentError, match="cannot generate parameters"):
        generate({"item.id": torch.zeros(3, 2)}, torch.tensor([0]), None)
