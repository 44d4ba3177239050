# SPDX-License-Identifier: Apache-2.0
"""Evaluation on the device: shared or fine-tuned parameters, against scores and metrics by hand."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clients.evaluation import client_scorer, evaluate_clients, mean_metrics
from clients.hosting.node import Node
from clients.training.one_client import private_parameters, update_of
from clients.training.round import train_clients
from fedrec.data.population import Population
from fedrec.data.split import Partition
from fedrec.experiment.loading import load
from fedrec.experiment.sections import Section
from fedrec.protocol.orders import EvaluateOrder, TrainOrder
from fedrec.rng import stream
from tests import systems

_ALS = (
    "model={name='ials', factors=5, moments=true}",
    "step={name='als'}",
    "strategy={name='fed-als'}",
    "evaluation.fine-tune={epochs=1}",
)


@pytest.fixture
def node(tiny_experiment, world, tmp_path):
    def make(*overrides, task="ranking"):
        table = {**tiny_experiment(), "task": task}
        if task == "rating":
            del table["positive-above"]
        experiment = load(
            table, ["evaluation.ks=[1, 2]", "evaluation.inactive-below=2", *overrides]
        )
        made = Node(experiment, 0, 1, tmp_path)
        made.population = world(task)
        return made

    return make


@pytest.fixture
def theta(node):
    """Parameters with which every client scores item i by i: one hidden unit per layer, identity
    throughout."""
    model = node().model
    zeros = {
        name: np.zeros(tuple(v.shape), np.float32)
        for name, v in model.initial(torch.Generator()).items()
    }
    zeros["item.id"][:, 0] = np.arange(6)
    zeros["layer0.weight"][8, 0] = 1  # the input is [gender (4), hobby (4), item (4), genres (4)]
    zeros["layer1.weight"][0, 0] = 1
    return zeros


def metrics_of(*given):
    return evaluate_clients(*given).table


def order(*clients, **step):
    return EvaluateOrder(
        1, np.array(clients) if clients else None, {"name": "sgd", **step} if step else None
    )


def test_metrics_of_known_scores(node, theta):
    """Item 5 ranks first for all clients. Held out: 2 of client 0 (never seen: 4, 5), 4 of client 1
    (2, 3, 5), 0 of client 2."""
    table = metrics_of(node(), theta, order(epochs=0))
    assert table.index.tolist() == [0, 1, 2]
    assert table["hits@1"].tolist() == [0, 0, 0]
    assert table["hits@2"].tolist() == [0, 1, 0]
    np.testing.assert_allclose(table["discounted-hits@2"], [0, 1 / np.log2(3), 0])
    # Whole lists exclude known items: of 5 4 3 2 item 2 is fourth for client 0; item 4 is second
    # for client 1.
    np.testing.assert_allclose(table["mrr"], [1 / 4, 1 / 2, 1 / 5])


def test_whole_lists_leave_out_known_items(node, theta):
    """With item i scored by -i, the known items 0 and 1 of client 0 would be first; 2 is held
    out."""
    theta["item.id"] = -theta["item.id"]
    theta["layer0.bias"] = theta["layer0.bias"] + 10  # hidden units stay positive
    assert metrics_of(node(), theta, order(epochs=0)).loc[0, "mrr"] == 1


def test_a_held_out_item_that_is_also_known_is_in_no_whole_list(node, theta):
    """Client 1 used item 1 again: a hit is possible, but no whole list can contain the item."""
    made = node()
    part = made.population.partition
    made.population = Population(
        made.population.interactions,
        Partition(part.training_clients, np.array([0, 1, 4, 9]), np.array([8]), np.array([5])),
        task="ranking",
        positive_above=3.0,
    )
    (row,) = metrics_of(made, theta, order(1, epochs=0)).to_dict("records")
    assert np.isnan(row["mrr"]) and np.isnan(row["recall@1"]) and not np.isnan(row["hits@1"])


def test_groups_are_columns_of_zeros_and_ones(node, theta):
    table = metrics_of(node(), theta, order(epochs=0))
    assert table["group:inactive"].tolist() == [0, 0, 1]
    assert table["group:active"].tolist() == [1, 1, 0]
    assert table["group:gender=F"].tolist() == [1, 0, 1]
    assert table["group:gender=M"].tolist() == [0, 1, 0]


def test_fine_tuning_scores_with_each_clients_own_parameters(node):
    """Fine-tuned scores equal those of the step's result on that client alone."""
    made = node("step.learning-rate=0.5")
    theta = {n: v.numpy() for n, v in made.model.initial(torch.Generator().manual_seed(3)).items()}
    parameters = {name: torch.from_numpy(value) for name, value in theta.items()}
    table = metrics_of(made, theta, order(epochs=3, **{"learning-rate": 0.5}))
    step = made.step(Section.model_validate({"name": "sgd", "epochs": 3, "learning-rate": 0.5}))
    for client in (0, 1, 2):
        drawn = stream(made.experiment.seed, "fine-tune", client, 1)
        delta = update_of(step, parameters, made.population.client(client), drawn).delta
        own = {name: (value + delta[name]).unsqueeze(0) for name, value in parameters.items()}
        users = tuple(
            torch.from_numpy(codes) for codes in made.population.feature_codes(np.array([client]))
        )
        scores = made.model.scores(own, users)[0].numpy()
        held_out = made.population.held_out(np.array([client]), "test")
        ranked = [item for item in np.argsort(-scores) if not held_out.known[0, item]]
        first = next(place for place, item in enumerate(ranked, 1) if held_out.relevant[0, item])
        assert table.loc[client, "mrr"] == pytest.approx(1 / first)


