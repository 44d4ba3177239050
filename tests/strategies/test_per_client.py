# SPDX-License-Identifier: Apache-2.0
"""Strategies that send each client parameters of its own."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedrec.components import registry
from fedrec.data.client_data import draw_negatives
from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import load
from fedrec.models.personal import MetaMf
from fedrec.protocol.messages import TrainEach
from fedrec.protocol.serialization import from_record
from fedrec.protocol.updates import ClientArrays, ItemRequests
from fedrec.rng import stream, torch_stream
from simulations import runner
from simulations.engines.grid import SerialGrid
from strategies.base import Aggregate
from strategies.per_client import (
    GpfedrecStrategy,
    GpfedrecStrategyConfig,
    MetaMfStrategy,
    MetaMfStrategyConfig,
    _edges,
    _Uploads,
)
from tests.runs import parameters_in

GUIDED = (
    "model={name='gpfedrec', embedding=4, hidden=[6]}",
    "step={name='gpfedrec'}",
    "split={name='leave-one-out'}",
    "evaluation.fine-tune={epochs=0}",
)
TABLES = np.array([[3.0, 4.0], [4.0, 3.0], [0.0, 2.0], [-1.0, 0.0]], dtype=np.float32)
COSINES = np.array(
    [[1.0, 0.96, 0.8, -0.6], [0.96, 1.0, 0.6, -0.8], [0.8, 0.6, 1.0, 0.0], [-0.6, -0.8, 0.0, 1.0]]
)


def strategy(**settings):
    nobody: Any = None
    made = GpfedrecStrategy(GpfedrecStrategyConfig(**settings), nobody, {"name": "gpfedrec"})
    made._theta = {"item.id": np.zeros((2, 1), dtype=np.float32)}
    return made


def answer(clients, change):
    """A node's reply for clients that touched both of two items."""
    wanted = ItemRequests.of(np.array(clients), [np.arange(2)] * len(clients))
    rows = {"item.id": np.asarray(change, dtype=np.float32).reshape(-1, 1)}
    return TrainEach(
        ClientArrays(wanted, {}, rows), np.ones(len(clients), np.int64), np.ones(len(clients))
    )


def cosines(tables):
    units = tables / np.linalg.norm(tables, axis=1, keepdims=True)
    return units @ units.T


def test_neighbours_above_the_mean_similarity_by_hand():
    """The mean of the cosines is 5.92 / 16 = 0.37; with none above the mean the most similar
    remains."""
    third = 1 / 3
    wanted = [[third] * 3 + [0], [third] * 3 + [0], [third] * 3 + [0], [0, 0, 0, 1]]
    np.testing.assert_allclose(_edges(COSINES), wanted)
    np.testing.assert_array_equal(_edges(np.ones((2, 2))), [[1, 0], [1, 0]])


def test_guidance_and_the_shared_step_are_those_of_the_hand_computed_graph():
    """Both items touched by all, one number each: the four users' tables of above."""
    server = strategy()
    for some in ([0, 2], [1, 3]):
        updates = answer(some, TABLES[some])
        server.apply(server._theta, Aggregate({}, 2, 2, 1, updates))
    server._theta = {"item.id": np.zeros((2, 1), dtype=np.float32)}
    everybody = ItemRequests.of(np.array([0, 1, 2, 3, 7]), [np.arange(2)] * 5)
    guide = server.sent(everybody).rows["item.guide"].reshape(5, 2)
    wanted = [[7 / 3, 3.0]] * 3 + [[-1.0, 0.0], [0, 0]]  # nobody knows 7
    np.testing.assert_allclose(guide, wanted, rtol=1e-6)
    rows = server.sent(ItemRequests.of(np.array([2, 7]), [np.array([1]), np.arange(2)]))
    np.testing.assert_allclose(rows.rows["item.guide"][:, 0], [3.0, 0.0, 0.0])
    np.testing.assert_allclose(rows.rows["item.id"], 0.0)


