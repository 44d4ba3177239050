# SPDX-License-Identifier: Apache-2.0
"""The steps of counts, meta-learning, MetaMF and PNBM."""

import copy

import numpy as np
import pytest
import torch

from clients.blocks import update_of
from clients.evaluation import requested_items
from clients.node import Node
from clients.round import train_clients, train_each
from clients.steps.maml import Maml, MamlConfig
from clients.steps.statistics import Counts
from fedrec.baselines.base import Ratings
from fedrec.baselines.neighbours import profiles_of
from fedrec.data.client_data import ClientData
from fedrec.data.interactions import FeatureTable, Schema
from fedrec.errors import ClientError, ExperimentError
from fedrec.experiment.schema import load
from fedrec.models.base import Model
from fedrec.models.linear import Pnbm, PnbmConfig
from fedrec.models.personal import generate
from fedrec.neighbourhood import Bounds, Examples
from fedrec.privacy.clipping import Protection
from fedrec.protocol.messages import ItemQuery, TrainOrder
from fedrec.protocol.updates import ClientArrays, dense_change
from fedrec.rng import torch_stream

# Counting: the sum of the clients' updates is the number of clients who like each item, on every
# path.


def summed(node, protection=None):
    arrays = {
        name: value.numpy() for name, value in node.model.initial(torch_stream(0, "init")).items()
    }
    total = train_clients(node, arrays, TrainOrder(1, node.training, protection=protection)).total
    return {name: dense_change(change) for name, change in total.items()}


def likes(node):
    """`bool [clients, items]` from the dataset itself: training rows rated above 3."""
    data, rows = node.population.interactions, node.population.partition.train_rows
    rows = rows[data.ratings[rows] > 3]
    table = np.zeros((data.num_users, data.num_items), dtype=bool)
    table[data.users[rows], data.items[rows]] = True
    return table[node.training]


def test_a_subclass_with_another_update_is_signed_unless_it_declares_otherwise():
    class Renamed(Counts):
        pass

    class Negated(Counts):
        def train_block(self, parameters, block, client_params=None):
            raise NotImplementedError

    class Shifted(Counts):
        def entries(self, parameters, items, weights):
            raise NotImplementedError

    class Halved(Negated):
        contributions = "non-negative"

    found = [step.contributions for step in (Counts, Renamed, Negated, Shifted, Halved)]
    assert found == ["non-negative", "non-negative", "signed", "signed", "non-negative"]


def test_a_model_without_biases_is_refused(load_tiny):
    with pytest.raises(ExperimentError, match=r"item\.bias"):
        Node(load_tiny("step={name='counts'}"), 0, 1, None).initial()


@pytest.mark.parametrize("path", ["reference", "blocks"])
@pytest.mark.parametrize("model", ["privrec", "item-weights"])
def test_every_path_counts_alike_for_all_models(tiny_experiment, path, model):
    """`item.bias` is an item table in one model and a dense parameter in the other."""
    table = {**tiny_experiment(), "step": {"name": "counts"}}
    table["model"] = {"name": model} | ({"item-bias": True} if model == "privrec" else {})
    table["engine"]["path"] = path
    node = Node(load(table), 0, 1, None)
    assert node.path(node.step(node.experiment.step)).name == path
    found = summed(node)
    assert np.array_equal(found.pop("item.bias")[:, 0], likes(node).sum(0))
    assert not any(change.any() for change in found.values())
    clipped = summed(node, Protection(clip_norm=1.5, order=2, names=("item.bias",)))
    factors = np.minimum(1, 1.5 / np.maximum(np.sqrt(likes(node).sum(1)), 1e-9))
    expected = (likes(node) * factors[:, None]).sum(0)
    assert clipped["item.bias"][:, 0] == pytest.approx(expected, rel=1e-5)


# MAML against its closed form for quadratic losses, and in its limiting cases.

