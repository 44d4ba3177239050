# SPDX-License-Identifier: Apache-2.0
"""A client's part in the neighbourhood model against autograd, and against central training."""

import copy

import numpy as np
import pytest
import torch

from clients.hosting.node import Node
from clients.training.round import train_clients
from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from fedrec.models.pnbm import Pnbm, PnbmConfig
from fedrec.neighbourhood.gradients import Bounds, Examples
from fedrec.neighbourhood.own_block import Rest, own_gradient
from fedrec.neighbourhood.profiles import Profiles
from fedrec.privacy.protection import Protection
from fedrec.protocol.orders import TrainOrder
from fedrec.protocol.sparse_update import dense_change
from fedrec.rng import torch_stream


@pytest.fixture
def node(tiny_experiment):
    def make(step="pnbm", path="auto", **model):
        table = {**copy.deepcopy(tiny_experiment()), "task": "rating", "positive-above": None}
        table |= {"model": {"name": "pnbm", **model}, "step": {"name": step}}
        table["engine"]["path"] = path
        return Node(load(table), 0, 1, None)

    return make


def start_of(node, random=None):
    """Initial parameters, or others with means, counts and similarities of all signs."""
    arrays = {
        name: value.numpy() for name, value in node.model.initial(torch_stream(0, "init")).items()
    }
    if random is not None:
        arrays["item.mean"] = random.uniform(2, 4, arrays["item.mean"].shape).astype(np.float32)
        arrays["item.count"] = random.permutation(30).astype(np.float32)[:, None]
        for name in arrays:
            if name.startswith("similarity"):
                arrays[name] = random.normal(size=arrays[name].shape).astype(np.float32)
    return arrays


def summed(node, arrays, protection=None):
    total = train_clients(node, arrays, TrainOrder(1, node.training, protection=protection)).total
    return {name: dense_change(change, arrays[name]) for name, change in total.items()}


def profiles(node):
    users, items, ratings = node.population.rated(node.training)
    data = node.population.interactions
    return Profiles.of(data.num_users, data.num_items, users, items, ratings.astype(np.float64))


def test_the_sum_over_clients_is_the_central_gradient(node):
    node = node(prior=2.0)
    arrays = start_of(node, np.random.default_rng(0))
    found = summed(node, arrays)
    examples = Examples(profiles(node), arrays["item.mean"][:, 0].astype(np.float64))
    bounds = Bounds(prior=2.0, low=1.0, high=5.0)
    expected, _ = examples.gradient(
        arrays["similarity"].astype(np.float64), np.arange(len(examples)), bounds
    )
    np.testing.assert_allclose(found.pop("similarity"), -expected, atol=2e-6)
    assert not any(change.any() for change in found.values())


@pytest.mark.parametrize(
    "model", [{"items": 9}, {"items": 9, "rank": 3}, {"rank": 2, "prior": 0.0}]
)
def test_updates_are_gradients_of_what_is_predicted(node, model):
    """Autograd through the model's own prediction, each rating left out of the history in turn."""
    node = node(**model)
    arrays = start_of(node, np.random.default_rng(1))
    client = int(node.training[0])
    leaves = {
        name: torch.tensor(value, dtype=torch.float64).requires_grad_()
        for name, value in arrays.items()
    }
    loss, chosen = torch.zeros(()), set(node.model.chosen(leaves["item.count"]).tolist())
    history = torch.tensor(
        node.population.histories(np.array([client]), True), dtype=torch.float64
    )[0]
    for item in torch.nonzero(history)[:, 0].tolist():
        if item in chosen:  # the others have no gradient
            rest = history.clone()
            rest[item] = 0
            slices = {name: value.unsqueeze(0) for name, value in leaves.items()}
            loss = (
                loss
                + (node.model.history_scores(slices, rest[None, None])[0, 0, item] - history[item])
                ** 2
                / 2
            )
    names = [name for name in leaves if name.startswith("similarity")]
    expected = dict(
        zip(names, torch.autograd.grad(loss, [leaves[name] for name in names]), strict=True)
    )
    order = TrainOrder(1, np.array([client]))
    total = train_clients(node, arrays, order).total
    for name in names:
        found = dense_change(total[name], arrays[name])
        np.testing.assert_allclose(found, -expected[name].numpy(), atol=1e-5)
        assert found.any()