@dataclass
class Tables:
    """What `Uploads` keeps, as whole tables `[items, d]` in float64."""

    limit: int | None
    kept: dict[int, np.ndarray] = field(default_factory=dict)

    def remember(self, requests, values, items):
        ends = requests.offsets[1:-1]
        pairs = zip(np.split(requests.items, ends), np.split(values, ends), strict=True)
        for client, (rows, change) in zip(requests.clients.tolist(), pairs, strict=True):
            self.kept.pop(client, None)
            self.kept[client] = np.zeros((items, values.shape[1]))
            self.kept[client][rows] = change
            if self.limit is not None and len(self.kept) > self.limit:
                del self.kept[next(iter(self.kept))]

    def ordered(self):
        return np.array([self.kept[client] for client in sorted(self.kept)])


def drawn(random, clients, items, width):
    """Requests of some of the clients, and changes: some of nothing, some zero, some the same."""
    chosen = np.flatnonzero(random.random(clients) < random.random())
    if not len(chosen):
        chosen = np.array([random.integers(clients)])
    popular = random.random(items) < random.random()  # nobody changes the others
    shares = random.choice([0.0, 0.3, 0.9, 1.0], size=len(chosen))
    lists = [np.flatnonzero(popular & (random.random(items) < share)) for share in shares]
    requests = ItemRequests.of(chosen, lists)
    values = random.normal(size=(len(requests.items), width)).astype(np.float32)
    values *= random.choice([0.0, 1.0], p=[0.1, 0.9], size=(len(values), 1)).astype(np.float32)
    if random.random() < 0.2:
        values[:] = values[:1]
    return requests, values


def check_a_random_history(seed):
    """Uploads of a few rounds, and all that the server computes from them, against whole tables."""
    random = np.random.default_rng(seed)
    clients, items, width = (int(random.integers(1, most)) for most in (40, 30, 12))
    limit = int(random.integers(1, clients + 1)) if random.random() < 0.5 else None
    kept, tables = _Uploads(limit), Tables(limit)
    for _ in range(random.integers(1, 5)):
        requests, values = drawn(random, clients, items, width)
        kept.remember(requests, values)
        tables.remember(requests, values, items)
        if random.random() < 0.3:
            state = kept.state()
            kept = _Uploads(limit)
            kept.restore(state)
            assert all(np.array_equal(one, state[name]) for name, one in kept.state().items())
    assert kept.state()["clients"].tolist() == list(tables.kept)
    changes, wanted = kept.changes, tables.ordered()
    assert changes is not None and changes.clients.tolist() == sorted(tables.kept)
    start = random.normal(size=(items, width)).astype(np.float32)
    some = random.permutation(len(wanted))[: random.integers(1, len(wanted) + 1)]
    similar = cosines((start + wanted).reshape(len(wanted), -1))[some]
    np.testing.assert_allclose(changes.similarities(some, start), similar, rtol=1e-4, atol=1e-5)
    weights = random.random((len(some), len(wanted))) * (random.random(len(wanted)) < 0.7)
    means = np.einsum("au,uid->aid", weights, wanted)
    np.testing.assert_allclose(changes.mean(weights[0], items), means[0], rtol=1e-4, atol=1e-4)
    lists = [np.flatnonzero(random.random(items) < random.random()) for _ in some]
    found = changes.means_of_rows(weights, ItemRequests.of(np.arange(len(some)), lists))
    rows = np.concatenate([own[rows] for own, rows in zip(means, lists, strict=True)])
    np.testing.assert_allclose(found, rows, rtol=1e-4, atol=1e-4)


def test_random_histories_are_those_of_whole_tables():
    for seed in range(100):
        check_a_random_history(seed)


# Federated meta matrix factorization against central training with dense tables, one-hot products
# and autograd.

MODEL = {
    "name": "metamf",
    "user": 3,
    "memory": 4,
    "generator": 7,
    "embedding": 6,
    "rank": 2,
    "hidden": 5,
}
SPLIT = {"name": "ratio", "train": 0.6, "validation": 0.2, "test": 0.2}


