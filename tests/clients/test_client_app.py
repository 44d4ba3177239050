# SPDX-License-Identifier: Apache-2.0
"""A node's ClientApp: messages, training and evaluation."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clients.app import app, node_of
from clients.blocks import private_parameters, train_in_blocks, update_of
from clients.evaluation import client_scorer, evaluate_clients
from clients.node import Node, TrainingPath
from clients.round import only_reads, train_clients
from clients.step import Step
from clients.steps.descent import Update, one_by_one
from clients.steps.sgd import Sgd, SgdConfig
from fedrec.components.sections import Section
from fedrec.data.population import Population
from fedrec.data.splits.rules import Partition
from fedrec.errors import ClientError, ComponentError, DataError
from fedrec.evaluation.tables import Evaluated
from fedrec.experiment.schema import load
from fedrec.models.mf import Mf
from fedrec.protocol.messages import (
    INITIAL,
    EvaluateOrder,
    TrainOrder,
    pack_order,
    read_arrays,
    unpack_sum,
    unpack_table,
)
from fedrec.protocol.serialization import to_record
from fedrec.protocol.updates import dense_change
from fedrec.rng import stream, torch_stream
from simulations import runner
from simulations.engines.grid import SerialGrid, contexts_of
from tests import systems
from tests.runs import assert_close

# The ClientApp: replies in fedrec's form to orders that name clients, and in Flower's form to
# others.


@pytest.fixture
def ask(load_tiny, identity):
    """Sends a message to node 1 of 2 and returns the content of its reply."""
    run_config = {"resolved": load_tiny().model_dump_json(), "output": ""}
    context = Context(1, 3, {"partition-id": 1, "num-partitions": 2}, RecordDict(), run_config)

    def send(content, message_type="train"):
        return app(Message(content, 3, message_type), context).content

    send.node = node_of(context)
    return send


@pytest.fixture
def theta(ask):
    return {name: array.copy() for name, array in read_arrays(ask(RecordDict(), INITIAL)).items()}


def order(theta, **config):
    return RecordDict(
        {"arrays": to_record(theta), "config": ConfigRecord({"server-round": 1, **config})}
    )


def updates(node, theta, **settings):
    """Each hosted client's update and number of examples, one step after the other."""
    own = node.experiment.step
    step = node.step(Section.model_validate({"name": own.name, **own.options, **settings}))
    parameters = {name: torch.from_numpy(array.copy()) for name, array in theta.items()}
    found = [
        update_of(step, parameters, node.population.client(one), stream(0, "client", one, 1))
        for one in node.training.tolist()
    ]
    return [
        ({n: d.numpy().astype(np.float64) for n, d in u.delta.items()}, u.examples, u.loss)
        for u in found
    ]


class MySgd(Sgd):
    """The built-in step in another module."""


class MyMf(Mf):
    """The built-in model in another module."""


def test_only_what_is_no_plug_in_may_read_memory_that_others_read_too(ask, load_tiny):
    order = TrainOrder(1, ask.node.training)
    assert only_reads(ask.node, order)
    assert not only_reads(ask.node, replace(order, step={"name": f"{__name__}:MySgd"}))
    for plug_in in (f"step.name={__name__}:MySgd", f"model.name={__name__}:MyMf"):
        assert not only_reads(Node(load_tiny(plug_in), 0, 1, None), order)
    # its reply contains the parameters themselves
    assert not only_reads(ask.node, replace(order, clients=None))


def test_initial_parameters_are_those_of_the_experiments_seed(ask, theta):
    fresh = ask.node.model.initial(torch_stream(0, "init"))
    assert list(theta) == list(fresh)
    assert all(np.array_equal(theta[name], value.numpy()) for name, value in fresh.items())


def test_named_clients_are_answered_with_the_sum_of_their_updates(ask, theta):
    clients = ask.node.training[:3]
    reply = unpack_sum(ask(pack_order(TrainOrder(1, clients), to_record(theta))))
    expected = updates(ask.node, theta)[:3]
    assert reply.clients == 3
    assert reply.weight == 3
    assert reply.examples == sum(n for _, n, _ in expected)
    assert reply.loss == pytest.approx(sum(loss for *_, loss in expected))
    for name, total in reply.total.items():
        wanted = sum(delta[name] for delta, *_ in expected)
        # of three clients' parameters
        rounding = 3 * 4 * np.finfo(np.float32).eps * np.abs(theta[name]).max()
        np.testing.assert_allclose(total, wanted, rtol=1e-5, atol=rounding)


