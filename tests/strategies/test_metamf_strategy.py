# SPDX-License-Identifier: Apache-2.0
"""Federated meta matrix factorization against central training with dense tables, one-hot products
and autograd."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedrec.data.negatives import draw_negatives
from fedrec.data.population import Population
from fedrec.errors import ClientError, ExperimentError
from fedrec.experiment.loading import load
from fedrec.protocol.client_arrays import ClientArrays
from fedrec.protocol.orders import TrainEach
from fedrec.protocol.zero_copy import from_record
from fedrec.rng import stream, torch_stream
from strategies.per_client.metamf import MetaMfStrategy, MetaMfStrategyConfig
from tests.runs import parameters_in

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


def central_training(table, rounds, optimiser, uniform=False):
    experiment = load(table)
    population = Population.of(experiment)
    schema = population.schema()
    from fedrec.components.registry import MODEL as KIND
    from fedrec.components.registry import resolve

    start = resolve(KIND, "metamf")(experiment.settings(KIND), schema).initial(
        torch_stream(0, "init")
    )
    central = Central(start, schema.num_users, schema.num_items)
    steps = optimiser(central.parameters())
    for number in range(1, rounds + 1):
        users, items, labels = examples(population, number)
        predicted = central(users, items)
        measure = F.mse_loss if population.task == "rating" else F.binary_cross_entropy_with_logits
        losses = measure(predicted, labels, reduction="none")
        counts = torch.bincount(users).float()
        weights = (
            1 / (counts[users] * (counts > 0).sum())
            if uniform
            else torch.full_like(losses, 1 / len(losses))
        )
        steps.zero_grad()
        (losses * weights).sum().backward()
        steps.step()
    return central.values(), {name: value.numpy() for name, value in start.items()}


def federated(table, folder, *overrides):
    from simulations import runner

    return parameters_in(runner.run(table, overrides, output=folder).folder)


def assert_same_moves(got, expected, start, rtol=1e-4):
    for name, value in expected.items():
        moved = np.abs(value - start[name]).max()
        assert moved > 1e-5, name
        np.testing.assert_allclose(
            got[name] - start[name], value - start[name], rtol=rtol, atol=rtol * moved, err_msg=name
        )


@pytest.mark.parametrize("path", ["auto", "reference"])
@pytest.mark.parametrize("task", ["rating", "ranking"])
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_one_round_is_one_central_step(experiment, tmp_path, task, weighting, path):
    table = experiment(task, **{"optimiser": "sgd", "weighting": weighting, "server-lr": 10.0}) | {
        "rounds": 1
    }
    expected, start = central_training(
        table, 1, lambda p: torch.optim.SGD(p, lr=10.0), weighting == "uniform"
    )
    got = federated(table, tmp_path / "run", f"engine.path={path}", "engine.nodes=3")
    assert_same_moves(got, expected, start)


def test_rounds_follow_the_optimiser(experiment, tmp_path):
    table = experiment(**{"weight-decay": 0.01})

    def adam(parameters):
        return torch.optim.Adam(parameters, lr=0.05, weight_decay=0.01)

    expected, start = central_training(table, 3, adam)
    assert_same_moves(federated(table, tmp_path / "run"), expected, start, rtol=2e-3)


def test_some_parameters_do_not_decay(experiment, tmp_path):
    """Adam with a penalty on all but the user embeddings."""
    table = experiment(**{"weight-decay": 0.1, "undecayed": ["user.*"]})

    def optimiser(parameters):
        users, others = [], []
        for parameter in parameters:  # the user embeddings are known by their shape
            (users if parameter.shape == (24, 3) else others).append(parameter)
        assert len(users) == 1
        return torch.optim.Adam(
            [{"params": users}, {"params": others, "weight_decay": 0.1}], lr=0.05
        )

    expected, start = central_training(table, 3, optimiser)
    assert_same_moves(federated(table, tmp_path / "run"), expected, start, rtol=2e-3)


def test_rates_and_annealing(experiment, tmp_path):
    """Each parameter's own rate; the second of two rounds at half the rate."""
    strategy = MetaMfStrategy(MetaMfStrategyConfig(server_lr=0.4, anneal_rounds=2), None, {})
    assert [strategy.config.rate(number) for number in (1, 2, 3, 9)] == [0.4, 0.2, 0, 0]
    table = experiment(optimiser="sgd", rates={"user.id": 3.0, "item.low.*": 0.0}) | {"rounds": 1}
    expected, start = central_training(table, 1, lambda p: torch.optim.SGD(p, lr=0.05))
    got = federated(table, tmp_path / "run")
    moved, plain = got["user.id"] - start["user.id"], expected["user.id"] - start["user.id"]
    np.testing.assert_allclose(moved, 3 * plain, rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(got["item.low.matrix"], start["item.low.matrix"])


def test_nothing_of_the_server_and_nothing_unasked_goes_to_a_node(
    experiment, tmp_path, monkeypatch
):
    """Neither the server's parameters nor rows that a client did not name are in any message."""
    from simulations import runner
    from simulations.engines.serial import SerialGrid

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
                else population.held_out_ratings(client, "test")[0]
            )
            assert own.tolist() == sorted(set(items.tolist()))


def test_gradients_are_weighted_by_examples_and_answers_for_others_refused():
    """The same check for all strategies that ask for each update."""
    generated = ClientArrays.read(
        {
            "clients": np.array([2]), "offsets": np.array([0, 1]), "items": np.array([5]),
            "value/w": -np.ones((1, 3), np.float32), "row/item.low": np.ones((1, 2), np.float32),
        }
    )  # fmt: skip
    nobody: Any = None
    server = MetaMfStrategy(MetaMfStrategyConfig(), nobody, {"name": "metamf"})
    reply = TrainEach(generated, np.array([4]), np.array([0.5]))
    for client, open_ in ((2, set()), (1, {2}), (7, {2})):
        server._open = open_
        other = ClientArrays.read({**generated.arrays(), "clients": np.array([client])})
        with pytest.raises(ClientError, match="other clients"):
            server._aggregate_each(1, [TrainEach(other, np.array([4]), np.array([0.5]))])
    server._made = generated.requests, {"w": torch.zeros(1, 3)}, torch.zeros(1, 2)
    _, (w, low) = server._directions(reply)
    assert w.tolist() == [[1, 1, 1]] and low.tolist() == [[-1, -1]]


def test_differential_privacy_is_refused_with_a_reason(experiment, tmp_path):
    from simulations import runner

    table = experiment() | {"privacy": {"clip-norm": 1.0, "noise-multiplier": 1.0, "delta": 1e-5}}
    with pytest.raises(ExperimentError, match="cannot be made private by") as caught:
        runner.run(table, output=tmp_path / "run")
    assert "each client's gradient separately" in caught.value.got and "perturb" in caught.value.fix


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"split": {"name": "user-holdout"}, "sampler": {"name": "fixed-size", "cohort": 5}},
            "no parameters for some of the test users",
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
    from simulations import runner

    with pytest.raises(ExperimentError, match=message):
        runner.run(experiment() | changes, output=tmp_path / "run")
