# SPDX-License-Identifier: Apache-2.0
"""Steps on a client's sequence and sessions."""

import numpy as np
import pytest
import torch

from clients.blocks import train_in_blocks, update_of
from clients.evaluation import client_scorer
from clients.node import Node
from clients.round import train_clients
from clients.steps.descent import Contrastive, ContrastiveConfig
from clients.steps.sequence import Joint, JointConfig, SequenceStep, SequenceStepConfig
from clients.steps.sgd import Sgd, SgdConfig
from fedrec.errors import ExperimentError
from fedrec.models.privrec import PrivRec, PrivRecConfig
from fedrec.models.sequential import sequence_loss
from fedrec.protocol.messages import TrainOrder
from fedrec.protocol.updates import dense_change
from fedrec.rng import stream
from tests.clients.oracles import loss_from_table
from tests.clients.rounding import assert_members_alike

# Local training on sequences: one client's gradient by autograd, whatever its neighbours in the
# block, and evaluation from each client's last items.

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
    inputs = leaves["item.id"][:, own[:-1]][None] * made.model.config.width**0.5
    states = made.model.encode(
        leaves, inputs, torch.tensor([[len(own) - 1]]), lambda states: states
    )
    logits = states[0, 0] @ leaves["item.id"][0].T
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
    for name in arrays_of(made):
        total = dense_change(together[name])
        one_by_one = sum(dense_change(one.total[name]) for one in alone)
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
    loss = sequence_loss(made.model, leaves, rows, batches.drawn, counts, [])
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


# The contrastive and the joint step, against plain SGD, by hand, and in blocks.

SMALL = {
    "session-length": 5,
    "masks": 2,
    "item-negatives": 3,
    "hidden": 6,
    "learning-rate": 0.2,
    "epochs": 2,
}
SETTINGS = {
    "plain": {},
    "proximal": {"proximal-mu": 0.7},
    "items-only": {"lambda-sm": 0.0},
    "segments-only": {"lambda-im": 0.0},
    "large-batches": {"batch-size": 100},
    "no-epoch": {"epochs": 0},
    "silent": {"lambda-im": 0.0, "lambda-sm": 0.0},
    "directions": {"encoder": "mean", "temperature": 0.2, "masked-place": "empty"},
    "directions-of-items": {"encoder": "mean", "temperature": 0.5, "lambda-sm": 0.0},
    "empty": {"masked-place": "empty", "temperature": 0.5},
}
JOINT_ONLY = {
    "low-rated": {"low-rated": "negative"},
    "no-negatives": {"negatives": 0},
    "late": {"late-parameters": ["item.id", "layer1.*"], "rates": {"layer0.*": 0.5}},
}
CASES = [(name, case) for name in ("contrastive", "joint") for case in SETTINGS] + [
    ("joint", case) for case in JOINT_ONLY
]


@pytest.fixture
def pair(load_tiny, tiny_experiment):
    """Two nodes that differ only in the training path, and the initial parameters with the
    encoders."""

    def make(name, case, population=None):
        options = {"batch-size": 4, **SMALL, **{**SETTINGS, **JOINT_ONLY}[case]}
        table = (
            "{"
            + ", ".join([f'name = "{name}"', *(f"{k} = {toml(v)}" for k, v in options.items())])
            + "}"
        )
        nodes = [
            Node(
                load_tiny(f"engine.path={path}", f"step={table}", "evaluation.fine-tune={}"),
                0,
                1,
                None,
            )
            for path in ("auto", "reference")
        ]
        for node in nodes:
            if population is not None:
                node.__dict__["population"] = population
        return *nodes, nodes[1].initial()

    return make


def toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}" = {one!r}' for key, one in value.items()) + "}"
    return repr(value)


def sums(node, arrays, order):
    """A node's reply, and its sums as whole arrays."""
    reply = train_clients(node, arrays, order)
    return reply, {name: dense_change(change) for name, change in reply.total.items()}