class Central(nn.Module):
    """The published scheme: for each rating, the whole item table of its user is generated and
    multiplied by a one-hot row."""

    def __init__(self, start, users, items):
        super().__init__()
        self.users, self.items = users, items
        self.p = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(v.clone()) for name, v in start.items()}
        )

    def affine(self, inputs, name, *shape):
        p = self.p
        return (inputs @ p[f"{name}/matrix"] + p[f"{name}/offset"]).view(len(inputs), *shape)

    def forward(self, users, items):
        p = self.p
        collaborative = F.one_hot(users, self.users).float() @ p["user/id"] @ p["memory"]
        heads = {
            h: collaborative @ p[f"{h}/hidden/weight"] + p[f"{h}/hidden/bias"]
            for h in ("layer0", "layer1", "item")
        }
        heads = {name: torch.relu(value) for name, value in heads.items()}
        low = (
            torch.einsum("ikh,bh->bik", p["item/low/matrix"], heads["item"]) + p["item/low/offset"]
        )
        tables = low @ self.affine(heads["item"], "item/rise", 2, 6)
        row = F.one_hot(items, self.items).float().unsqueeze(1) @ tables
        first = row @ self.affine(heads["layer0"], "layer0/weight", 6, 5) + self.affine(
            heads["layer0"], "layer0/bias", 1, 5
        )
        last = torch.relu(first) @ self.affine(heads["layer1"], "layer1/weight", 5, 1)
        return (last + self.affine(heads["layer1"], "layer1/bias", 1, 1)).flatten()

    def values(self):
        return {name.replace("/", "."): value.detach().numpy() for name, value in self.p.items()}


@pytest.fixture
def experiment(tiny_experiment):
    """All clients are in each round, so that the cohort is known."""

    def make(task="rating", **strategy):
        table = tiny_experiment() | {
            "task": task,
            "model": MODEL,
            "step": {"name": "metamf"},
            "split": SPLIT,
            "rounds": 3,
        }
        table["strategy"] = {"name": "metamf", "server-lr": 0.05, **strategy}
        table["sampler"]["cohort"] = 24
        table["evaluation"] |= {"every": 0, "fine-tune": {"epochs": 0}}
        if task == "rating":
            del table["positive-above"]
        return table

    return make


def examples(population, round_):
    """All clients' users, items, labels, and the number of each client's examples, as the paper's
    batch."""
    users, items, labels = [], [], []
    for client in population.partition.training_clients.tolist():
        data = population.client(client)
        own, label = data.items, data.labels
        if population.task == "ranking":
            own = own[label > 0]
            random = stream(0, "client", client, round_)
            drawn = draw_negatives(
                data.positives, population.interactions.num_items, 4 * len(own), random
            )
            label = np.concatenate([np.ones(len(own)), np.zeros(len(drawn))])
            own = np.concatenate([own, drawn])
        users += [client] * len(own)
        items.append(own)
        labels.append(label)
    return (
        torch.tensor(users),
        torch.tensor(np.concatenate(items)),
        torch.tensor(np.concatenate(labels)).float(),
    )


def central_training(table, rounds, optimiser):
    experiment = load(table)
    population = Population.of(experiment)
    schema = population.schema()
    start = MetaMf(experiment.settings(registry.MODEL), schema).initial(torch_stream(0, "init"))
    central = Central(start, schema.num_users, schema.num_items)
    steps = optimiser(central.parameters())
    for number in range(1, rounds + 1):
        users, items, labels = examples(population, number)
        predicted = central(users, items)
        measure = F.mse_loss if population.task == "rating" else F.binary_cross_entropy_with_logits
        steps.zero_grad()
        measure(predicted, labels).backward()
        steps.step()
    return central.values(), {name: value.numpy() for name, value in start.items()}


def federated(table, folder, *overrides):
    return parameters_in(runner.run(table, overrides, output=folder).folder)


def assert_same_moves(got, expected, start, rtol=1e-4):
    for name, value in expected.items():
        moved = np.abs(value - start[name]).max()
        assert moved > 1e-5, name
        np.testing.assert_allclose(
            got[name] - start[name], value - start[name], rtol=rtol, atol=rtol * moved, err_msg=name
        )


@pytest.fixture
def plain_descent(monkeypatch):
    """Gradient descent in place of Adam, whose first step shows the signs of gradients alone."""

    def descent(groups, **_):
        return torch.optim.SGD(groups, lr=0.0)

    monkeypatch.setattr("strategies.per_client.Adam", descent)


