# SPDX-License-Identifier: Apache-2.0
"""Compatibility with Flower in both directions: a stock ClientApp under fedrec's server, and
fedrec's ClientApp under a stock ServerApp."""

import numpy as np
import pytest
import stock_app
import torch
from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from clients.app import app as our_app
from fedrec.components.registry import MODEL
from fedrec.config import Config
from fedrec.data.population import Population
from fedrec.errors import ClientError, ExperimentError
from fedrec.experiment.loading import load
from fedrec.models.base import Model
from fedrec.rng import torch_stream
from fedrec.runs.folder import RunFolder
from server.deployed.foreign_clients import ForeignClientGrid
from server.run import execute
from simulations import runner
from simulations.engines.grid import FIRST_NODE_ID, contexts_of
from simulations.engines.serial import SerialGrid
from tests.runs import assert_close


class AsTorch(Model):
    """The same network as the stock app's, under the same names."""

    Config = Config

    def initial(self, generator):
        state = {
            "items.weight": (stock_app.ITEMS, stock_app.WIDTH),
            "score.weight": (1, stock_app.WIDTH),
        }
        drawn = {name: torch.randn(shape, generator=generator) for name, shape in state.items()}
        return drawn | {"score.bias": torch.zeros(1)}

    def predict(self, parameters, users, items, rows=None):
        client = torch.arange(len(items))[:, None]
        own = parameters["items.weight"][client, items]
        return (own * parameters["score.weight"]).sum(-1) + parameters["score.bias"]


class AppsGrid(SerialGrid):
    """Each node runs its own app; errors of an app are returned as in Flower's simulation."""

    def __init__(self, apps, run):
        configs = contexts_of(run.experiment.model_dump_json(), str(run.path), len(apps))
        contexts = [
            Context(1, FIRST_NODE_ID + place, node, RecordDict(), config)
            for place, (node, config) in enumerate(configs)
        ]
        super().__init__(None, contexts)
        self._apps = apps

    def _submit(self, batch):
        for message in batch:
            self._app = self._apps[message.metadata.dst_node_id - FIRST_NODE_ID]
            try:
                super()._submit([message])
            except Exception as error:
                reason = f"{type(error)}:<'{error}'>"
                self._replies[message.metadata.message_id] = Message(
                    Error(2, reason), reply_to=message
                )


@pytest.fixture
def play(tiny_experiment, tmp_path):
    """Runs the tiny experiment on nodes with the given apps."""

    def run(apps, output="run", **changes):
        table = {**tiny_experiment(), "model": {"name": f"{__name__}:AsTorch"}, **changes}
        table["sampler"] = changes.get("sampler", {"name": "fixed-size", "cohort": len(apps)})
        settled = runner.settle(load(table))
        folder = RunFolder.create(settled, tmp_path / output)
        return execute(folder, ForeignClientGrid(AppsGrid(apps, folder), folder.experiment))

    return run


def start_of(experiment):
    model = AsTorch(experiment.settings(MODEL), Population.of(experiment).schema())
    return {
        name: value.numpy()
        for name, value in model.initial(torch_stream(experiment.seed, "init")).items()
    }


def trained(theta, node, lr=0.5):
    """The stock app's training of parameters, by its own functions."""
    net = stock_app.Net()
    net.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in theta.items()})
    data = stock_app.load_data(node)
    stock_app.train_fn(net, data, 2, lr)
    return {name: value.numpy() for name, value in net.state_dict().items()}, len(data[0])


@pytest.mark.parametrize("strategy", ["reptile", "fedavg"])
def test_a_stock_client_app_under_our_server(play, strategy):
    """One round by hand: the mean of the nodes' parameters, each the same or by examples."""
    result = play([stock_app.app] * 3, rounds=1, strategy={"name": strategy})
    theta = start_of(result.experiment)
    local = [trained(theta, node) for node in range(3)]
    weights = [1, 1, 1] if strategy == "reptile" else [examples for _, examples in local]
    for name in theta:
        expected = np.average([one[name] for one, _ in local], axis=0, weights=weights)
        np.testing.assert_allclose(result.parameters[name], expected, rtol=1e-5, atol=1e-6)
    assert result.rounds["num-clients"].tolist() == [3]
    assert result.rounds["num-examples"].tolist() == [63]
    assert 0 <= result.metrics["eval_acc"] <= 1
    assert len(result.users) == 3
    assert result.rounds["loss"][0] > 0