def test_an_update_stays_within_the_users_items_and_is_clipped_whole(node):
    node = node(items=9)
    arrays = start_of(node, np.random.default_rng(2))
    client = node.training[:1]
    rated = set(node.population.client(int(client[0])).items.tolist())
    slots = [
        place
        for place, item in enumerate(node.model.chosen(torch.tensor(arrays["item.count"])).tolist())
        if item in rated
    ]
    names = ("similarity",)
    whole = train_clients(node, arrays, TrainOrder(1, client)).total["similarity"]
    outside = np.delete(np.arange(9), slots)
    assert whole.any()
    assert not whole[outside].any()
    assert not whole[:, outside].any()
    assert not whole.diagonal().any()
    norm = float(np.linalg.norm(whole))
    clipped = train_clients(
        node, arrays, TrainOrder(1, client, protection=Protection(norm / 4, 2, names))
    ).total
    np.testing.assert_allclose(clipped["similarity"], whole / 4, rtol=1e-4)


def test_rating_sums(node):
    """Ratings in [-1, 1] and counts, from the dataset itself."""
    node = node("rating-sums")
    arrays, own = start_of(node), profiles(node)
    found = summed(node, arrays)
    np.testing.assert_allclose(
        found["item.mean"][:, 0], np.bincount(own.items, (own.values - 3) / 2, 30), atol=1e-5
    )
    assert np.array_equal(found["item.count"][:, 0], np.bincount(own.items, minlength=30))
    assert not found["similarity"].any()


def test_own_gradient_is_that_of_autograd():
    random = np.random.default_rng(3)
    similarity, deviations = random.normal(size=(6, 6)), random.normal(size=6)
    rest = Rest(1.5, 2.0, -0.7, np.full(6, -0.6), np.full(6, 0.6))
    leaf = torch.tensor(similarity, requires_grad=True)
    own = leaf * (1 - torch.eye(6, dtype=torch.float64))
    guess = (own @ torch.tensor(deviations) - 0.7) / (3.5 + own.abs().sum(1))
    loss = ((guess.clamp(-0.6, 0.6) - torch.tensor(deviations)) ** 2).sum() / 2
    (expected,) = torch.autograd.grad(loss, leaf)
    found, errors = own_gradient(similarity, deviations, rest)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-12)
    assert np.square(errors).sum() / 2 == pytest.approx(float(loss.detach()))


def test_the_fresh_model_predicts_mean_and_users_mean_deviation(node):
    node = node(prior=2.0)
    arrays = start_of(node)
    arrays["item.mean"] = np.linspace(2, 4, 30, dtype=np.float32)[:, None]
    client = node.training[:1]
    history = torch.from_numpy(node.population.histories(client, True))
    slices = {name: torch.from_numpy(value).unsqueeze(0) for name, value in arrays.items()}
    rated = torch.nonzero(history[0])[:, 0]
    left = (history[0] - slices["item.mean"][0, :, 0])[rated].sum() / (len(rated) + 2)
    unrated = torch.nonzero(history[0] == 0)[:, 0]
    found = node.model.history_scores(slices, history[None])[0, 0]
    expected = (slices["item.mean"][0, :, 0] + left).clamp(1, 5)
    assert torch.allclose(found[unrated], expected[unrated], atol=1e-5)


def test_what_does_not_fit_is_refused(node, tiny_experiment):
    schema = node().model.schema
    with pytest.raises(ExperimentError, match="more items than there are"):
        Pnbm(PnbmConfig(items=31), schema)
    with pytest.raises(ExperimentError, match="task = 'rating'"):
        Pnbm(PnbmConfig(), type(schema)(30, schema.item_features, (), "ranking"))
    with pytest.raises(ExperimentError, match=r"model\.name = 'pnbm'"):
        other = {**tiny_experiment(), "step": {"name": "pnbm"}}
        summed(other := Node(load(other), 0, 1, None), start_of(other))
    with pytest.raises(ExperimentError, match="no item means"):
        other = {**tiny_experiment(), "step": {"name": "rating-sums"}}
        Node(load(other), 0, 1, None).initial()
    with pytest.raises(ExperimentError, match="scale"):
        PnbmConfig.parse({"scale": [5.0, 1.0]})