def test_an_order_without_clients_is_answered_with_the_weighted_mean_of_all(ask, theta):
    content = ask(order(theta))
    expected = updates(ask.node, theta)
    weight = sum(examples for _, examples, _ in expected)
    arrays = read_arrays(content)
    for name, value in theta.items():
        mean = value + sum(examples * delta[name] for delta, examples, _ in expected) / weight
        np.testing.assert_allclose(arrays[name], mean, rtol=1e-5, atol=1e-6 * np.abs(mean).max())
        assert arrays[name].dtype == np.float32
    (metrics,) = content.metric_records.values()
    assert metrics["num-examples"] == weight
    assert metrics["loss"] == pytest.approx(np.mean([loss for *_, loss in expected]))


def test_the_proximal_term_that_fedprox_sends_is_honoured(ask, theta):
    """The proximal term is zero in the first gradient step; batches of 8 give several steps."""
    sent = read_arrays(ask(order(theta, **{"proximal-mu": 0.9})))
    expected = updates(ask.node, theta, **{"proximal-mu": 0.9})
    weight = sum(examples for _, examples, _ in expected)
    plain = read_arrays(ask(order(theta)))
    for name, value in theta.items():
        mean = value + sum(examples * delta[name] for delta, examples, _ in expected) / weight
        np.testing.assert_allclose(sent[name], mean, rtol=1e-5, atol=1e-6 * np.abs(mean).max())
    assert any(not np.allclose(sent[name], plain[name], rtol=1e-4, atol=1e-6) for name in theta)


def test_a_step_in_the_order_replaces_the_experiments_own(ask, theta):
    table = {"name": "sgd", "epochs": 0}
    clients = ask.node.training
    reply = unpack_sum(ask(pack_order(TrainOrder(1, clients, "uniform", table), to_record(theta))))
    assert not any(dense_change(c).any() for name, c in reply.total.items())
    assert reply.losses == 0


def test_named_clients_are_evaluated_one_row_each(ask, theta):
    clients = ask.node.evaluated[::-1]
    order = EvaluateOrder(1, clients, None)
    table = Evaluated(*unpack_table(ask(pack_order(order, to_record(theta)), "evaluate"))).table
    assert table.index.tolist() == sorted(clients.tolist())
    assert {"hits@5", "discounted-hits@5", "mrr", "group:active", "group:inactive"} <= set(
        table.columns
    )


def test_evaluation_in_standard_form_is_the_mean_over_all(ask, theta):
    content = ask(order(theta), "evaluate")
    (metrics,) = content.metric_records.values()
    everyone = EvaluateOrder(1, ask.node.evaluated, None)
    reply = ask(pack_order(everyone, to_record(theta)), "evaluate")
    table = Evaluated(*unpack_table(reply)).table
    assert metrics["num-examples"] == len(table) == len(ask.node.evaluated)
    assert not content.array_records
    assert metrics["hits@5"] == pytest.approx(table["hits@5"].mean())
    assert not [name for name in metrics if name.startswith("group:")]


def test_our_client_app_under_a_stock_server_app(load_tiny, tmp_path):
    """`strategy.start` as in Flower's documentation: two rounds of FedAvg, evaluation included."""
    settled = runner.settle(load_tiny("engine.nodes=3"))
    grid = SerialGrid(app, contexts_of(settled.model_dump_json(), str(tmp_path / "run"), 3))
    theta = Node(settled, 0, 1, None).initial()
    strategy = FlowerFedAvg(fraction_train=1.0, fraction_evaluate=1.0, min_available_nodes=3)
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(dict(theta)), num_rounds=2)
    final = {name: array.numpy() for name, array in result.arrays.items()}
    assert set(final) == set(theta) and all(np.isfinite(value).all() for value in final.values())
    assert any(not np.array_equal(final[name], theta[name].numpy()) for name in theta)
    assert set(result.train_metrics_clientapp) == {1, 2}
    assert "hits@5" in result.evaluate_metrics_clientapp[2]
    ours = runner.run(
        settled,
        ["strategy.name=flwr.serverapp.strategy:FedAvg", "strategy.min-available-nodes=3"],
        output=tmp_path / "o",
    )
    assert_close(final, ours.parameters, rtol=1e-5, atol=1e-6)


