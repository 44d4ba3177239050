# SPDX-License-Identifier: Apache-2.0
"""PrivRec's network, and users' priors."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from fedrec.data.client_data import ClientData
from fedrec.data.interactions import FeatureTable, Schema, Vectors
from fedrec.errors import DataError, ExperimentError
from fedrec.models.priors import _read_glove, _UserPriors, _word_vectors, user_priors
from fedrec.models.privrec import PrivRec, PrivRecConfig
from fedrec.models.vae import Vae, VaeConfig
from fedrec.privacy.personal import PersonalNoise, PriorsConfig

# PrivRec's network against an implementation with `nn.Embedding` and `nn.Linear`, and against
# equations 1 and 2.

ITEMS = torch.tensor([3, 0, 5, 2, 2])


@pytest.fixture
def make(world):
    def model(task="ranking", **settings):
        return PrivRec(
            PrivRecConfig(**{"embedding": 3, "hidden": (5, 4), **settings}), world(task).schema()
        )

    return model


def fresh(model, seed=0):
    return model.initial(torch.Generator().manual_seed(seed))


def stacked(*slices):
    return {name: torch.stack([one[name] for one in slices]) for name in slices[0]}


def codes_of(population, *clients):
    return tuple(torch.from_numpy(codes) for codes in population.feature_codes(np.array(clients)))


@pytest.mark.parametrize("activation", ["relu", "sigmoid", "tanh"])
@pytest.mark.parametrize("task", ["ranking", "rating"])
@pytest.mark.parametrize("hidden", [(5, 4), ()])
def test_predictions_and_gradients_equal_those_of_plain_modules(
    make, world, torch_privrec, activation, task, hidden
):
    model = make(task, activation=activation, hidden=hidden)
    parameters = fresh(model)
    # Client 1 has no hobby and client 0 has two, so pooling matters.
    labels = (
        torch.tensor([1.0, 0, 0, 1, 1]) if task == "ranking" else torch.tensor([5.0, 1, 2, 3, 4])
    )
    for client in (0, 1):
        users = codes_of(world(), client)
        leaves = {name: value.unsqueeze(0).requires_grad_() for name, value in parameters.items()}
        predicted = model.predict(leaves, users, ITEMS.unsqueeze(0))
        plain = torch_privrec(model, parameters)
        expected = plain([codes[0] for codes in users], ITEMS)
        torch.testing.assert_close(predicted[0], expected, rtol=1e-5, atol=1e-6)
        model.loss(predicted, labels.unsqueeze(0)).sum().backward()
        loss = torch.nn.BCEWithLogitsLoss() if task == "ranking" else torch.nn.MSELoss()
        loss(expected, labels).backward()
        for name, leaf in plain.values.items():
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            torch.testing.assert_close(leaves[name].grad[0], gradient, rtol=1e-4, atol=1e-6)


def test_shapes_and_names_hold_no_user(make):
    shapes = {name: tuple(value.shape) for name, value in fresh(make()).items()}
    assert shapes == {
        "user.gender": (2, 3),
        "user.hobby": (2, 3),
        "item.id": (6, 3),
        "item.genres": (2, 3),
        "layer0.weight": (12, 5),
        "layer0.bias": (5,),
        "layer1.weight": (5, 4),
        "layer1.bias": (4,),
        "layer2.weight": (4, 1),
        "layer2.bias": (1,),
    }


def test_an_items_bias_is_added_to_its_logit(make, world):
    """With compact tables, too, where an item's row is not its number."""
    model, users = make(item_bias=True), codes_of(world(), 0)
    parameters = {name: value.unsqueeze(0) for name, value in fresh(model).items()}
    assert model.item_tables == ("item.id", "item.bias") and not parameters["item.bias"].any()
    plain = model.predict(parameters, users, ITEMS.unsqueeze(0))
    bias = torch.arange(parameters["item.bias"].shape[1], dtype=torch.float32) ** 2
    biased = model.predict(
        {**parameters, "item.bias": bias.view(1, -1, 1)}, users, ITEMS.unsqueeze(0)
    )
    torch.testing.assert_close(biased - plain, bias[ITEMS].unsqueeze(0))
    compact = {"item.id": parameters["item.id"][:, ITEMS], "item.bias": bias[ITEMS].view(1, -1, 1)}
    rows = torch.arange(len(ITEMS)).unsqueeze(0)
    same = model.predict({**parameters, **compact}, users, ITEMS.unsqueeze(0), rows=rows)
    torch.testing.assert_close(same, biased)


