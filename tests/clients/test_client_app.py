# SPDX-License-Identifier: Apache-2.0
"""The ClientApp: replies in fedrec's form to orders that name clients, and in Flower's form to
others."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from clients.app import app
from clients.hosting.node import Node
from clients.node_of_context import node_of
from clients.steps.sgd import Sgd
from clients.training.one_client import update_of
from clients.training.round import only_reads
from fedrec.evaluation.table import Evaluated
from fedrec.experiment.sections import Section
from fedrec.models.mf import Mf
from fedrec.protocol.messages import (
    HELLO,
    INITIAL,
    pack_evaluate,
    pack_train,
    unpack_parameters,
    unpack_presence,
    unpack_sum,
    unpack_table,
)
from fedrec.protocol.orders import EvaluateOrder, TrainOrder
from fedrec.protocol.sparse_update import dense_change
from fedrec.protocol.zero_copy import to_record
from fedrec.rng import stream, torch_stream
from simulations import runner
from simulations.engines.grid import FIRST_NODE_ID, contexts_of
from simulations.engines.serial import SerialGrid
from tests.runs import assert_close


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
    return {
        name: array.copy() for name, array in unpack_parameters(ask(RecordDict(), INITIAL)).items()
    }


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


def test_hello(ask):
    presence = unpack_presence(ask(RecordDict(), HELLO))
    assert presence.partition == 1
    assert presence.training.tolist() == ask.node.training.tolist()
    assert (presence.training % 2 == 1).all()
    assert presence.evaluated.tolist() == ask.node.evaluated.tolist()


def test_initial_parameters_are_those_of_the_experiments_seed(ask, theta):
    fresh = ask.node.model.initial(torch_stream(0, "init"))
    assert list(theta) == list(fresh)
    assert all(np.array_equal(theta[name], value.numpy()) for name, value in fresh.items())


def test_named_clients_are_answered_with_the_sum_of_their_updates(ask, theta):
    clients = ask.node.training[:3]
    reply = unpack_sum(ask(pack_train(to_record(theta), TrainOrder(1, clients))))
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
    arrays = unpack_parameters(content)
    for name, value in theta.items():
        mean = value + sum(examples * delta[name] for delta, examples, _ in expected) / weight
        np.testing.assert_allclose(arrays[name], mean, rtol=1e-5, atol=1e-6 * np.abs(mean).max())
        assert arrays[name].dtype == np.float32
    (metrics,) = content.metric_records.values()
    assert metrics["num-examples"] == weight
    assert metrics["loss"] == pytest.approx(np.mean([loss for *_, loss in expected]))


def test_the_proximal_term_that_fedprox_sends_is_honoured(ask, theta):
    """The proximal term is zero in the first gradient step; batches of 8 give several steps."""
    sent = unpack_parameters(ask(order(theta, **{"proximal-mu": 0.9})))
    expected = updates(ask.node, theta, **{"proximal-mu": 0.9})
    weight = sum(examples for _, examples, _ in expected)
    plain = unpack_parameters(ask(order(theta)))
    for name, value in theta.items():
        mean = value + sum(examples * delta[name] for delta, examples, _ in expected) / weight
        np.testing.assert_allclose(sent[name], mean, rtol=1e-5, atol=1e-6 * np.abs(mean).max())
    assert any(not np.allclose(sent[name], plain[name], rtol=1e-4, atol=1e-6) for name in theta)


def test_a_step_in_the_order_replaces_the_experiments_own(ask, theta):
    table = {"name": "sgd", "epochs": 0}
    clients = ask.node.training
    reply = unpack_sum(ask(pack_train(to_record(theta), TrainOrder(1, clients, "uniform", table))))
    assert not any(dense_change(c, theta[name]).any() for name, c in reply.total.items())
    assert reply.losses == 0


def test_named_clients_are_evaluated_one_row_each(ask, theta):
    clients = ask.node.evaluated[::-1]
    order = EvaluateOrder(1, clients, None)
    table = Evaluated(*unpack_table(ask(pack_evaluate(to_record(theta), order), "evaluate"))).table
    assert table.index.tolist() == sorted(clients.tolist())
    assert {"hits@5", "discounted-hits@5", "mrr", "group:active", "group:inactive"} <= set(
        table.columns
    )


def test_evaluation_in_standard_form_is_the_mean_over_all(ask, theta):
    content = ask(order(theta), "evaluate")
    (metrics,) = content.metric_records.values()
    everyone = EvaluateOrder(1, ask.node.evaluated, None)
    reply = ask(pack_evaluate(to_record(theta), everyone), "evaluate")
    table = Evaluated(*unpack_table(reply)).table
    assert metrics["num-examples"] == len(table) == len(ask.node.evaluated)
    assert not content.array_records
    assert metrics["hits@5"] == pytest.approx(table["hits@5"].mean())
    assert not [name for name in metrics if name.startswith("group:")]


def test_our_client_app_under_a_stock_server_app(load_tiny, tmp_path):
    """`strategy.start` as in Flower's documentation: two rounds of FedAvg, evaluation included."""
    settled = runner.settle(load_tiny("engine.nodes=3"))
    configs = contexts_of(settled.model_dump_json(), str(tmp_path / "run"), 3)
    contexts = [
        Context(1, FIRST_NODE_ID + place, node, RecordDict(), config)
        for place, (node, config) in enumerate(configs)
    ]
    grid = SerialGrid(app, contexts)
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