# A training round on one node: sums, weights, errors, and private state.

THETA = {"w": np.array([1, 2], np.float32), "own": np.array([10], np.float32)}


class Scripted(Step):
    """Client c has c examples and moves `w` by (c, -c) and `own` by 1; client 0 has no examples."""

    Config = SgdConfig

    def train_block(self, parameters, block, client_params=None):
        return one_by_one(parameters, block, client_params, self.alone)

    def alone(self, parameters, data, random):
        self.starts = {
            **getattr(self, "starts", {}),
            data.client: {n: v.clone() for n, v in parameters.items()},
        }
        client = float(data.client)
        delta = {"w": torch.tensor([client, -client]), "own": torch.ones(1)}
        return Update(delta, data.client, client / 2 if client else math.nan)


class Failing(Scripted):
    def alone(self, parameters, data, random):
        raise ZeroDivisionError("no taste")


class Starving(Scripted):
    def alone(self, parameters, data, random):
        raise DataError("nothing to draw", fix="enlarge the catalogue")


class Wrong(Scripted):
    def alone(self, parameters, data, random):
        return Update({"w": torch.zeros(3), "own": torch.zeros(1)}, 1, 0.5)


@pytest.fixture
def node(load_tiny, world, tmp_path):
    """A node with the clients of the small world and a step of this file."""

    def make(step=Scripted, private=False, **settings):
        experiment = load_tiny(
            f"step.name={__name__}:{step.__name__}", *(f"step.{k}={v}" for k, v in settings.items())
        )
        made = Node(experiment, 0, 1, tmp_path if private else None)
        made.population = world()
        made.model.item_tables = ()  # the parameters of this world are no tables
        return made

    return make


def training_order(*clients, round_=1, weighting="uniform", **more):
    return TrainOrder(round_, np.array(clients) if clients else None, weighting, **more)


def test_the_order_of_the_clients_does_not_matter(node):
    one, other = (
        train_clients(node(), THETA, training_order(*clients)) for clients in ((0, 1, 2), (2, 0, 1))
    )
    assert one.total["w"].tobytes() == other.total["w"].tobytes()


def test_no_clients_named_means_all_that_train_and_none_means_none(node):
    assert train_clients(node(), THETA, training_order()).clients == 3
    nobody = train_clients(node(), THETA, TrainOrder(1, np.array([], dtype=np.int64)))
    assert nobody.clients == 0 and nobody.weight == 0 and not nobody.total["w"].any()


def test_an_error_names_client_step_and_data(node):
    with pytest.raises(ClientError) as caught:
        train_clients(node(Failing), THETA, training_order(1, round_=4))
    assert (
        caught.value.problem == f"client 1 failed in step 'Failing' (round 4, node 0) of {__file__}"
    )
    assert "2 rows (1 positives)" in caught.value.expected
    assert "learning_rate" in caught.value.expected
    assert caught.value.got.startswith(f"ZeroDivisionError: no taste ({__file__}, line ")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_error_that_explains_itself_keeps_its_kind_and_is_given_the_client(node):
    with pytest.raises(DataError) as caught:
        train_clients(node(Starving), THETA, training_order(1, round_=4))
    assert (caught.value.problem, caught.value.fix) == (
        "client 1: nothing to draw",
        "enlarge the catalogue",
    )


def test_a_step_that_returns_other_parameters_is_refused(node):
    with pytest.raises(
        ComponentError, match=rf"step 'Wrong' \({__file__}\) .* for client 2"
    ) as caught:
        train_clients(node(Wrong), THETA, training_order(2))
    assert "the shapes {" in caught.value.expected


def test_each_client_and_round_has_a_stream_of_its_own(node):
    made, drawn = node(), {}

    class Drawing(Scripted):
        def alone(self, parameters, data, random):
            drawn[data.client, self.round] = random.random()
            return super().alone(parameters, data, random)

    step = Drawing(SgdConfig(), made.model, made.device)
    for client, step.round in ((0, 1), (1, 1), (0, 2), (0, 1)):
        parameters = {n: torch.from_numpy(v) for n, v in THETA.items()}
        path = TrainingPath("blocks")
        one = np.array([client])
        list(train_in_blocks(made, step, path, parameters, one, "client", step.round))
    assert len(drawn) == 3 and len(set(drawn.values())) == 3