def test_items_can_start_from_the_principal_components_of_their_features(make):
    """Against scikit-learn on the joined indicator vectors of length 1; columns beyond the rank are
    zero."""
    decomposition = pytest.importorskip("sklearn.decomposition")
    model = make(item_start="features", embedding=4)
    found = fresh(model)["item.id"].numpy()
    blocks = []
    for feature in model.schema.item_features.features:
        block = np.zeros((feature.rows, len(feature.categories)))
        for item in range(feature.rows):
            block[item, feature.codes[feature.offsets[item] : feature.offsets[item + 1]]] = 1
        blocks.append(block / np.maximum(np.linalg.norm(block, axis=1, keepdims=True), 1e-12))
    joined = np.concatenate(blocks, axis=1)
    rank = min(4, np.linalg.matrix_rank(joined - joined.mean(0)))
    expected = decomposition.PCA(rank).fit_transform(joined)
    np.testing.assert_allclose(np.abs(found[:, :rank]), np.abs(expected), atol=1e-5)
    assert not found[:, rank:].any()
    assert np.array_equal(found, fresh(model, seed=1)["item.id"].numpy())


@pytest.mark.parametrize("hidden", [(5, 4), ()])
def test_a_model_whose_output_starts_at_zero_prefers_no_item(make, world, hidden):
    model = make(hidden=hidden, output_start="zero")
    parameters = {name: value.unsqueeze(0) for name, value in fresh(model).items()}
    assert not model.scores(parameters, codes_of(world(), 0)).any()
    assert fresh(model)["item.id"].any()


def test_without_features_it_is_the_network_of_a_dataset_that_has_none(make, world):
    """With item ids only: the same parameters, predictions and declaration."""
    schema = world().schema()
    none = {"item_features": FeatureTable(schema.num_items), "user_features": ()}
    model = make(features=False)
    bare = PrivRec(model.config, dataclasses.replace(schema, **none))
    parameters = fresh(model)
    layers = {f"layer{n}.{part}" for n in range(3) for part in ("weight", "bias")}
    assert parameters.keys() == {"item.id", *layers}
    assert all(torch.equal(value, parameters[name]) for name, value in fresh(bare).items())
    users = codes_of(world(), 0)
    found = model.predict(stacked(parameters), users, ITEMS[None])
    assert torch.equal(found, bare.predict(stacked(parameters), (), ITEMS[None]))
    assert model.kernel().dense == bare.kernel().dense and set(bare.kernel().dense) == layers


def test_dense_vectors_enter_by_a_projection():
    """Against plain matrix products; native code does not train such a model."""
    values = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    table = FeatureTable(6, vectors=(Vectors("cover", values, np.ones(6, dtype=bool)),))
    schema = Schema(6, table, (), "ranking")
    model = PrivRec(PrivRecConfig(embedding=3, hidden=()), schema)
    parameters = fresh(model)
    assert parameters["item.cover"].shape == (4, 3) and model.kernel() is None
    centred = values - values.mean(0)
    scaled = torch.from_numpy(centred / np.sqrt((centred**2).sum(1).mean()))
    joined = torch.cat([parameters["item.id"], scaled @ parameters["item.cover"]], 1)
    expected = joined @ parameters["layer0.weight"] + parameters["layer0.bias"]
    found = model.predict(stacked(parameters), (), ITEMS[None])
    torch.testing.assert_close(found[0], expected[ITEMS][:, 0])
    started = PrivRec(PrivRecConfig(embedding=2, hidden=(), item_start="features"), schema)
    unit = scaled / scaled.norm(dim=1, keepdim=True)
    spread = torch.linalg.svdvals(unit - unit.mean(0))[:2]
    start = fresh(started)["item.id"]
    torch.testing.assert_close(start.norm(dim=0), spread, rtol=1e-4, atol=1e-5)


WORDS = (("F", "M"), ("artist", "doctor", "none"))
NONE = np.zeros(0, dtype=np.int64)


def client(*codes, number=0):
    features = tuple(np.atleast_1d(np.array(code)) for code in codes)
    return ClientData(number, features, NONE, np.zeros(0, np.float32), NONE)


def vae(latent=4, words=WORDS):
    users = tuple((f"kind{place}", len(own)) for place, own in enumerate(words))
    return Vae(
        VaeConfig(latent=latent), Schema(6, FeatureTable(6, ()), users, "ranking", user_words=words)
    )


def quiet(**settings):
    noise = PersonalNoise(epsilon=1.0, participations=1, priors=PriorsConfig())
    found = user_priors(PriorsConfig(noise=False, **settings), noise, vae())
    assert found is not None
    return found


def test_equation_11_by_loops():
    priors = quiet()
    both, _ = priors.exact(client([0, 1], 2))  # several words: their mean, none: that of all
    np.testing.assert_allclose(both, priors.exact(client(-1, 2))[0])
    np.testing.assert_allclose(priors.of(client(-1, 2))[0], both, rtol=1e-6)  # without noise
    for gender, work in itertools.product(range(2), range(3)):
        mean, variance = priors.exact(client(gender, work))
        for j in range(4):
            m = [priors.vectors[0][gender][j], priors.vectors[1][work][j]]
            mu_w = [float(np.mean(own[:, j])) for own in priors.vectors]
            mu = m[0] * mu_w[0] + m[1] * mu_w[1]
            assert mean[j] == pytest.approx(mu, rel=1e-5)
            assert variance[j] == pytest.approx((m[0] - mu) ** 2 + (m[1] - mu) ** 2, rel=1e-5)


