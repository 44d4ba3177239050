# SPDX-License-Identifier: Apache-2.0
"""Local SGD, also with a profile, and sums without training."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from clients.blocks import train_in_blocks, update_of
from clients.evaluation import client_scorer
from clients.node import Node
from clients.round import train_clients
from clients.step import private_names
from clients.steps.sgd import Sgd, SgdConfig
from fedrec.data.client_data import draw_negatives
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import load
from fedrec.models.privrec import PrivRec, PrivRecConfig
from fedrec.privacy.clipping import Protection
from fedrec.protocol.messages import TrainOrder, pack_sum, read_arrays
from fedrec.protocol.updates import dense_change, network_bytes
from fedrec.rng import stream, torch_stream

# Local SGD against `torch.optim.SGD` on plain modules, and its selection of examples.

PARTS = {
    "rates": {"item.id": 20.0, "user.gender": 0.0, "layer0.*": 0.5},
    "late_parameters": ("item.id",),
}


@pytest.fixture
def make(world):
    """A step with these settings, the parameters it starts from, and the population."""

    def step(task="ranking", **settings):
        population = world(task)
        model = PrivRec(PrivRecConfig(embedding=3, hidden=(5,)), population.schema())
        parameters = model.initial(torch.Generator().manual_seed(1))
        return Sgd(SgdConfig(**settings), model, torch.device("cpu")), parameters, population

    return step


def expected_factor(config, name, epochs_left):
    """The documented factors of the two cases below, by name instead of by pattern."""
    if not config.rates:
        return 1.0
    if name == "item.id":
        return 20.0 if epochs_left == 1 else 0.0
    return {"user.gender": 0.0, "layer0.weight": 0.5, "layer0.bias": 0.5}.get(name, 1.0)


def by_torch(plain, config, data, batches):
    """Train the plain module with torch's own optimiser; returns the mean loss of the last
    epoch."""
    anchor = {name: value.detach().clone() for name, value in plain.values.items()}
    groups = [{"params": [value], "name": name} for name, value in plain.values.items()]
    optimiser = torch.optim.SGD(groups, config.learning_rate)
    users = [torch.from_numpy(codes) for codes in data.features]
    for number, epoch in enumerate(batches):
        losses = []
        for group in optimiser.param_groups:
            group["lr"] = config.learning_rate * expected_factor(
                config, group["name"], config.epochs - number
            )
        for items, labels in epoch:
            predicted = plain(users, torch.from_numpy(items))
            loss = nn.functional.binary_cross_entropy_with_logits(
                predicted, torch.from_numpy(labels)
            )
            losses.append(loss.item())
            pull = sum(
                (plain.values[name] - value).square().sum() for name, value in anchor.items()
            )
            optimiser.zero_grad()
            (loss + config.proximal_mu / 2 * pull).backward()
            optimiser.step()
    return np.mean(losses)


def expected_batches(config, items, labels, positives, random):
    """The batches as documented: positives then their negatives, one pool per round, one
    shuffle per epoch."""
    drawn = draw_negatives(positives, 6, config.negatives * int(labels.sum()), random)
    pool = (
        np.concatenate([items, drawn]),
        np.concatenate([labels, np.zeros(len(drawn), np.float32)]),
    )
    for _ in range(config.epochs):
        order = random.permutation(len(pool[0]))
        parts = [
            order[start : start + config.batch_size]
            for start in range(0, len(order), config.batch_size)
        ]
        yield [(pool[0][part], pool[1][part]) for part in parts]


@pytest.mark.parametrize(
    "settings", [{}, {"proximal_mu": 0.7}, PARTS, {**PARTS, "proximal_mu": 0.05}]
)
def test_update_equals_torchs_optimiser_on_the_same_batches(make, torch_privrec, settings):
    step, parameters, population = make(epochs=3, batch_size=4, learning_rate=0.2, **settings)
    data = population.client(1)
    got = update_of(step, parameters, data, stream(0, "client", 1, 1))
    plain = torch_privrec(step.model, parameters)
    batches = expected_batches(
        step.config, data.items, data.labels, data.positives, stream(0, "client", 1, 1)
    )
    loss = by_torch(plain, step.config, data, list(batches))
    for name, value in plain.values.items():
        torch.testing.assert_close(
            got.delta[name], value.detach() - parameters[name], rtol=1e-5, atol=1e-6
        )
    assert got.examples == 10 and got.loss == pytest.approx(loss, rel=1e-5)
    assert any(delta.abs().max() > 1e-3 for delta in got.delta.values())


def pools(step, data):
    """The examples of each epoch, largest label first and then by item."""
    drawn = step.batches(data, stream(0, "client", 0, 1))
    sizes = np.arange(drawn.items.shape[1]) < drawn.sizes[:, None]
    parts = np.split(np.arange(len(drawn.sizes)), step.config.epochs)
    epochs = [(drawn.items[part][sizes[part]], drawn.labels[part][sizes[part]]) for part in parts]
    orders = [np.lexsort((items, -labels)) for items, labels in epochs]
    return [
        (items[order], labels[order]) for (items, labels), order in zip(epochs, orders, strict=True)
    ]


def test_negatives_are_drawn_once_per_round(make):
    step, _, population = make(epochs=4, negatives=20)
    assert len({items.tobytes() for items, _ in pools(step, population.client(0))}) == 1


def test_negatives_are_outside_the_training_positives_only(make):
    """Items 0 and 4 of client 1 are held out; item 1 is its training positive, in two rows."""
    step, _, population = make(epochs=1, negatives=200)
    ((items, labels),) = pools(step, population.client(1))
    assert (labels == 1).sum() == 2 and (labels == 0).sum() == 400
    assert set(items[labels == 1]) == {1} and set(items[labels == 0]) == {0, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("low_rated", "client", "expected"),
    [
        ("ignore", 0, [(0, 1)]),
        ("negative", 0, [(0, 1), (1, 0)]),
        ("ignore", 2, []),
        ("negative", 2, [(5, 0)]),
    ],
)
def test_low_rated_rows_are_left_out_or_negative(make, low_rated, client, expected):
    step, parameters, population = make(epochs=1, negatives=0, low_rated=low_rated)
    data = population.client(client)
    ((items, labels),) = pools(step, data)
    assert list(zip(items.tolist(), labels.tolist(), strict=True)) == expected
    update = update_of(step, parameters, data, stream(0, "client", client, 1))
    assert update.examples == len(expected) and np.isnan(update.loss) == (not expected)


def test_ratings_are_learned_without_negatives(make):
    step, _, population = make("rating", epochs=1)
    ((items, labels),) = pools(step, population.client(0))
    assert items.tolist() == [0, 1] and labels.tolist() == [5, 2]


@pytest.mark.parametrize(
    "settings",
    [
        {"rates": {"item.ids": 2.0}},
        {"late_parameters": ("layer7.*",)},
        {"rates": {"layer*": 1.0, "layer7*": 1.0}},
    ],
)
def test_a_pattern_that_fits_nothing_is_refused(make, settings):
    step, parameters, population = make(**settings)
    with pytest.raises(ExperimentError, match=r"item\.ids|layer7"):
        update_of(step, parameters, population.client(0), stream(0, "client", 0, 1))


def test_a_parameter_that_fits_two_patterns_is_refused(make):
    """The keys of a table may be reordered, so no rule of precedence would be reliable."""
    step, parameters, population = make(rates={"layer*": 0.5, "layer0.*": 2.0})
    with pytest.raises(ExperimentError, match=r"layer0\.weight.*more than one"):
        update_of(step, parameters, population.client(0), stream(0, "client", 0, 1))


def test_private_names_are_patterns(make):
    step, parameters, _ = make(private_parameters=("layer1.*", "user.gender"))
    assert private_names(step, parameters) == ["user.gender", "layer1.weight", "layer1.bias"]
    assert private_names(make()[0], parameters) == []


WEIGHT = 12.0
STEP = {"epochs": 2, "batch-size": 16, "negatives": 3, "learning-rate": 0.2}
PATHS = ("kernel", "blocks", "reference")


@pytest.fixture
def node(tiny_experiment, tmp_path):
    """A node whose model has a profile, or none."""

    def make(path="auto", profile=True, **step):
        model = {"name": "privrec", "embedding": 4, "hidden": [5]}
        own = {"model": model, "step": {"name": "sgd", **STEP, **step}}
        if profile:
            own["model"] |= {"name": "privrec-profile"}
            own["step"]["name"] = "sgd-profile"
        table = tiny_experiment() | own
        table["evaluation"]["fine-tune"] = {"epochs": 2}
        table["engine"]["path"] = path
        return Node(load(table), 0, 1, tmp_path / path)

    return make


def sums(one):
    """What the clients of a round send together, as whole arrays."""
    arrays = {name: value.numpy() for name, value in one.initial().items()}
    reply = train_clients(one, arrays, TrainOrder(1, one.training))
    return {name: dense_change(change) for name, change in reply.total.items()}


def cosines_by_hand(table, positives):
    """The cosines of all items with the sum of the directions of some."""
    units = table / np.linalg.norm(table, axis=1, keepdims=True)
    total = units[positives].sum(0)
    return units @ total / np.linalg.norm(total)


@pytest.mark.parametrize("path", PATHS)
def test_what_is_sent_is_what_plain_sgd_sends(node, path):
    """A profile changes neither the local work nor the message."""
    found = sums(node(path, rates={"item.id": 3.0}))
    assert not found.pop("profile").any()
    wanted = sums(node(path, profile=False, rates={"item.id": 3.0}))
    assert found.keys() == wanted.keys() and wanted["item.id"].any()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize("path", PATHS)
def test_scores_are_the_tuned_network_and_cosines_of_the_tuned_embeddings(node, path):
    one, plain = node(path), node(path, profile=False)
    start, clients = one.initial(), one.evaluated[:4]
    step = one.step(one.experiment.fine_tune_step())
    found = client_scorer(one, step, start, 1)(clients)
    without = {name: value for name, value in start.items() if name != "profile"}
    sgd = plain.step(plain.experiment.fine_tune_step())
    assert type(sgd) is Sgd
    network = client_scorer(plain, sgd, without, 1)(clients)
    for place, client in enumerate(clients.tolist()):
        data = one.population.client(client)
        tuned = update_of(sgd, without, data, _stream(one, client)).delta["item.id"]
        table = (start["item.id"] + tuned).double().numpy()
        wanted = network[place].numpy() + WEIGHT * cosines_by_hand(table, data.positives)
        np.testing.assert_allclose(found[place], wanted, atol=2e-4)


@pytest.mark.parametrize("path", PATHS)
def test_the_shared_model_has_no_term(node, path):
    """Without fine-tuning nobody has a profile."""
    one, plain = node(path, epochs=0), node(path, profile=False, epochs=0)
    start, clients = one.initial(), one.evaluated
    scores = client_scorer(one, one.step(one.experiment.step), start, 1)(clients)
    del start["profile"]
    wanted = client_scorer(plain, plain.step(plain.experiment.step), start, 1)(clients)
    torch.testing.assert_close(scores, wanted)


def _stream(one, client):
    return stream(one.experiment.seed, "fine-tune", client, 1)


# Statistics of many clients at once: the same updates, norms and sums as client by client.

STEPS = [
    {"name": "counts"},
    {"name": "counts", "low-rated": 0.3},
    {"name": "gram"},
    {"name": "gram", "low-rated": 0.3, "exponent": 0.4},
    {"name": "gram", "epochs": 0},
    {"name": "transitions", "exponent": 0.4},
    {"name": "transitions", "epochs": 0},
]


@pytest.fixture(params=STEPS, ids=str)
def statistics_node(request, tiny_experiment):
    """A node whose model has fewer products than there are items, and biases that scale them."""
    ordered = request.param["name"] == "transitions"
    model = {"name": "transitions" if ordered else "item-weights", "items": 20}
    return Node(load({**tiny_experiment(), "model": model, "step": request.param}), 0, 1, None)


@pytest.fixture
def parameters(statistics_node):
    found = statistics_node.model.initial(torch_stream(0, "init"))
    biases = torch.rand(found["item.bias"].shape, generator=torch_stream(1, "biases"))
    return {**found, "item.bias": biases}


def updates(node, parameters):
    """Each client's update by the reference, `[C]` dictionaries."""
    step = node.step(node.experiment.step)
    clients = [node.population.client(client) for client in node.training.tolist()]
    return [update_of(step, parameters, data, stream(0, "x")) for data in clients]