def test_private_parameters_take_part_in_the_evaluation(node, theta):
    """After client 2 was trained, its private output bias enters its scores, and no other
    client's."""
    made = node("step.private-parameters=['layer1.bias']", task="rating")
    before = metrics_of(made, theta, order(epochs=0, **{"private-parameters": ["layer1.bias"]}))
    train_clients(made, theta, TrainOrder(1, np.array([2])))
    after = metrics_of(made, theta, order(epochs=0, **{"private-parameters": ["layer1.bias"]}))
    changed = (before["mae"] != after["mae"]).to_dict()
    assert changed == {0: False, 1: False, 2: True, 3: False}


def test_scores_with_private_parameters_are_those_of_each_client(node, theta):
    private = {"private-parameters": ["layer1.bias", "layer0.weight"]}
    made = node(f"step.private-parameters={private['private-parameters']}")
    train_clients(made, theta, TrainOrder(1, np.array([1, 2])))
    step = made.step(Section.model_validate({"name": "sgd", "epochs": 0, **private}))
    parameters = {name: torch.from_numpy(value) for name, value in theta.items()}
    clients = np.arange(4)
    found = client_scorer(made, step, parameters, 1)(clients)
    kept = private_parameters(made, step, parameters, clients, 2)
    assert not torch.equal(kept["layer1.bias"][1], kept["layer1.bias"][0])
    codes = [torch.from_numpy(table) for table in made.population.feature_codes(clients)]
    for place in clients:
        own = {name: value[None] for name, value in parameters.items()}
        own |= {name: value[place : place + 1] for name, value in kept.items()}
        alone = made.model.scores(own, tuple(table[place : place + 1] for table in codes))
        torch.testing.assert_close(found[place], alone[0])


def test_rating_errors_of_known_predictions(node, theta):
    """Predictions are item numbers. Client 0: items 2, 3 rated 4, 1; client 1: 4, 4 rated 5, 5;
    client 2: 0 rated 5."""
    table = metrics_of(node(task="rating"), theta, order(epochs=0))
    np.testing.assert_allclose(table["mae"], [2, 1, 5, 0])
    np.testing.assert_allclose(table["rmse"], [2, 1, 5, 0])
    assert table["rows"].tolist() == [2, 2, 1, 1]


def test_means_leave_groups_out(node, theta):
    metrics = mean_metrics(evaluate_clients(node(), theta, order(epochs=0)))
    assert metrics["num-examples"] == 3 and metrics["hits@2"] == pytest.approx(1 / 3)
    assert not [name for name in metrics if name.startswith("group:")]


def test_equal_features_are_scored_once(node, monkeypatch):
    """Whatever the parts that clients are asked for in, and as each would be alone."""
    made = node()
    drawn = torch.Generator().manual_seed(3)
    parameters = {
        name: torch.randn(value.shape, generator=drawn)
        for name, value in made.model.initial(torch.Generator()).items()
    }
    forward = made.model.scores
    rows = []

    def counted(slices, users):
        rows.append(len(users[0]))
        return forward(slices, users)

    monkeypatch.setattr(made.model, "scores", counted)
    step = made.step(Section(name="sgd", epochs=0))
    scores_of = client_scorer(made, step, parameters, 1)
    slices = {name: value[None] for name, value in parameters.items()}
    for clients in (np.array([0, 1]), np.array([1, 2]), np.array([2, 0, 1])):
        users = tuple(torch.from_numpy(t) for t in made.population.feature_codes(clients))
        wanted = torch.cat(
            [forward(slices, tuple(t[[n]] for t in users)) for n in range(len(clients))]
        )
        torch.testing.assert_close(scores_of(clients), wanted)
    assert sum(rows) == 3


class _Largest(TorchDispatchMode):
    """Size of the largest tensor that an operation makes, views of its arguments aside."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        memory = {one.untyped_storage().data_ptr() for one in given}
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in memory:
                self.numbers = max(self.numbers, one.numel())
        return found


@pytest.mark.parametrize(
    ("system", "task"),
    [
        (_ALS, "ranking"),
        (systems.MF, "ranking"),
        (systems.MF, "rating"),
        (systems.FEDNCF, "ranking"),
        (systems.FEDNCF, "rating"),
        (systems.PFEDREC, "ranking"),
        (systems.FEDRAP, "ranking"),
    ],
)
def test_no_table_of_the_catalogue_is_copied_for_a_client(
    tiny_experiment, tmp_path, monkeypatch, system, task
):
    """Each is scored from what it keeps itself and the shared tables."""
    monkeypatch.setattr("fedrec.models.base._SCORED_AT_ONCE", 2)
    table = {**tiny_experiment(), "task": task}
    if task == "rating":
        del table["positive-above"]
    made = Node(load(table, ["dataset.items=400", *system]), 0, 1, tmp_path)
    theta = {name: value.numpy() for name, value in made.initial().items()}
    clients = made.training[:3]
    train_clients(made, theta, TrainOrder(1, clients))
    step = made.step(made.experiment.fine_tune_step())
    parameters = made.initial()
    tables = [parameters[name] for name in made.model.item_tables]
    smallest = min(value.numel() for value in tables if value.shape[1] > 1)
    with _Largest() as largest:
        if task == "rating":
            evaluate_clients(made, theta, EvaluateOrder(1, clients))
        else:
            scores_of = client_scorer(made, step, parameters, 1)
            for client in clients:
                scores_of(np.array([client]))
    assert largest.numbers < smallest
