# SPDX-License-Identifier: Apache-2.0
"""What an audit adds to an experiment: canary users, rows of parameters that nothing reads, and a
step in which the canaries upload fixed updates and all others do the same as ever."""

import numpy as np
import pytest
import torch

from clients.hosting.node import Node
from clients.training.one_client import update_of
from clients.training.round import train_clients
from fedrec.attacks.audit.canaries import CanaryPlan
from fedrec.data.features import Feature, FeatureTable
from fedrec.data.interactions import more_ids
from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from fedrec.protocol.orders import TrainOrder
from fedrec.protocol.sparse_update import dense_change
from fedrec.rng import torch_stream
from simulations.attacks.canaries import population as canary_users
from simulations.attacks.canaries.population import CanaryUsers
from simulations.attacks.canaries.reserved import Reserved
from simulations.attacks.canaries.step import CanaryConfig

USERS, CANARIES = 24, 6
PLAN = {"first": USERS, "count": CANARIES, "magnitude": 3.0, "examples": 50, "seed": 1}
HERE = "simulations.attacks.canaries"


def added(table, kind, where, **settings):
    return {kind: {"name": f"{HERE}.{where}", "base": table[kind], **settings}}


def with_users(table, count=CANARIES, **settings):
    users = added(table, "dataset", "population:CanaryUsers", count=count, **settings)
    return {**table, **users, **added(table, "split", "population:CanaryClients", count=count)}


def with_rows(table, rows, **settings):
    return {**table, **added(table, "model", "reserved:Reserved", rows=rows, **settings)}


@pytest.mark.parametrize(
    "split",
    [
        {"name": "user-holdout"},
        {"name": "leave-one-out", "leaky-negatives": True},
        {"name": "ratio"},
    ],
)
def test_canaries_train_and_nothing_else_changes(tiny_experiment, split):
    table = {**tiny_experiment(), "split": split}
    audited = Population.of(load(with_users(table, count=7, items=3)))
    plain = Population.of(load(table))
    users = plain.interactions.num_users
    new = np.arange(users, users + 7)
    assert audited.interactions.num_users == users + 7
    assert audited.interactions.num_items == plain.interactions.num_items + 3
    assert np.array_equal(audited.interactions.items, plain.interactions.items)
    training = np.concatenate([plain.partition.training_clients, new])
    assert np.array_equal(audited.partition.training_clients, training)
    for part in ("train_rows", "validation_rows", "test_rows", "leaky_negatives"):
        assert np.array_equal(getattr(audited.partition, part), getattr(plain.partition, part))
    assert np.array_equal(audited.evaluated_clients("test"), plain.evaluated_clients("test"))
    assert audited.schema().user_features == plain.schema().user_features
    canary = audited.client(int(new[0]))
    assert len(canary.items) == len(canary.positives) == 0
    assert all((codes == -1).all() for codes in canary.features)


@pytest.mark.parametrize(
    "ids",
    [np.array([7, 3]), np.array(["a", "canary-0"]), np.array(["a", 5], dtype=object)],
    ids=["integers", "texts", "objects"],
)
def test_ids_of_canaries_are_new(ids):
    found = more_ids(ids, 3, "canary")
    assert len(set(found.tolist())) == 5 and found[:2].tolist() == ids.tolist()


def test_a_feature_keeps_its_categories_and_gets_rows_without_codes():
    feature = Feature.multiple("hobby", [["a", "b"], [], ["b"]])
    (longer,) = canary_users._longer(FeatureTable(3, (feature,)), 2).features
    assert longer.categories == feature.categories
    assert longer.padded().tolist() == [*feature.padded().tolist(), [-1, -1], [-1, -1]]


def test_wrong_settings_of_what_is_wrapped_are_named():
    base = {"name": "synthetic", "usres": 5}
    with pytest.raises(ExperimentError, match=r"dataset\.base\.usres"):
        CanaryUsers(
            "canaries", CanaryUsers.Config.model_validate({"base": base, "count": 1})
        ).read()
    with pytest.raises(ExperimentError, match=r"step\.batch-sice"):
        CanaryConfig.parse({"canaries": PLAN, "batch-sice": 4}, at="step")


def test_nothing_reads_reserved_rows(tiny_experiment):
    """Scores, losses and the other rows of initial parameters are those of the other model."""
    table = tiny_experiment()
    reserved, plain = (Node(load(t), 0, 1, None).model for t in (with_rows(table, 5), table))
    more, less = (model.initial(torch_stream(1, "init")) for model in (reserved, plain))
    assert list(more) == list(less) and reserved.item_tables == plain.item_tables == ("item.id",)
    for name, value in less.items():
        assert torch.equal(more[name][: len(value)], value)
        assert more[name].shape[0] - value.shape[0] == (5 if name == "item.id" else 0)
    assert not more["item.id"][-5:].any()
    parameters = {name: value.unsqueeze(0) for name, value in less.items()}
    rows = torch.cat([parameters["item.id"], torch.full((1, 5, 4), 7.0)], 1)
    users = tuple(torch.zeros(1, 1, dtype=torch.int64) for _ in plain.schema.user_features)
    scores = reserved.scores({**parameters, "item.id": rows}, users)
    assert torch.equal(scores, plain.scores(parameters, users))
    assert scores.shape == (1, plain.schema.num_items)
    predictions, labels = torch.tensor([[0.3, -1.0]]), torch.tensor([[1.0, 0.0]])
    assert torch.equal(reserved.loss(predictions, labels), plain.loss(predictions, labels))