PRIVATE = {"private-parameters": "['own']"}


def test_private_parameters_are_never_sent_and_survive_between_rounds(node):
    made = node(private=True, **PRIVATE)
    for round_, expected in ((1, 11), (2, 12), (3, 13)):
        got = train_clients(made, THETA, training_order(1, 2, round_=round_))
        assert got.total["own"].tolist() == [0] and got.total["w"].tolist() == [3, -3]
        assert made.private.load(1, round_ + 1)["own"].tolist() == [expected]
    assert list(made.private.load(1, 4)) == ["own"]


def test_a_client_starts_from_its_own_private_parameters(node):
    made = node(private=True, **PRIVATE)
    train_clients(made, THETA, training_order(1))
    seen = {}
    made.step = lambda section, round_=None: seen.setdefault("step", Node.step(made, section))
    train_clients(
        made, {**THETA, "w": np.array([5, 5], np.float32)}, training_order(1, 2, round_=2)
    )
    starts = seen["step"].starts
    assert starts[1]["own"].tolist() == [11] and starts[2]["own"].tolist() == [10]
    assert starts[1]["w"].tolist() == [5, 5]


def test_a_round_that_is_run_again_starts_from_the_same_private_state(node):
    made = node(private=True, **PRIVATE)
    for round_ in (1, 2, 2, 1, 2):
        train_clients(made, THETA, training_order(1, round_=round_))
    assert made.private.load(1, 3)["own"].tolist() == [12]


# Evaluation on the device: shared or fine-tuned parameters, against scores and metrics by hand.

_ALS = (
    "model={name='ials', factors=5, moments=true}",
    "step={name='als'}",
    "strategy={name='fed-als'}",
    "evaluation.fine-tune={epochs=1}",
)


@pytest.fixture
def evaluation_node(tiny_experiment, world, tmp_path, monkeypatch):
    monkeypatch.setattr("fedrec.evaluation.tables._ACTIVE", 2)

    def make(*overrides, task="ranking"):
        table = {**tiny_experiment(), "task": task}
        if task == "rating":
            del table["positive-above"]
        experiment = load(table, ["evaluation.ks=[1, 2]", *overrides])
        made = Node(experiment, 0, 1, tmp_path)
        made.population = world(task)
        return made

    return make


@pytest.fixture
def evaluated_theta(evaluation_node):
    """Parameters with which every client scores item i by i: one hidden unit per layer, identity
    throughout."""
    model = evaluation_node().model
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


def evaluate_order(*clients, **step):
    return EvaluateOrder(
        1, np.array(clients) if clients else None, {"name": "sgd", **step} if step else None
    )


def test_metrics_of_known_scores(evaluation_node, evaluated_theta):
    """Item 5 ranks first for all clients. Held out: 2 of client 0 (never seen: 4, 5), 4 of client 1
    (2, 3, 5), 0 of client 2."""
    table = metrics_of(evaluation_node(), evaluated_theta, evaluate_order(epochs=0))
    assert table.index.tolist() == [0, 1, 2]
    assert table["hits@1"].tolist() == [0, 0, 0]
    assert table["hits@2"].tolist() == [0, 1, 0]
    np.testing.assert_allclose(table["discounted-hits@2"], [0, 1 / np.log2(3), 0])
    # Whole lists exclude known items: of 5 4 3 2 item 2 is fourth for client 0; item 4 is second
    # for client 1.
    np.testing.assert_allclose(table["mrr"], [1 / 4, 1 / 2, 1 / 5])


def test_whole_lists_leave_out_known_items(evaluation_node, evaluated_theta):
    """With item i scored by -i, the known items 0 and 1 of client 0 would be first; 2 is held
    out."""
    evaluated_theta["item.id"] = -evaluated_theta["item.id"]
    evaluated_theta["layer0.bias"] = (
        evaluated_theta["layer0.bias"] + 10
    )  # hidden units stay positive
    assert (
        metrics_of(evaluation_node(), evaluated_theta, evaluate_order(epochs=0)).loc[0, "mrr"] == 1
    )