ITEMS, WIDTH, RATE = 12, 3, 0.3
DESIGN = torch.randn(ITEMS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Linear(Model):
    """A rating is a fixed vector of the item times the parameters; the loss is quadratic in
    these."""

    def initial(self, generator):
        return {"w": torch.randn(WIDTH, generator=generator)}

    def predict(self, parameters, users, items, rows=None):
        return torch.einsum("cbd,cd->cb", DESIGN[items], parameters["w"])


def client(number):
    """A client who has rated all items; its optimum is its own."""
    random = np.random.default_rng(number)
    best = random.normal(size=WIDTH)
    ratings = (DESIGN.numpy() @ best).astype(np.float64)
    items = np.arange(ITEMS)
    return ClientData(number, (), items, ratings, items), torch.from_numpy(best)


def step_of(**settings):
    schema = Schema(ITEMS, FeatureTable(ITEMS, ()), (), "rating")
    return Maml(MamlConfig(**settings), Linear(MamlConfig(), schema), torch.device("cpu"))


def curvatures(step, data, seed):
    """Hessians of the mean squared errors of support and query."""
    support, query = step._divided(data, np.random.default_rng(seed))
    rows = [DESIGN[part[0]] for part in (support, query)]
    return [2 * part.T @ part / len(part) for part in rows]


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_gradient_is_the_closed_form(order, steps):
    """(I - a A_s)^k A_q (I - a A_s)^k (x - m); the first order lacks the outer factor."""
    step = step_of(order=order, epochs=steps, learning_rate=RATE)
    start = torch.ones(WIDTH, dtype=torch.float64)
    for number in range(4):
        data, best = client(number)
        support, query = curvatures(step, data, number)
        shrink = torch.linalg.matrix_power(
            torch.eye(WIDTH, dtype=torch.float64) - RATE * support, steps
        )
        wanted = query @ shrink @ (start - best)
        wanted = shrink @ wanted if order == 2 else wanted
        update = update_of(step, {"w": start}, data, np.random.default_rng(number))
        torch.testing.assert_close(update.delta["w"], -wanted)
        block = step.block(
            [()], [step.batches(data, np.random.default_rng(number))], torch.device("cpu")
        )
        together = step.train_block({"w": start}, block)
        torch.testing.assert_close(together.values("w")[0] - start, -wanted, rtol=1e-5, atol=1e-6)


def test_without_adaptation_it_is_a_plain_gradient():
    """a1 = 0: both orders send minus the query's gradient at the start."""
    start, (data, best) = torch.ones(WIDTH, dtype=torch.float64), client(1)
    for order in (1, 2):
        step = step_of(order=order, learning_rate=0.0)
        query = curvatures(step, data, 5)[1]
        found = update_of(step, {"w": start}, data, np.random.default_rng(5)).delta["w"]
        torch.testing.assert_close(found, -query @ (start - best))


def test_without_a_query_it_is_gradient_descent_on_everything():
    """Equal to `sgd` with one batch of all examples."""
    start, (data, best) = torch.ones(WIDTH, dtype=torch.float64), client(2)
    step = step_of(query_share=0.0, epochs=4, learning_rate=RATE)
    curvature = 2 * DESIGN.T @ DESIGN / ITEMS
    shrink = torch.linalg.matrix_power(torch.eye(WIDTH, dtype=torch.float64) - RATE * curvature, 4)
    found = update_of(step, {"w": start}, data, np.random.default_rng(0)).delta["w"]
    torch.testing.assert_close(start + found, best + shrink @ (start - best))


def test_support_and_query_share_no_positive_and_draw_no_positive(load_tiny):
    node = Node(load_tiny("step.name=maml"), 0, 1, None)
    step = node.step(node.experiment.step)
    for number in node.training.tolist():
        data = node.population.client(number)
        support, query = step._divided(data, np.random.default_rng(number))
        liked = [set(items[labels > 0].tolist()) for items, labels in (support, query)]
        drawn = [set(items[labels == 0].tolist()) for items, labels in (support, query)]
        if len(data.positives) < 2:
            assert not len(support[0]) and not len(query[0])
            continue
        assert not liked[0] & liked[1] and liked[0] | liked[1] == set(data.positives.tolist())
        assert not (drawn[0] | drawn[1]) & set(data.positives.tolist())


@pytest.mark.parametrize(("order", "share"), [(1, 0.2), (2, 0.2), (2, 0.0)])
def test_blocks_are_the_reference_on_a_network(load_tiny, order, share):
    """With rates, several steps, and side features; without a query, too."""
    settings = [
        "step.name=maml",
        f"step.order={order}",
        f"step.query-share={share}",
        "step.epochs=2",
        'step.rates={"item.id" = 3.0}',
    ]
    sums = []
    for taken in ("blocks", "reference"):
        node = Node(load_tiny(*settings, f"engine.path={taken}"), 0, 1, None)
        arrays = {name: value.numpy() for name, value in node.initial().items()}
        reply = train_clients(node, arrays, TrainOrder(1, node.training))
        sums.append({name: dense_change(change) for name, change in reply.total.items()})
    for name, value in sums[1].items():
        np.testing.assert_allclose(sums[0][name], value, rtol=1e-4, atol=1e-5)
    assert any(value.any() for value in sums[1].values())


STEP = {"name": "metamf"}
CLIENTS = np.arange(4)


@pytest.fixture
def nodes(load_tiny, world):
    """By path, a node of the four unusual clients of `world`: 1 has an item twice, 2 only a low
    rating, 3 no row."""

    def make(task):
        found = {}
        for path in ("auto", "reference"):
            model = (
                "model={name='metamf', user=3, memory=4, generator=5, embedding=4, rank=2,"
                " hidden=3, user-std=1.0}"
            )
            found[path] = Node(
                load_tiny(f"engine.path={path}", model, "step={name='metamf'}"), 0, 1, None
            )
            found[path].__dict__["population"] = world(task)
        return found

    return make


def message(node, clients=CLIENTS):
    """The message of a server for a round."""
    requests = requested_items(node, ItemQuery(1, clients, "train", STEP))
    values, low = generate(node.initial(), torch.from_numpy(clients), requests)
    return ClientArrays(
        requests, {name: value.numpy() for name, value in values.items()}, {"item.low": low.numpy()}
    )


def order(clients=CLIENTS):
    return TrainOrder(1, clients, step=STEP, each=True)


@pytest.mark.parametrize("task", ["rating", "ranking"])
def test_blocks_give_what_single_clients_give(nodes, task):
    both = nodes(task)
    arrays = message(both["auto"]).arrays()
    got, expected = (train_each(node, arrays, order()) for node in both.values())
    assert got.examples.tolist() == expected.examples.tolist() and (got.examples == 0).any()
    np.testing.assert_allclose(got.losses, expected.losses, rtol=1e-5)
    assert np.isnan(got.losses[got.examples == 0]).all()
    for name, value in expected.updates.arrays().items():
        np.testing.assert_allclose(got.updates.arrays()[name], value, rtol=1e-4, atol=1e-7)
    assert np.abs(got.updates.rows["item.low"]).max() > 1e-4
    assert not any(value[got.examples == 0].any() for value in got.updates.values.values())


def test_rows_that_were_not_requested_are_refused(nodes):
    node = nodes("rating")["auto"]
    arrays = message(node).arrays()
    with pytest.raises(ClientError, match="not those that the clients need"):
        train_each(node, {**arrays, "items": (arrays["items"] + 1) % 6}, order())


def test_evaluation_requests_held_out_items_once(nodes):
    requests = requested_items(
        nodes("rating")["auto"], ItemQuery(1, np.array([1, 0]), "evaluate", STEP)
    )
    assert requests.clients.tolist() == [0, 1]
    assert np.split(requests.items, requests.offsets[1:-1])[0].tolist() == [2, 3]
    assert requests.items[2:].tolist() == [4]


# A client's part in the neighbourhood model against autograd, and against central training.


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


def pnbm_sums(node, arrays, protection=None):
    total = train_clients(node, arrays, TrainOrder(1, node.training, protection=protection)).total
    return {name: dense_change(change) for name, change in total.items()}


def profiles(node):
    rows = node.population.rows(node.training)
    users, items, ratings = rows.ids, rows.items, rows.labels
    data = node.population.interactions
    rated = Ratings(data.num_users, data.num_items, users, items, ratings.astype(np.float64))
    return profiles_of(rated)


def test_the_sum_over_clients_is_the_central_gradient(node):
    node = node(prior=2.0)
    arrays = start_of(node, np.random.default_rng(0))
    found = pnbm_sums(node, arrays)
    examples = Examples(profiles(node), arrays["item.mean"][:, 0].astype(np.float64))
    bounds = Bounds(prior=2.0, low=1.0, high=5.0)
    expected = examples.gradient(
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
        found = dense_change(total[name])
        np.testing.assert_allclose(found, -expected[name].numpy(), atol=1e-5)
        assert found.any()


@pytest.mark.parametrize("model", [{}, {"rank": 2}])
def test_two_steps_are_one_after_the_other(node, model):
    """The second one starts from what the first one moved."""
    node = node(**model)
    arrays = start_of(node, np.random.default_rng(1))
    client = np.array([int(node.training[0])])

    def moved(start, steps):
        order = TrainOrder(1, client, overrides={"epochs": steps, "learning-rate": 0.3})
        total = train_clients(node, start, order).total
        return {name: start[name] + dense_change(total[name]) for name in start}

    once = {name: value.astype(np.float32) for name, value in moved(arrays, 1).items()}
    twice = moved(arrays, 2)
    for name, value in moved(once, 1).items():
        np.testing.assert_allclose(twice[name], value, atol=1e-5)


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
    found = pnbm_sums(node, arrays)
    np.testing.assert_allclose(
        found["item.mean"][:, 0], np.bincount(own.items, (own.values - 3) / 2, 30), atol=1e-5
    )
    assert np.array_equal(found["item.count"][:, 0], np.bincount(own.items, minlength=30))
    assert not found["similarity"].any()
    still = train_clients(node, arrays, TrainOrder(1, node.training, overrides={"epochs": 0})).total
    assert not any(dense_change(change).any() for change in still.values())


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
    slices["similarity"].diagonal(dim1=-2, dim2=-1).fill_(7)  # an item is not its own neighbour
    assert torch.equal(node.model.history_scores(slices, history[None])[0, 0], found)


def test_what_does_not_fit_is_refused(node, tiny_experiment):
    schema = node().model.schema
    with pytest.raises(ExperimentError, match="exceeds the catalogue"):
        Pnbm(PnbmConfig(items=31), schema)
    with pytest.raises(ExperimentError, match="task = 'rating'"):
        Pnbm(PnbmConfig(), type(schema)(30, schema.item_features, (), "ranking"))
    with pytest.raises(ExperimentError, match=r"model\.name = 'pnbm'"):
        other = {**tiny_experiment(), "step": {"name": "pnbm"}}
        pnbm_sums(other := Node(load(other), 0, 1, None), start_of(other))
    with pytest.raises(ExperimentError, match="no item means"):
        other = {**tiny_experiment(), "step": {"name": "rating-sums"}}
        Node(load(other), 0, 1, None).initial()
    with pytest.raises(ExperimentError, match="scale"):
        PnbmConfig.parse({"scale": [5.0, 1.0]})
