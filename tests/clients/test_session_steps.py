# SPDX-License-Identifier: Apache-2.0
"""The contrastive and the joint step, against plain SGD, by hand, and in blocks."""

import math

import numpy as np
import pytest
import torch

from clients.hosting.node import Node
from clients.steps.contrastive import Contrastive, ContrastiveConfig
from clients.steps.joint import Joint, JointConfig
from clients.steps.sgd import Sgd, SgdConfig
from clients.training.blocks import train_in_blocks
from clients.training.one_client import update_of
from clients.training.round import train_clients
from fedrec.errors import ExperimentError
from fedrec.models.privrec import PrivRec, PrivRecConfig
from fedrec.pretext.contrast import item_loss, segment_loss
from fedrec.protocol.orders import TrainOrder
from fedrec.protocol.sparse_update import dense_change
from fedrec.rng import stream

SMALL = {
    "session-length": 5,
    "masks": 2,
    "item-negatives": 3,
    "segment-length": 2,
    "segment-negatives": 2,
    "hidden": 6,
    "learning-rate": 0.2,
    "epochs": 2,
}
SETTINGS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "weight-decay": {"weight-decay": 0.1},
    "proximal": {"proximal-mu": 0.7},
    "everything": {"momentum": 0.5, "weight-decay": 0.05, "proximal-mu": 0.3, "sessions-of": "all"},
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
    "low-rated": {"low-rated": "negative", "sessions-of": "all", "lambda-dssm": 0.3},
    "no-negatives": {"negatives": 0},
    "anew": {"negatives-policy": "epoch"},
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
    return reply, {name: dense_change(change, arrays[name]) for name, change in reply.total.items()}


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
    ("name", "case"), [(n, c) for n in ("contrastive", "joint") for c in ("plain", "everything")]
)
@pytest.mark.parametrize("task", ["ranking", "rating"])
def test_odd_clients(pair, world, name, case, task):
    """Client 0 has one positive, 1 the same item twice, 2 only a low rating, 3 nothing at all."""
    fast, slow, parameters = pair(name, case, world(task))
    step, reference = fast.step(fast.experiment.step), slow.step(slow.experiment.step)
    seen = 0
    for places, trained in train_in_blocks(
        fast, step, fast.path(step), parameters, np.arange(4), "client", 1
    ):
        for member, place in enumerate(places):
            data = fast.population.client(place)
            update = update_of(reference, parameters, data, stream(0, "client", place, 1))
            assert_same(
                {n: v[0] - parameters[n] for n, v in trained.parameters_of(member).items()},
                update.delta,
            )
            norm = math.sqrt(
                sum(float(delta.double().square().sum()) for delta in update.delta.values())
            )
            assert float(trained.norms()[member]) == pytest.approx(norm, rel=1e-4, abs=1e-7)
            loss = trained.losses()[member]
            assert (math.isnan(loss) and math.isnan(update.loss)) or loss == pytest.approx(
                update.loss, rel=1e-4
            )
            assert trained.block.examples[member] == update.examples
            seen += 1
    assert seen == 4


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
            parameters | made.added_parameters(parameters, torch.Generator().manual_seed(2)),
            population,
        )

    return step


def test_contrastive_training_moves_the_item_embedding_and_the_encoders_alone(make):
    step, parameters, population = make(Contrastive, ContrastiveConfig, weight_decay=0.1)
    update = update_of(step, parameters, population.client(1), stream(0, "client", 1, 1))
    moved = {name for name, delta in update.delta.items() if delta.any()}
    assert moved == {"item.id", *(name for name in parameters if name.startswith("session."))}


def test_directions_have_no_encoders_and_move_the_item_embedding_alone(make):
    step, parameters, population = make(Contrastive, ContrastiveConfig, encoder="mean")
    assert not any(name.startswith("session.") for name in parameters)
    update = update_of(step, parameters, population.client(1), stream(0, "client", 1, 1))
    assert {name for name, delta in update.delta.items() if delta.any()} == {"item.id"}


def test_local_sgd_leaves_the_encoders_alone(make):
    step, _, population = make(Sgd, SgdConfig, weight_decay=0.1)
    _, parameters, _ = make(Contrastive, ContrastiveConfig)
    update = update_of(step, parameters, population.client(1), stream(0, "client", 1, 1))
    still = {name for name, delta in update.delta.items() if not delta.any()}
    assert still == {name for name in parameters if name.startswith("session.")} and len(still) == 7


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


def test_the_joint_gradient_is_the_weighted_sum_of_both(make):
    """With one batch in one epoch, equation 11 and the updates of plain SGD are linear."""
    once = {"epochs": 1, "batch_size": 1000, "negatives": 0}
    both, parameters, population = make(
        Joint, JointConfig, **once, lambda_dssm=0.3, lambda_im=0.5, lambda_sm=2.0
    )
    alone, _, _ = make(Sgd, SgdConfig, **once)
    data = population.client(1)
    found = update_of(both, parameters, data, stream(0, "client", 1, 1))
    supervised = update_of(alone, parameters, data, stream(0, "client", 1, 1))
    ((_, views),) = both._joint_epochs(data, stream(0, "client", 1, 1))
    leaves = {
        name: value.clone().unsqueeze(0).requires_grad_() for name, value in parameters.items()
    }
    own = both.task.loss_from_table(leaves, torch.tensor(views[None]))
    gradients = torch.autograd.grad(
        own.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    for name, gradient in zip(leaves, gradients, strict=True):
        expected = 0.3 * supervised.delta[name] - 0.2 * gradient[0]
        torch.testing.assert_close(found.delta[name], expected, rtol=1e-4, atol=1e-6)
    assert found.loss == pytest.approx(0.3 * supervised.loss + own.item(), rel=1e-5)


def test_equation_10_weighs_the_losses_on_items_and_on_segments(make):
    step, parameters, population = make(
        Contrastive, ContrastiveConfig, lambda_im=0.5, lambda_sm=2.0
    )
    views = torch.tensor(step.task.views(population.client(1), stream(0, "x"))[None])
    own = {name: value.unsqueeze(0) for name, value in parameters.items()}
    rows, present = own["item.id"][:, views[0].clamp(min=0)], views >= 0
    items, segments = (
        measure(own, rows, present, step.task.layout) for measure in (item_loss, segment_loss)
    )
    assert step.task.loss_from_table(own, views).item() == pytest.approx(
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
    step, _, population = make(Contrastive, ContrastiveConfig, sessions_of="all", masks=1)
    data = population.client(0)
    assert data.items.tolist() == [0, 1]
    for times, order in ((None, [0, 1]), ([5, 2], [1, 0]), ([7, 7], [0, 1])):
        dated = type(data)(
            data.client,
            data.features,
            data.items,
            data.labels,
            data.positives,
            times and np.array(times),
        )
        views = step.task.views(dated, stream(0, "x"))
        masked, true = views[0, :2].tolist(), views[0, 5]
        assert true in order and masked[order.index(true)] not in order
        assert masked[1 - order.index(true)] == order[1 - order.index(true)]


def test_an_item_table_that_the_model_has_not_is_refused(make):
    with pytest.raises(ExperimentError) as caught:
        make(Contrastive, ContrastiveConfig, item_table="item.ids")
    assert caught.value.fix == "did you mean 'item.id'?"


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