def test_a_held_out_item_that_is_also_known_is_in_no_whole_list(evaluation_node, evaluated_theta):
    """Client 1 used item 1 again: a hit is possible, but no whole list can contain the item."""
    made = evaluation_node()
    part = made.population.partition
    made.population = Population(
        made.population.interactions,
        Partition(part.training_clients, np.array([0, 1, 4, 9]), np.array([8]), np.array([5])),
        task="ranking",
        positive_above=3.0,
    )
    (row,) = metrics_of(made, evaluated_theta, evaluate_order(1, epochs=0)).to_dict("records")
    assert np.isnan(row["mrr"]) and np.isnan(row["recall@1"]) and not np.isnan(row["hits@1"])


def test_groups_are_columns_of_zeros_and_ones(evaluation_node, evaluated_theta):
    table = metrics_of(evaluation_node(), evaluated_theta, evaluate_order(epochs=0))
    assert table["group:inactive"].tolist() == [0, 0, 1]
    assert table["group:active"].tolist() == [1, 1, 0]
    assert table["group:gender=F"].tolist() == [1, 0, 1]
    assert table["group:gender=M"].tolist() == [0, 1, 0]


def test_fine_tuning_scores_with_each_clients_own_parameters(evaluation_node):
    """Fine-tuned scores equal those of the step's result on that client alone."""
    made = evaluation_node("step.learning-rate=0.5")
    theta = {n: v.numpy() for n, v in made.model.initial(torch.Generator().manual_seed(3)).items()}
    parameters = {name: torch.from_numpy(value) for name, value in theta.items()}
    table = metrics_of(made, theta, evaluate_order(epochs=3, **{"learning-rate": 0.5}))
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


def test_scores_with_private_parameters_are_those_of_each_client(evaluation_node, evaluated_theta):
    private = {"private-parameters": ["layer1.bias", "layer0.weight"]}
    made = evaluation_node(f"step.private-parameters={private['private-parameters']}")
    train_clients(made, evaluated_theta, TrainOrder(1, np.array([1, 2])))
    step = made.step(Section.model_validate({"name": "sgd", "epochs": 0, **private}))
    parameters = {name: torch.from_numpy(value) for name, value in evaluated_theta.items()}
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


def test_each_client_starts_from_what_it_saved_or_drew(
    evaluation_node, evaluated_theta, monkeypatch
):
    private = {"private-parameters": ["layer1.bias"], "private-std": 1.0}
    made = evaluation_node("step.private-parameters=['layer1.bias']", "step.private-std=1.0")
    saved = np.full((2, *evaluated_theta["layer1.bias"].shape), [[7.0], [8.0]], np.float32)
    made.private.save_all([([3, 1], {"layer1.bias": saved})], 1, keep=9)
    step = made.step(Section.model_validate({"name": "sgd", **private}))
    parameters = {name: torch.from_numpy(value) for name, value in evaluated_theta.items()}
    start = private_parameters(made, step, parameters, np.arange(4), 2)["layer1.bias"].numpy()
    assert (start[3] == 7).all() and (start[1] == 8).all()
    assert len(np.unique(start[:, 0])) == 4
    parts = [np.array([0, 2]), np.array([3, 1])]
    monkeypatch.setattr("clients.blocks.cut_blocks", lambda *_, **__: iter(parts))
    train_clients(made, evaluated_theta, TrainOrder(2, np.arange(4), overrides={"epochs": 0}))
    after = [made.private.load(client, 3)["layer1.bias"] for client in range(4)]
    np.testing.assert_array_equal(after, start)


def test_rating_errors_of_known_predictions(evaluation_node, evaluated_theta):
    """Predictions are item numbers. Client 0: items 2, 3 rated 4, 1; client 1: 4, 4 rated 5, 5;
    client 2: 0 rated 5."""
    table = metrics_of(evaluation_node(task="rating"), evaluated_theta, evaluate_order(epochs=0))
    np.testing.assert_allclose(table["mae"], [2, 1, 5, 0])
    np.testing.assert_allclose(table["rmse"], [2, 1, 5, 0])
    assert table["rows"].tolist() == [2, 2, 1, 1]


def test_equal_features_are_scored_once(evaluation_node, monkeypatch):
    """Whatever the parts that clients are asked for in, and as each would be alone."""
    made = evaluation_node()
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