def whole(node, parameters):
    step = node.step(node.experiment.step)
    found = list(
        train_in_blocks(node, step, node.path(step), parameters, node.training, "client", 1)
    )
    ((places, outcome),) = found
    assert places == list(range(len(node.training)))
    return outcome


def test_noise_of_clients_on_products_is_the_symmetric_part_of_noise_on_squares(
    statistics_node, parameters
):
    """A function of squares that have noise on every number, and of no more than these. An entry
    beside the diagonal is the mean of two of them; without products the sum has them all."""
    arrays = {name: value.numpy() for name, value in parameters.items()}
    names = tuple(name for name in arrays if arrays[name].ndim == 2)
    protection = Protection(2.0, 2, names, noise_scale=0.5)
    order = TrainOrder(1, statistics_node.training, protection=protection)
    reply = train_clients(statistics_node, arrays, order)
    clipped = train_clients(
        statistics_node, arrays, replace(order, protection=replace(protection, noise_scale=0.0))
    )
    noise = {name: np.zeros(arrays[name].shape) for name in names}
    for client in statistics_node.training.tolist():
        own = protection.noisy(
            {name: np.zeros_like(one) for name, one in noise.items()},
            statistics_node.noise,
            1,
            client,
        )
        noise = {name: one + own[name] for name, one in noise.items()}
    expected = {name: dense_change(clipped.total[name]) + one for name, one in noise.items()}
    products = expected["item.weights"]
    if statistics_node.experiment.step.name == "gram":
        expected["item.weights"] = (products + products.T) / 2
    for name, one in expected.items():
        np.testing.assert_allclose(reply.total[name], one, rtol=0, atol=1e-4)
    assert network_bytes(read_arrays(pack_sum(reply))) * reply.clients == reply.sent