def test_it_learns_over_rounds_and_gets_its_settings(play):
    slow = play([stock_app.app] * 3, "slow", rounds=4, **{"train-config": {"lr": 1e-6}})
    fast = play([stock_app.app] * 3, "fast", rounds=4, **{"train-config": {"lr": 0.5}})
    assert fast.rounds["loss"].iloc[-1] < 0.9 * fast.rounds["loss"].iloc[0]
    assert slow.rounds["loss"].iloc[-1] > 0.99 * slow.rounds["loss"].iloc[0]
    theta = start_of(slow.experiment)
    for name, value in theta.items():
        np.testing.assert_allclose(slow.parameters[name], value, atol=1e-4)


def test_flowers_strategy_and_a_stock_client_app_under_our_loop(play):
    result = play(
        [stock_app.app] * 2, rounds=1, strategy={"name": "flwr.serverapp.strategy:FedAvg"}
    )
    theta = start_of(result.experiment)
    (one, n), (other, m) = trained(theta, 0), trained(theta, 1)
    for name in theta:
        expected = (n * one[name] + m * other[name]) / (n + m)
        np.testing.assert_allclose(result.parameters[name], expected, rtol=1e-5, atol=1e-6)


def test_our_nodes_and_a_stock_one_side_by_side(play):
    """Two of our three nodes host 11 training clients, and the node of the other app is a further
    client."""
    hosted = int(
        (
            Population.of(play([our_app], "ours", rounds=1).experiment).partition.training_clients
            % 3
            != 1
        ).sum()
    )
    everyone = {"name": "fixed-size", "cohort": hosted + 1}
    result = play([our_app, stock_app.app, our_app], rounds=2, sampler=everyone)
    assert result.rounds["num-clients"].tolist() == [hosted + 1] * 2
    assert {"hits@5", "eval_acc"} <= set(result.metrics)
    assert np.isfinite(list(result.metrics.values())).all()
    assert result.users["eval_acc"].notna().sum() == 1 and result.users["hits@5"].isna().sum() == 1


def test_under_privacy_a_stock_node_moves_the_sum_by_the_clip_norm_at_most(play):
    privacy = {"clip-norm": 0.01, "noise-multiplier": 0.0}
    result = play([stock_app.app] * 3, rounds=1, privacy=privacy)
    theta = start_of(result.experiment)
    moved = np.sqrt(
        sum(np.square(result.parameters[name] - value).sum() for name, value in theta.items())
    )
    assert 0.002 < moved <= 0.01 * (1 + 1e-4)  # the mean of three updates of norm 0.01 each
    with pytest.raises(ExperimentError, match="runs another ClientApp, which adds no noise"):
        play(
            [stock_app.app] * 3,
            "local",
            privacy={**privacy, "noise-multiplier": 1.0, "placement": "local"},
        )


def test_other_parameters_are_named(play):
    app = ClientApp()

    @app.train()
    def train(msg, context):
        arrays = ArrayRecord({"items.weight": torch.zeros(2, 2)})
        return Message(
            RecordDict({"arrays": arrays, "metrics": stock_app.MetricRecord({"num-examples": 1})}),
            reply_to=msg,
        )

    with pytest.raises(ClientError, match="answered with other parameters") as caught:
        play([app] * 2)
    assert "(30, 4)" in caught.value.expected and "(2, 2)" in caught.value.got


def test_an_error_of_our_own_node_is_not_taken_for_another_app(play, monkeypatch):
    def broken(self):
        raise OSError("disk on fire")

    monkeypatch.setattr("clients.hosting.node.Node.training", property(broken))
    with pytest.raises(ClientError, match="disk on fire"):
        play([our_app, stock_app.app])


def test_our_client_app_under_a_stock_server_app(load_tiny, tmp_path):
    """`strategy.start` as in Flower's documentation: two rounds of FedAvg, evaluation included."""
    settled = runner.settle(load_tiny("engine.nodes=3"))
    folder = RunFolder.create(settled, tmp_path / "run")
    grid = AppsGrid([our_app] * 3, folder)
    from clients.hosting.node import Node

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