@pytest.mark.usefixtures("plain_descent")
@pytest.mark.parametrize("path", ["auto", "reference"])
@pytest.mark.parametrize("task", ["rating", "ranking"])
def test_one_round_is_one_central_step(experiment, tmp_path, task, path):
    table = experiment(task, **{"server-lr": 10.0}) | {"rounds": 1}
    expected, start = central_training(table, 1, lambda p: torch.optim.SGD(p, lr=10.0))
    got = federated(table, tmp_path / "run", f"engine.path={path}", "engine.nodes=3")
    assert_same_moves(got, expected, start)


def test_rounds_follow_the_optimiser(experiment, tmp_path):
    table = experiment(**{"weight-decay": 0.01})

    def adam(parameters):
        return torch.optim.Adam(parameters, lr=0.05, weight_decay=0.01)

    expected, start = central_training(table, 3, adam)
    assert_same_moves(federated(table, tmp_path / "run"), expected, start, rtol=2e-3)


@pytest.mark.usefixtures("plain_descent")
def test_rates_and_annealing(experiment, tmp_path):
    """Each parameter's own rate; the second of two rounds at half the rate."""
    strategy = MetaMfStrategy(MetaMfStrategyConfig(server_lr=0.4, anneal_rounds=2), None, {})
    assert [strategy.config.rate(number) for number in (1, 2, 3, 9)] == [0.4, 0.2, 0, 0]
    table = experiment(rates={"user.id": 3.0, "item.low.*": 0.0}) | {"rounds": 1}
    expected, start = central_training(table, 1, lambda p: torch.optim.SGD(p, lr=0.05))
    got = federated(table, tmp_path / "run")
    moved, plain = got["user.id"] - start["user.id"], expected["user.id"] - start["user.id"]
    np.testing.assert_allclose(moved, 3 * plain, rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(got["item.low.matrix"], start["item.low.matrix"])


def test_nothing_of_the_server_and_nothing_unasked_goes_to_a_node(
    experiment, tmp_path, monkeypatch
):
    """Neither the server's parameters nor rows that a client did not name are in any message."""
    sent, submit = [], SerialGrid._submit

    def watch(self, batch):
        sent.extend(message for message in batch if "arrays" in message.content)
        submit(self, batch)

    monkeypatch.setattr(SerialGrid, "_submit", watch)
    table = experiment() | {"rounds": 1}
    population = Population.of(load(table))
    runner.run(table, output=tmp_path / "run")
    kinds = [message.metadata.message_type for message in sent]
    assert kinds.count("train") == 2 and kinds.count("evaluate") >= 2
    for message in sent:
        arrays = from_record(message.content["arrays"])
        assert not any("user.id" in name or "matrix" in name or "memory" in name for name in arrays)
        given = ClientArrays.read(arrays)
        for place, client in enumerate(given.requests.clients.tolist()):
            own = given.requests.items[
                given.requests.offsets[place] : given.requests.offsets[place + 1]
            ]
            train = message.metadata.message_type == "train"
            items = (
                population.client(client).items
                if train
                else population.rows(np.array([client]), "test").items
            )
            assert own.tolist() == sorted(set(items.tolist()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"split": {"name": "user-holdout"}, "sampler": {"name": "fixed-size", "cohort": 5}},
            "no parameters for some test users",
        ),
        ({"strategy": {"name": "reptile"}}, "need parameters that the server generates"),
        ({"step": {"name": "sgd"}}, "cannot start from generated parameters"),
        (
            {"step": {"name": "sgd"}, "strategy": {"name": "reptile"}},
            "need parameters that the server generates",
        ),
        ({"model": {"name": "privrec"}}, "cannot generate parameters"),
    ],
    ids=["unknown users", "other strategy", "other step", "model alone", "other model"],
)
def test_what_does_not_fit_together_is_explained(experiment, tmp_path, changes, message):
    with pytest.raises(ExperimentError, match=message):
        runner.run(experiment() | changes, output=tmp_path / "run")
