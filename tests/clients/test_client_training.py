# SPDX-License-Identifier: Apache-2.0
"""A training round on one node: sums, weights, errors, and private state."""

import math

import numpy as np
import pytest
import torch

from clients.hosting.node import Node
from clients.hosting.paths import TrainingPath
from clients.local.one_by_one import Update, one_by_one
from clients.step import Step
from clients.steps.sgd import SgdConfig
from clients.training.blocks import train_in_blocks
from clients.training.round import train_clients
from fedrec.errors import ClientError, ComponentError, DataError
from fedrec.protocol.orders import TrainOrder

THETA = {"w": np.array([1, 2], np.float32), "own": np.array([10], np.float32)}


class Scripted(Step):
    """Client c has c examples and moves `w` by (c, -c) and `own` by 1; client 0 has no examples."""

    Config = SgdConfig

    def train_block(self, parameters, block, own=None):
        return one_by_one(parameters, block, own, self.alone)

    def alone(self, parameters, data, random):
        self.starts = {
            **getattr(self, "starts", {}),
            data.client: {n: v.clone() for n, v in parameters.items()},
        }
        client = float(data.client)
        delta = {"w": torch.tensor([client, -client]), "own": torch.ones(1)}
        return Update(delta, data.client, client / 2 if client else math.nan)

    def private_names(self, names):
        return [name for name in names if name in self.config.private_parameters]


class Failing(Scripted):
    def alone(self, parameters, data, random):
        raise ZeroDivisionError("no taste")


class Starving(Scripted):
    def alone(self, parameters, data, random):
        raise DataError("nothing to draw", fix="enlarge the catalogue")


class Wrong(Scripted):
    def alone(self, parameters, data, random):
        return Update({"w": torch.zeros(3), "own": torch.zeros(1)}, 1, 0.5)


class Lacking(Scripted):
    def alone(self, parameters, data, random):
        return Update({"w": torch.zeros(2)}, 1, 0.5)


@pytest.fixture
def node(load_tiny, world, tmp_path):
    """A node with the clients of the small world and a step of this file."""

    def make(step=Scripted, private=False, **settings):
        experiment = load_tiny(
            f"step.name={__name__}:{step.__name__}", *(f"step.{k}={v}" for k, v in settings.items())
        )
        made = Node(experiment, 0, 1, tmp_path if private else None)
        made.population = world()
        return made

    return make


def order(*clients, round_=1, weighting="uniform", **more):
    return TrainOrder(round_, np.array(clients) if clients else None, weighting, **more)


def test_uniform_sum(node):
    got = train_clients(node(), THETA, order(0, 1, 2))
    assert got.total["w"].tolist() == [3, -3] and got.total["own"].tolist() == [3]
    assert (got.clients, got.weight, got.examples, got.loss, got.losses) == (3, 3, 3, 1.5, 2)
    assert all(got.total[name].dtype == np.float32 for name in THETA)


def test_sum_weighted_by_examples(node):
    got = train_clients(node(), THETA, order(0, 1, 2, weighting="examples"))
    # 0*0 + 1*1 + 2*2 and 0 + 1 + 2
    assert got.total["w"].tolist() == [5, -5] and got.total["own"].tolist() == [3]
    assert (got.clients, got.weight, got.examples) == (3, 3, 3)


def test_the_order_of_the_clients_does_not_matter(node):
    one, other = (
        train_clients(node(), THETA, order(*clients)) for clients in ((0, 1, 2), (2, 0, 1))
    )
    assert one.total["w"].tobytes() == other.total["w"].tobytes()


def test_no_clients_named_means_all_that_train_and_none_means_none(node):
    assert train_clients(node(), THETA, order()).clients == 3
    nobody = train_clients(node(), THETA, TrainOrder(1, np.array([], dtype=np.int64)))
    assert nobody.clients == 0 and nobody.weight == 0 and not nobody.total["w"].any()


def test_an_error_names_client_step_and_data(node):
    with pytest.raises(ClientError) as caught:
        train_clients(node(Failing), THETA, order(1, round_=4))
    assert (
        caught.value.problem == f"client 1 failed in step 'Failing' (round 4, node 0) of {__file__}"
    )
    assert "2 rows (1 positives)" in caught.value.expected
    assert "learning_rate" in caught.value.expected
    assert caught.value.got.startswith(f"ZeroDivisionError: no taste ({__file__}, line ")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_error_that_explains_itself_keeps_its_kind_and_is_given_the_client(node):
    with pytest.raises(DataError) as caught:
        train_clients(node(Starving), THETA, order(1, round_=4))
    assert (caught.value.problem, caught.value.fix) == (
        "client 1: nothing to draw",
        "enlarge the catalogue",
    )


@pytest.mark.parametrize("step", [Wrong, Lacking])
def test_a_step_that_returns_other_parameters_is_refused(node, step):
    with pytest.raises(
        ComponentError, match=rf"step '{step.__name__}' \({__file__}\) .* for client 2"
    ) as caught:
        train_clients(node(step), THETA, order(2))
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
        got = train_clients(made, THETA, order(1, 2, round_=round_))
        assert got.total["own"].tolist() == [0] and got.total["w"].tolist() == [3, -3]
        assert made.private.load(1, round_ + 1)["own"].tolist() == [expected]
    assert list(made.private.load(1, 4)) == ["own"]


def test_a_client_starts_from_its_own_private_parameters(node):
    made = node(private=True, **PRIVATE)
    train_clients(made, THETA, order(1))
    seen = {}
    made.step = lambda section: seen.setdefault("step", Node.step(made, section))
    train_clients(made, {**THETA, "w": np.array([5, 5], np.float32)}, order(1, 2, round_=2))
    starts = seen["step"].starts
    assert starts[1]["own"].tolist() == [11] and starts[2]["own"].tolist() == [10]
    assert starts[1]["w"].tolist() == [5, 5]


def test_a_round_that_is_run_again_starts_from_the_same_private_state(node):
    made = node(private=True, **PRIVATE)
    for round_ in (1, 2, 2, 1, 2):
        train_clients(made, THETA, order(1, round_=round_))
    assert made.private.load(1, 3)["own"].tolist() == [12]


def test_private_parameters_without_a_folder_are_refused(node):
    with pytest.raises(ClientError, match="private parameters cannot be saved"):
        train_clients(node(**PRIVATE), THETA, order(1))
