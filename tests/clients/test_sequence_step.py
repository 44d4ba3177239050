# SPDX-License-Identifier: Apache-2.0
"""Local training on sequences: one client's gradient by autograd, whatever its neighbours in the
block, and evaluation from each client's last items."""

import numpy as np
import pytest
import torch

from clients.evaluation import client_scorer
from clients.hosting.node import Node
from clients.steps.sequence import SequenceStep, SequenceStepConfig
from clients.training.one_client import update_of
from clients.training.round import train_clients
from fedrec.errors import ExperimentError
from fedrec.protocol.orders import TrainOrder
from fedrec.protocol.sparse_update import dense_change
from fedrec.rng import stream

SASREC = (
    "model={name='sasrec', width=4, longest=5, blocks=1, loss='binary'}",
    "step={name='sequence'}",
    "split={name='leave-one-out'}",
    "evaluation.fine-tune={epochs=0}",
)
LOSSES = ("softmax", "sampled-softmax", "binary")


@pytest.fixture
def node(load_tiny, tmp_path):
    return lambda *more: Node(load_tiny(*SASREC, *more), 0, 1, tmp_path)


def sequence_of(node, client):
    """A client's positive items in the order of their times, from the dataset itself."""
    data, rows = node.population.interactions, node.population.partition.train_rows
    own = [row for row in rows if data.users[row] == client and data.ratings[row] > 3]
    return torch.from_numpy(data.items[sorted(own, key=lambda row: data.times[row])])


def arrays_of(node):
    return {name: value.numpy() for name, value in node.initial().items()}


def test_one_epoch_is_a_gradient_step_on_the_mean_loss_of_its_places(node):
    made = node("model.loss=softmax", "model.dropout=0.0")
    parameters = made.initial()
    step = SequenceStep(SequenceStepConfig(learning_rate=0.5), made.model, made.device)
    update = update_of(step, parameters, made.population.client(3), stream(0, "x"))
    leaves = {name: value[None].clone().requires_grad_() for name, value in parameters.items()}
    own = sequence_of(made, 3)[-6:]
    assert update.examples == len(own) - 1
    states = made.model.states(leaves, own[None, None, :-1], torch.tensor([[len(own) - 1]]))[0, 0]
    logits = states @ leaves["item.id"][0].T
    loss = torch.nn.functional.cross_entropy(logits, own[1:])
    assert update.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    for (name, _), gradient in zip(leaves.items(), gradients, strict=True):
        torch.testing.assert_close(
            update.delta[name], -0.5 * gradient[0], rtol=1e-4, atol=1e-6, msg=name
        )


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("model", ["sasrec", "gru4rec"])
def test_a_client_does_the_same_in_a_block_and_alone(node, model, loss):
    """With dropout, drawn items and two epochs: the sum over clients is that of each alone."""
    own = f"model={{name='{model}', width=4, longest=5, loss='{loss}'}}"
    made = node(own, "step.epochs=2")
    clients = np.arange(24)
    together = train_clients(made, arrays_of(made), TrainOrder(1, clients)).total
    alone = [
        train_clients(made, arrays_of(made), TrainOrder(1, clients[k : k + 1])) for k in clients
    ]
    for name, start in arrays_of(made).items():
        total = dense_change(together[name], start)
        one_by_one = sum(dense_change(one.total[name], start) for one in alone)
        np.testing.assert_allclose(total, one_by_one, rtol=1e-4, atol=1e-6, err_msg=name)
        assert np.any(total)


def test_with_vectors_a_block_trains_what_a_client_alone_does(node, tmp_path):
    """Alone, drawn items and sequence are rows of the whole table with all projections."""
    items = node().model.schema.num_items
    np.save(tmp_path / "cover.npy", np.random.default_rng(0).normal(size=(items, 3)))
    (tmp_path / "cover.txt").write_text("\n".join(str(item) for item in range(1, items + 1)))
    made = node(
        f"dataset.item-vectors=['{tmp_path / 'cover.npy'}']",
        "model.loss=sampled-softmax",
        "model.dropout=0.0",
    )
    parameters = made.initial()
    step = SequenceStep(SequenceStepConfig(learning_rate=0.5), made.model, made.device)
    update = update_of(step, parameters, made.population.client(3), stream(0, "x"))
    batches = step.batches(made.population.client(3), stream(0, "x"))
    rows = torch.from_numpy(batches.items)[None]
    counts = torch.tensor([[batches.examples]])
    leaves = {name: value[None].clone().requires_grad_() for name, value in parameters.items()}
    drawn = rows[..., : batches.drawn]
    loss = made.model.sequence_loss(leaves, rows[..., batches.drawn :], counts, drawn)
    names = ["item.id", "item.cover"]
    found = torch.autograd.grad(loss.sum() / batches.examples, [leaves[name] for name in names])
    for name, gradient in zip(names, found, strict=True):
        assert gradient.any()
        torch.testing.assert_close(update.delta[name], -0.5 * gradient[0], rtol=1e-4, atol=1e-6)


def test_a_client_without_a_next_item_trains_nothing(node):
    made = node()
    data = made.population.client(3)
    first = data.items[:1], np.ones(1, np.float32), data.items[:1], np.zeros(1, np.int64)
    one = type(data)(3, data.features, *first)
    update = update_of(made.step(made.experiment.step), made.initial(), one, stream(0, "x"))
    assert update.examples == 0
    assert not any(delta.any() for delta in update.delta.values())


@pytest.mark.parametrize("epochs", [0, 2])
def test_evaluation_takes_each_clients_last_items_in_order(node, epochs):
    made = node()
    parameters = made.initial()
    step = SequenceStep(SequenceStepConfig(epochs=epochs), made.model, made.device)
    clients = np.array([2, 5, 7])
    scores = client_scorer(made, step, parameters, 1)(clients)
    for place, client in enumerate(clients.tolist()):
        own = sequence_of(made, client)[-5:]
        moved = {name: torch.zeros_like(value) for name, value in parameters.items()}
        if epochs:
            drawn = stream(0, "fine-tune", client, 1)
            moved = update_of(step, parameters, made.population.client(client), drawn).delta
        tuned = {name: (value + moved[name])[None] for name, value in parameters.items()}
        given = torch.nn.functional.pad(own, (0, 5 - len(own)), value=-1)
        expected = made.model.history_scores(tuned, given[None, None])[0, 0]
        torch.testing.assert_close(scores[place], expected, rtol=1e-4, atol=1e-6)


def test_other_models_are_refused(node):
    with pytest.raises(ExperimentError, match="trains the model"):
        node("model={name='transitions'}").step(node().experiment.step)