def assert_same(got, expected):
    assert set(got) == set(expected)
    for name, value in expected.items():
        wanted = torch.as_tensor(value)
        # sums close to 0 have few correct digits
        near_zero = 2e-6 * max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(torch.as_tensor(got[name]), wanted, rtol=1e-4, atol=near_zero)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), CASES)
def test_sums_in_blocks_equal_those_of_one_client_after_the_other(pair, name, case):
    fast, slow, parameters = pair(name, case)
    arrays = {key: value.numpy() for key, value in parameters.items()}
    order = TrainOrder(1, np.arange(18), "examples")
    (got, total), (expected, expected_total) = sums(fast, arrays, order), sums(slow, arrays, order)
    assert_same(total, expected_total)
    assert (got.clients, got.weight, got.examples) == (
        expected.clients,
        expected.weight,
        expected.examples,
    )
    assert got.losses == expected.losses and got.loss == pytest.approx(expected.loss, rel=1e-4)
    idle = case == "no-epoch" or (case == "silent" and name == "contrastive")
    assert idle != any(np.abs(value).max() > 1e-3 for value in expected_total.values())


@pytest.mark.parametrize(
    ("name", "case"), [(n, c) for n in ("contrastive", "joint") for c in ("plain", "proximal")]
)
@pytest.mark.parametrize("task", ["ranking", "rating"])
def test_odd_clients(pair, world, name, case, task):
    """Client 0 has one positive, 1 the same item twice, 2 only a low rating, 3 nothing at all."""
    fast, slow, parameters = pair(name, case, world(task))
    reference = slow.step(slow.experiment.step)
    data = [fast.population.client(client) for client in range(4)]
    assert_members_alike(fast, reference, parameters, data, assert_same)


def test_one_client_with_more_than_everyone_else(pair, load_tiny):
    """A client with half of the catalogue and clients with a few items, in one block."""
    fast, slow, parameters = pair("joint", "plain")
    counts = [len(fast.population.client(client).items) for client in range(18)]
    clients = np.sort(np.argsort(counts)[[0, 1, -1]])
    assert max(counts) >= 3 * sorted(counts)[1]
    arrays = {key: value.numpy() for key, value in parameters.items()}
    order = TrainOrder(1, clients, "uniform")
    assert_same(sums(fast, arrays, order)[1], sums(slow, arrays, order)[1])


@pytest.fixture
def make(world):
    """A step of this class with small settings, its parameters with those of the encoders, and the
    population."""

    def step(kind, config, **settings):
        population = world("ranking")
        model = PrivRec(PrivRecConfig(embedding=3, hidden=(5,)), population.schema())
        parameters = model.initial(torch.Generator().manual_seed(1))
        chosen = {key.replace("-", "_"): value for key, value in SMALL.items()} | settings
        known = {key: value for key, value in chosen.items() if key in config.model_fields}
        made = kind(config(**known), model, torch.device("cpu"))
        return (
            made,
            parameters | made.prepare(parameters, torch.Generator().manual_seed(2)),
            population,
        )

    return step


def test_contrastive_training_moves_the_item_embedding_and_the_encoders_alone(make):
    step, parameters, population = make(Contrastive, ContrastiveConfig)
    update = update_of(step, parameters, population.client(1), stream(0, "client", 1, 1))
    moved = {name for name, delta in update.delta.items() if delta.any()}
    assert moved == {"item.id", *(name for name in parameters if name.startswith("session."))}


def test_the_joint_step_without_self_supervision_is_local_sgd(make):
    joint, parameters, population = make(Joint, JointConfig, lambda_im=0.0, lambda_sm=0.0)
    plain, _, _ = make(Sgd, SgdConfig)
    for client in range(4):
        data, random = (
            population.client(client),
            lambda client=client: stream(0, "client", client, 1),
        )
        assert_same(
            update_of(joint, parameters, data, random()).delta,
            update_of(plain, parameters, data, random()).delta,
        )