def test_each_update_is_the_reference(statistics_node, parameters):
    outcome, expected = (whole(statistics_node, parameters), updates(statistics_node, parameters))
    assert list(outcome.block.examples) == [one.examples for one in expected]
    assert np.isnan(outcome.losses()).all()
    for place, one in enumerate(expected):
        own = outcome.parameters_of(place)
        for name, delta in one.delta.items():
            assert torch.allclose(own[name][0] - parameters[name], delta, atol=1e-6), name
    sent = statistics_node.experiment.step.options.get("epochs", 1)
    assert any(delta.any() for one in expected for delta in one.delta.values()) == bool(sent)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("names", [None, ["item.weights"], ["item.bias"]])
def test_norms_are_those_of_the_updates(statistics_node, parameters, order, names):
    found = whole(statistics_node, parameters).norms(names, order)
    for norm, one in zip(found.tolist(), updates(statistics_node, parameters), strict=True):
        chosen = [d for name, d in one.delta.items() if names is None or name in names]
        flat = torch.cat([delta.flatten() for delta in chosen]).double()
        assert norm == pytest.approx(float(torch.linalg.vector_norm(flat, order)), rel=1e-6)


def test_a_round_gives_the_reference_sum_with_and_without_clipping(statistics_node, parameters):
    arrays = {name: value.numpy() for name, value in parameters.items()}
    clip = Protection(clip_norm=1.5, order=2, names=tuple(parameters))
    for protection in (None, clip):
        order = TrainOrder(1, statistics_node.training, protection=protection)
        total = train_clients(statistics_node, arrays, order).total
        for name, change in total.items():
            expected = np.zeros(arrays[name].shape)
            for one in updates(statistics_node, parameters):
                flat = torch.cat([delta.flatten() for delta in one.delta.values()]).double()
                norm = float(torch.linalg.vector_norm(flat))
                factor = min(1.0, 1.5 / max(norm, 1e-12)) if protection else 1.0
                expected += factor * one.delta[name].double().numpy()
            assert dense_change(change) == pytest.approx(expected, abs=1e-4)
