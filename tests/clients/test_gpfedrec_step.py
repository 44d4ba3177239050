# SPDX-License-Identifier: Apache-2.0
"""A client of GPFedRec in its limiting cases: without guidance it is plain gradient descent, with
guidance only it converges to it."""

import numpy as np
import pytest
import torch

from clients.generated import requested_items
from clients.hosting.node import Node
from clients.step import Step
from clients.steps.personal.gpfedrec import GpfedrecStep
from clients.training.one_client import update_of
from clients.training.round import train_each
from fedrec.cohort.batches import Batches
from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from fedrec.models.base import Model
from fedrec.models.personal.gpfedrec import Gpfedrec
from fedrec.protocol.client_arrays import ClientArrays
from fedrec.protocol.orders import ItemQuery, TrainOrder
from fedrec.rng import stream
from tests.clients.oracles import update_under


class Mine(Model):
    """A model of a plug-in."""


MODEL_SETTINGS = {"embedding": 3, "hidden": [4]}
MODEL = {"name": "gpfedrec", **MODEL_SETTINGS}
COMMON = {"epochs": 2, "batch-size": 8, "negatives": 2, "learning-rate": 0.1}


@pytest.fixture
def guided(tiny_experiment):
    """A node with the step, a client's initial parameters, and the client's data."""

    def make(name="gpfedrec", **step):
        table = tiny_experiment() | {"model": MODEL, "step": {"name": name, **COMMON, **step}}
        node = Node(load(table), 0, 1, None)
        start = {n: v.double() for n, v in node.initial().items()}
        start["item.own"] = torch.ones_like(start["item.own"])
        if name == "gpfedrec":
            start["item.guide"] = start["item.id"] + 1
        return node, start, node.population.client(int(node.training[0]))

    return make


def updated(node, start, data):
    step = node.step(node.experiment.step)
    update = update_under if step.generated else update_of
    return update(step, start, data, stream(0, "client", data.client, 1))


def test_without_guidance_it_is_gradient_descent(guided):
    """The reference: step `sgd` on the same model, with initial embeddings."""
    node, start, data = guided(pull=0.0, item_rate=5.0, user_rate=2.0)
    plain, same, _ = guided("sgd", rates={"item.id": 5.0, "user.id": 2.0, "item.own": 0.0})
    found = updated(node, start, data)
    same["item.own"] = torch.zeros_like(same["item.own"])
    wanted = updated(plain, same, data)
    for name in ("item.id", "user.id", "layer0.weight", "layer1.bias"):
        assert wanted.delta[name].any()
        torch.testing.assert_close(found.delta[name], wanted.delta[name])
    assert found.loss == pytest.approx(wanted.loss) and found.examples == wanted.examples
    assert not found.delta["item.guide"].any()


def test_with_guidance_alone_touched_rows_go_there(guided):
    """Each batch moves by a share of the remaining distance."""
    node, start, data = guided(pull=0.25, item_rate=0.0)
    step = node.step(node.experiment.step)
    batches = len(step.batches(data, stream(0, "client", data.client, 1)).sizes)
    moved = updated(node, start, data).delta["item.id"]
    touched = moved.any(dim=1)
    torch.testing.assert_close(moved[touched], torch.full_like(moved[touched], 1 - 0.75**batches))
    assert 0 < touched.sum() < len(moved)


def test_it_sends_item_embeddings_alone(guided):
    node, start, _ = guided()
    step = node.step(node.experiment.step)
    private = set(step.private_names(list(start)))
    assert private == set(start) - {"item.id", "item.guide"}


def trained(node, step, clients, number=1):
    """The updates of a round in which each client starts from the initial embeddings."""
    requests = requested_items(node, ItemQuery(number, clients, "train", step))
    rows = node.initial()["item.id"].numpy()[requests.items]
    given = ClientArrays(requests, {}, {"item.id": rows, "item.guide": rows})
    return train_each(
        node, given.arrays(), TrainOrder(number, clients, step=step, each=True)
    ).updates


@pytest.mark.parametrize("path", ["kernel", "blocks"])
@pytest.mark.parametrize("together", [True, False])
def test_a_client_keeps_the_last_change_of_its_rows_alone(
    tiny_experiment, monkeypatch, tmp_path, path, together
):
    """In the second round, too; one without examples then keeps all that it has, in a block with
    others and in one of its own."""
    step = {"name": "gpfedrec", **COMMON}
    table = tiny_experiment() | {"model": MODEL, "step": step, "engine": {"path": path}}
    node = Node(load(table), 0, 1, tmp_path)
    clients = node.training[:4]
    parts = [[3, 1, 2, 0]] if together else [[0], [1], [2], [3]]
    monkeypatch.setattr(Node, "blocks", lambda *_: iter(parts))
    idle = clients[0]
    before = None
    for number in (1, 2):
        sent = trained(node, step, clients, number)
        for place, client in enumerate(clients):
            found = node.private.load(int(client), number + 1)
            if client == idle and number == 2:
                assert before is not None and set(found) == set(before)
                for name, value in before.items():
                    np.testing.assert_array_equal(found[name], value)
                continue
            own = sent.requests.items[slice(*sent.requests.offsets[place : place + 2])]
            wanted = np.zeros_like(found["item.own"])
            wanted[own] = sent.rows["item.id"][sent.requests.rows_of(np.array([place]))]
            assert wanted.any() and not wanted.all()
            np.testing.assert_array_equal(found["item.own"], wanted)
        before = node.private.load(int(idle), 2)
        batches = GpfedrecStep.batches

        def none_for_one(own, data, random, batches=batches):
            return Batches.cut([], 8) if data.client == idle else batches(own, data, random)

        monkeypatch.setattr(GpfedrecStep, "batches", none_for_one)