def test_the_joint_gradient_is_the_sum_of_both(make):
    """With one batch in one epoch, equation 11 and the updates of plain SGD are linear."""
    once = {"epochs": 1, "batch_size": 1000, "negatives": 0}
    both, parameters, population = make(Joint, JointConfig, **once, lambda_im=0.5, lambda_sm=2.0)
    alone, _, _ = make(Sgd, SgdConfig, **once)
    data = population.client(1)
    found = update_of(both, parameters, data, stream(0, "client", 1, 1))
    supervised = update_of(alone, parameters, data, stream(0, "client", 1, 1))
    ((_, views),) = both._joint_epochs(data, stream(0, "client", 1, 1))
    leaves = {
        name: value.clone().unsqueeze(0).requires_grad_() for name, value in parameters.items()
    }
    own = loss_from_table(both.task, leaves, torch.tensor(views[None]))
    gradients = torch.autograd.grad(
        own.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    for name, gradient in zip(leaves, gradients, strict=True):
        expected = supervised.delta[name] - 0.2 * gradient[0]
        torch.testing.assert_close(found.delta[name], expected, rtol=1e-4, atol=1e-6)
    assert found.loss == pytest.approx(supervised.loss + own.item(), rel=1e-5)


def test_equation_10_weighs_the_losses_on_items_and_on_segments(make):
    step, parameters, population = make(
        Contrastive, ContrastiveConfig, lambda_im=0.5, lambda_sm=2.0
    )
    views = torch.tensor(step.task.views(population.client(1), stream(0, "x"))[None])
    own = {name: value.unsqueeze(0) for name, value in parameters.items()}
    rows, present = own["item.id"][:, views[0].clamp(min=0)], views >= 0
    measures = step.task.item_loss, step.task.segment_loss
    items, segments = (measure(own, rows, present) for measure in measures)
    assert loss_from_table(step.task, own, views).item() == pytest.approx(
        (0.5 * items + 2 * segments).item()
    )
    assert items.item() != pytest.approx(segments.item(), rel=0.01)


def test_a_client_trained_in_a_block_has_the_encoders_of_the_start(load_tiny):
    staged = (
        "strategy={name='two-stage', stage-one={rounds=1, step={name='contrastive', hidden=6}}}"
    )
    node = Node(load_tiny(staged), 0, 1, None)
    parameters = node.initial()
    step = node.step(node.experiment.step)
    for _, trained in train_in_blocks(
        node, step, node.path(step), parameters, np.arange(3), "client", 1
    ):
        own = trained.parameters_of(0)
        assert set(own) == set(parameters)
        assert not torch.equal(own["layer0.bias"][0], parameters["layer0.bias"])
        assert all(
            torch.equal(own[name][0], parameters[name])
            for name in parameters
            if name.startswith("session.")
        )


def test_views_follow_the_order_in_time(make):
    step, _, population = make(Contrastive, ContrastiveConfig, masks=1)
    data = population.client(0)
    assert data.items.tolist() == [0, 1]
    for times, order in ((None, [0, 1]), ([5, 2], [1, 0]), ([7, 7], [0, 1])):
        dated = type(data)(
            data.client,
            data.features,
            data.items,
            data.labels,
            data.items,
            times and np.array(times),
        )
        views = step.task.views(dated, stream(0, "x"))
        masked, true = views[0, :2].tolist(), views[0, 5]
        assert true in order and masked[order.index(true)] not in order
        assert masked[1 - order.index(true)] == order[1 - order.index(true)]


def test_initial_parameters_hold_the_encoders_of_every_step(load_tiny):
    plain = Node(load_tiny(), 0, 1, None)
    nested = (
        "strategy={name='two-stage', stage-one={rounds=1, step={name='contrastive', hidden=6}}}"
    )
    staged = Node(load_tiny(nested), 0, 1, None)
    one, other = plain.initial(), staged.initial()
    assert set(other) - set(one) == {name for name in other if name.startswith("session.")} != set()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert other["session.item0.bias"].shape == (6,)
    with pytest.raises(ExperimentError, match="disagree about parameter"):
        Node(load_tiny(nested, "step.name=joint"), 0, 1, None).initial()