def test_no_exchange_of_metadata_moves_more_than_the_sensitivity():
    priors = quiet()
    found = [priors.exact(client(*codes)) for codes in itertools.product((-1, 0, 1), (-1, 0, 1, 2))]
    for which in range(2):
        widest = max(
            np.linalg.norm(a[which] - b[which]) for a, b in itertools.combinations(found, 2)
        )
        assert widest <= priors.sensitivities[which] + 1e-12


def test_noise_has_the_scale_of_the_budget_and_is_drawn_once_per_user():
    # many numbers, to estimate a distribution; mu_kj = 0.5
    table = [np.full((2, 3000), 0.5), np.full((3, 3000), 0.5)]
    config = PriorsConfig()
    settings = PersonalNoise(budgets="equal", epsilon=2.5e6, participations=3, priors=config)
    priors = _UserPriors(table, [0, 1], settings)
    mean, _ = priors.of(client(0, 1, number=7))
    # mean and variance are one release, half of the cost each
    multiplier = settings.prior_multiplier(7) * math.sqrt(2)
    assert kstest(mean, "norm", (0.5, multiplier * priors.sensitivities[0])).pvalue > 1e-3
    assert kstest(mean, "norm", (0.5, 1.2 * multiplier * priors.sensitivities[0])).pvalue < 1e-3
    np.testing.assert_array_equal(mean, priors.of(client(0, 1, number=7))[0])
    assert not np.array_equal(mean, priors.of(client(0, 1, number=8))[0])


def test_priors_stay_in_their_range_under_any_noise():
    config = PriorsConfig()
    noise = PersonalNoise(epsilon=1e-3, participations=1, priors=config)
    priors = user_priors(config, noise, vae())
    for number in range(20):
        mean, variance = priors.of(client(0, 1, number=number))
        assert (mean >= 0).all()
        assert (mean <= priors.highest + 1e-6).all()
        assert (variance >= np.float32(0.05)).all()


def test_onehot_vectors_are_in_range_and_tell_words_apart():
    own = _word_vectors(PriorsConfig(), WORDS, 4)
    rows = np.concatenate(own)
    assert [len(part) for part in own] == [2, 3] and rows.min() == 0 and rows.max() == 1
    assert len({tuple(row) for row in rows.tolist()}) == 5
    np.testing.assert_array_equal(own[1], _word_vectors(PriorsConfig(), WORDS, 4)[1])


@pytest.fixture
def glove(tmp_path):
    file = tmp_path / "glove.txt"
    lines = ["the 9 9 9 9", ", 1 1 1 1", "female 0 1 2 3", "male 4 1 0 1", "artist 2 0 0 5.0e-00"]
    lines += ["日本 1 1 1 1", "doctor 1 1 1 1", "artist name@domain.com 7 7 7 7"]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def test_glove_is_looked_up_by_word_and_stretched_to_its_range(glove, caplog):
    gender, work = _word_vectors(PriorsConfig(source=f"glove:{glove}"), WORDS, 4)
    raw = np.array([[0, 1, 2, 3], [4, 1, 0, 1], [2, 0, 0, 5], [1, 1, 1, 1]], dtype=float)
    mean = raw.mean(0)  # "none" is not in the file
    every = np.vstack([raw, mean])
    expected = (every - every.min(0)) / (every.max(0) - every.min(0))
    np.testing.assert_allclose(np.concatenate([gender, work]), expected)
    assert "none" in caplog.text and set(_read_glove(glove, ["doctor"])) == {"doctor"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "not found"),
        ('{"artist": [1, 2]}', "does not match priors"),
        ("{", "not a valid vector file"),
        ("{}", "no vectors for the words"),
        ('{"artist": ["x"]}', "not a valid vector file"),
    ],
)
def test_files_that_will_not_do(tmp_path, content, message):
    file = tmp_path / "table.json"
    if content is not None:
        file.write_text(content)
    digest = "0" * 64 if "match" in message else None
    with pytest.raises(DataError, match=message):
        _word_vectors(PriorsConfig(source=f"table:{file}", sha256=digest), WORDS, 2)


def test_users_without_such_metadata_are_refused():
    with pytest.raises(ExperimentError, match="unknown or missing user features"):
        user_priors(PriorsConfig(features=("hobby",)), None, vae())
    with pytest.raises(ExperimentError, match="unknown or missing user features"):
        user_priors(PriorsConfig(), None, vae(words=()))