@pytest.mark.parametrize("patterns", [["*"], ["layer0.*", "user.*"]])
def test_reserved_rows_of_all_parameters_change_no_update(tiny_experiment, patterns):
    """The model computes with its own rows, so that the reserved ones stay zero."""
    table = {**tiny_experiment(), "seed": 3}
    plain, wider = (
        Node(load(t), 0, 1, None) for t in (table, with_rows(table, 12, parameters=patterns))
    )
    assert isinstance(wider.model, Reserved)
    room = wider.model.room
    some = plain.training[:4]
    found = train_clients(wider, parameters(wider), TrainOrder(1, some))
    expected = train_clients(plain, parameters(plain), TrainOrder(1, some))
    for name, value in parameters(plain).items():
        own = dense_change(expected.total[name], value)
        wide = dense_change(found.total[name], parameters(wider)[name])
        assert wide[: len(own)] == pytest.approx(own, rel=1e-4, abs=1e-6)
        assert not wide[len(own) :].any()
        assert len(wide) - len(own) == room.get(name, 0)
    assert {"layer0.weight", "layer0.bias", "item.id"} <= set(room)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)


@pytest.fixture
def nodes(tiny_experiment):
    """A node with canaries and one without, of the same experiment."""

    def make(path="auto"):
        table = tiny_experiment()
        table["engine"]["path"] = path
        audited = with_rows(with_users(table), CANARIES)
        audited["step"] = {
            **table["step"],
            "name": f"{HERE}.step:Canary",
            "base": "sgd",
            "canaries": PLAN,
        }
        return Node(load(audited), 0, 1, None), Node(load(table), 0, 1, None)

    return make


def parameters(node):
    return {
        name: value.numpy() for name, value in node.model.initial(torch_stream(0, "init")).items()
    }


@pytest.mark.parametrize("path", ["auto", "reference"])
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_a_round_is_the_plain_round_and_the_planted_rows(nodes, path, weighting):
    audited, plain = nodes(path)
    some = plain.training[:5]
    canaries = np.array([USERS, USERS + 3])
    with_them = train_clients(
        audited, parameters(audited), TrainOrder(1, np.concatenate([some, canaries]), weighting)
    )
    alone = train_clients(plain, parameters(plain), TrainOrder(1, some, weighting))
    share = 50.0 if weighting == "examples" else 1.0
    audit = {
        name: dense_change(change, parameters(audited)[name])
        for name, change in with_them.total.items()
    }
    for name, change in alone.total.items():
        total = dense_change(change, parameters(plain)[name])
        assert np.array_equal(audit[name][: len(total)], total)
    rows = audit["item.id"][-CANARIES:]
    signs = CanaryPlan.parse(PLAN).signs()
    expected = np.zeros((CANARIES, 4))
    for place in (0, 3):
        expected[place] = share * signs[place] * 3.0 / 2.0  # norm 3 over four entries
    assert rows == pytest.approx(expected)
    assert (with_them.clients, with_them.examples) == (alone.clients + 2, alone.examples + 100)
    assert (with_them.loss, with_them.losses) == (alone.loss, alone.losses)
    assert with_them.weight == alone.weight + 2 * share


def test_the_others_are_trained_in_blocks(nodes, monkeypatch):
    audited, _ = nodes()
    from clients.training import round

    blocks = []
    real = round.train_in_blocks
    monkeypatch.setattr(
        round, "train_in_blocks", lambda *a, **k: blocks.append(a[4].tolist()) or real(*a, **k)
    )
    train_clients(
        audited, parameters(audited), TrainOrder(1, np.array([*audited.training[:4], USERS + 1]))
    )
    assert blocks == [audited.training[:4].tolist(), [USERS + 1]]


def test_a_cohort_of_canaries_alone(nodes):
    audited, _ = nodes()
    reply = train_clients(audited, parameters(audited), TrainOrder(1, USERS + np.arange(CANARIES)))
    assert reply.clients == CANARIES and reply.losses == 0
    initial = parameters(audited)
    total = {name: dense_change(change, initial[name]) for name, change in reply.total.items()}
    norms = np.linalg.norm(total.pop("item.id"), axis=1)
    assert norms == pytest.approx([0.0] * 30 + [3.0] * CANARIES)
    assert not any(change.any() for change in total.values())


def test_what_belongs_to_the_other_step_is_the_others(nodes):
    """Its settings in fine-tuning, and what stays on a device."""
    audited, _ = nodes()
    section = audited.experiment.step
    canary = audited.step(section)
    tuned = audited.step(audited.experiment.fine_tune_step())
    assert tuned.base.config.epochs == 1 and tuned.base.config.batch_size == 8
    private = type(section).model_validate({**section.model_dump(), "private-parameters": ["w"]})
    step = audited.step(private)
    assert step.keeps is True and canary.keeps is False
    assert step.private_names(["w", "v"]) == ["w"]


def test_a_model_without_reserved_rows_is_refused(nodes):
    audited, _ = nodes()
    step = audited.step(audited.experiment.step)
    step.model = step.model.base
    with pytest.raises(ExperimentError, match="no room for canaries"):
        update_of(
            step, {"w": torch.zeros(2)}, audited.population.client(USERS), np.random.default_rng(0)
        )