def test_a_client_without_examples_sends_what_the_others_send(
    tiny_experiment, monkeypatch, tmp_path
):
    """It is trained in another block; what it sends is zero."""
    step = {"name": "gpfedrec", **COMMON}
    table = tiny_experiment() | {"model": MODEL, "step": step}
    node = Node(load(table), 0, 1, tmp_path)
    monkeypatch.setattr(
        Node, "blocks", lambda node, batches, *_: ([i] for i in range(len(batches)))
    )
    clients = node.training[:3]
    batches = GpfedrecStep.batches

    def none_for_the_first(step, data, random):
        return Batches.whole([]) if data.client == clients[0] else batches(step, data, random)

    monkeypatch.setattr(GpfedrecStep, "batches", none_for_the_first)
    found = trained(node, step, clients)
    assert set(found.rows) == {"item.id"} and not found.values
    assert found.requests.offsets.tolist()[:2] == [0, 0] and found.rows["item.id"].any()


def test_a_step_with_other_batches_refuses_the_kernel(guided):
    node, _, _ = guided(epochs=3)

    class Halved(GpfedrecStep):
        def batches(self, data, random):
            return Batches.cut([(np.arange(2), np.ones(2, np.float32))], 2)

    other = Halved(node.step(node.experiment.step).config, node.model, node.device)
    assert other.kernel_refusal() is None and "overrides" in (other.declared_refusal() or "")


def test_the_kernel_trains_as_blocks_do(tiny_experiment, tmp_path):
    """What is sent, what is kept, and losses, of clients whose guidance differs."""
    step = {"name": "gpfedrec", **COMMON, "pull": 0.2, "item-rate": 5.0, "user-rate": 3.0}
    found = {}
    for path in ("kernel", "blocks"):
        table = tiny_experiment() | {"model": MODEL, "step": step, "engine": {"path": path}}
        node = Node(load(table), 0, 1, tmp_path / path)
        assert node.paths == {"gpfedrec": path}
        clients = node.training[:5]
        requests = requested_items(node, ItemQuery(1, clients, "train", step))
        rows = node.initial()["item.id"].numpy()[requests.items]
        guide = rows + np.random.default_rng(0).normal(size=rows.shape).astype(np.float32)
        given = ClientArrays(requests, {}, {"item.id": rows, "item.guide": guide})
        reply = train_each(node, given.arrays(), TrainOrder(1, clients, step=step, each=True))
        kept = [node.private.load(int(client), 2) for client in clients]
        found[path] = reply.updates.rows["item.id"], kept, reply.losses
    (sent, kept, losses), (wanted, wanted_kept, wanted_losses) = found["kernel"], found["blocks"]
    assert np.abs(wanted).max() > 0.01
    np.testing.assert_allclose(sent, wanted, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    for own, other in zip(kept, wanted_kept, strict=True):
        assert set(own) == set(other) > {"item.own", "user.id"}
        for name, value in own.items():
            np.testing.assert_allclose(value, other[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_model_that_predicts_otherwise_is_trained_in_blocks(tiny_experiment):
    class Other(Gpfedrec):
        def predict(self, parameters, users, items, rows=None):
            return 2 * super().predict(parameters, users, items, rows)

    node = Node(load(tiny_experiment() | {"model": MODEL}), 0, 1, None)
    other = Other(Other.Config(**MODEL_SETTINGS), node.model.schema)
    step = GpfedrecStep(GpfedrecStep.Config(), other, node.device)
    assert step.kernel_refusal() == "model Other declares no kernel"


def test_training_without_guidance_is_refused(guided):
    node, start, data = guided()
    del start["item.guide"]
    with pytest.raises(ExperimentError, match="no fine-tuning"):
        updated(node, start, data)


def test_another_model_is_refused(tiny_experiment):
    node = Node(load(tiny_experiment() | {"step": {"name": "gpfedrec"}}), 0, 1, None)
    with pytest.raises(ExperimentError, match=r"model\.name = 'gpfedrec' and task = 'ranking'"):
        node.step(node.experiment.step)

    class Rating(Step):
        trains = Mine
        train_block = None  # type: ignore[assignment]

    with pytest.raises(ExperimentError, match=rf"model\.name = '{__name__}:Mine'\n") as caught:
        Rating(Rating.Config(), node.model, node.device)
    assert str(caught.value.got).startswith("PrivRec and")
