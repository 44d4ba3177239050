# SPDX-License-Identifier: Apache-2.0
"""A client of FedGNN: the gradient of its local graph, clip and noise, and their guarantee."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from clients.hosting.node import Node
from clients.steps.personal.fedgnn import FedgnnStepConfig
from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from fedrec.graphs.third_party import tokens
from fedrec.rng import stream
from strategies.per_client.fedgnn import FedgnnStrategy, FedgnnStrategyConfig
from tests.clients.oracles import update_under

WIDTH, SLOTS = 4, 20
SYSTEM = (
    "model={name='fedgnn', embedding=4}",
    "strategy={name='fedgnn', neighbours=2, history=5}",
    "split={name='leave-one-out'}",
    "evaluation.fine-tune={epochs=0}",
)


@pytest.fixture
def local(tiny_experiment):
    """Step, a client's initial parameters, its data, and a random stream."""

    def make(neighbours=2, **step):
        table = tiny_experiment() | {
            "model": {"name": "fedgnn", "embedding": WIDTH},
            "step": {"name": "fedgnn", "clip-norm": 1e6, **step},
        }
        node = Node(load(table), 0, 1, None)
        start = {n: v.double() for n, v in node.initial().items()}
        random = torch.Generator().manual_seed(3)
        start["third.neighbours"] = torch.randn(
            SLOTS, neighbours, WIDTH, generator=random, dtype=torch.float64
        )
        start["third.counts"] = torch.full((SLOTS,), neighbours)
        start["third.tokens"] = torch.zeros(SLOTS, dtype=torch.int64)
        start["third.user"] = torch.zeros(WIDTH).double()
        data = node.population.client(int(node.training[0]))
        return node.step(node.experiment.step), start, data, stream(0, "client", data.client, 1)

    return make


def layer_by_hand(targets, sources, parameters, name):
    """Attention of each target over its list of sources, by loops."""
    weight, source, target = (parameters[f"{name}.{p}"] for p in ("weight", "source", "target"))
    out = []
    for own, near in zip(targets, sources, strict=True):
        values = torch.stack([one @ weight for one in near])
        raw = torch.nn.functional.leaky_relu(values @ source + own @ weight @ target, 0.2)
        out.append(torch.softmax(raw, 0) @ values)
    return torch.stack(out)


def test_it_sends_rows_of_likes_and_negatives_and_tokens_under_the_key(local):
    step, start, data, random = local(negatives=2, **{"token-key": "another"})
    update = update_under(step, start, data, random)
    likes = len(np.unique(data.positives))
    assert update.delta["item.id"].any(1).sum() <= 3 * likes
    items, labels = step._examples(data, stream(0, "client", data.client, 1))
    assert 2 * likes - 2 <= (labels == 0).sum() <= 2 * likes  # two draws may be of one item
    sent = update.delta["third.tokens"][:likes].numpy()
    np.testing.assert_array_equal(sent, tokens(items[labels == 1].tolist(), "another"))


@pytest.mark.parametrize("neighbours", [0, 2])
def test_without_clip_and_noise_it_is_the_gradient_of_the_whole_graph(local, neighbours):
    """By automatic differentiation of the paper's model; without neighbours it is attention over
    the user's own items."""
    step, start, data, random = local(neighbours)
    items, labels = step._examples(data, stream(0, "client", data.client, 1))
    leaves = {
        n: v.clone().requires_grad_()
        for n, v in start.items()
        if not n.startswith("third.") and n != "user.vector"
    }
    user, liked = leaves["user.id"], leaves["item.id"][torch.from_numpy(items[labels == 1])]
    near = [[user, *start["third.neighbours"][place]] for place in range(len(liked))]
    met = liked + layer_by_hand(liked, near, leaves, "items")
    vector = user + layer_by_hand(user[None], [list(met)], leaves, "users")[0]
    logits = leaves["item.id"][torch.from_numpy(items)] @ vector
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, torch.from_numpy(labels).double()
    )
    wanted = torch.autograd.grad(loss, list(leaves.values()))
    update = update_under(step, start, data, random)
    for (name, _), gradient in zip(leaves.items(), wanted, strict=True):
        torch.testing.assert_close(update.delta[name], -gradient)
        assert gradient.any() or name.endswith(("source", "target"))
    kept = start["user.vector"] + update.delta["user.vector"]
    torch.testing.assert_close(kept, vector.detach())
    assert update.loss == pytest.approx(float(loss.detach()))
    sent = update.delta["third.tokens"][: len(liked)].numpy()
    np.testing.assert_array_equal(sent, tokens(items[labels == 1].tolist(), "fedgnn"))
    torch.testing.assert_close(
        update.delta["third.user"], start["user.id"] + update.delta["user.id"]
    )


@pytest.mark.parametrize("clip", ["coordinate", "message"])
def test_what_is_sent_is_clipped(local, clip):
    step, start, data, random = local(clip=clip, **{"clip-norm": 1e-3})
    sent = update_under(step, start, data, random).delta
    shared = torch.cat(
        [v.flatten() for n, v in sent.items() if n[:5] in ("item.", "items", "users")]
    )
    if clip == "coordinate":
        assert float(shared.abs().max()) == pytest.approx(1e-3)
    else:
        assert float(shared.abs().sum()) == pytest.approx(1e-3)


def test_noise_is_on_every_number_that_is_sent_and_has_its_scale(local):
    """Mean absolute value of Laplace noise is its scale; rows that were not named have none."""
    step, start, data, random = local(noise=0.5, pseudo=10)
    plain, _, _, again = local(pseudo=10)
    noisy = update_under(step, start, data, random).delta
    clean = update_under(plain, start, data, again).delta
    named = clean["item.id"].any(dim=-1)
    assert not noisy["item.id"][~named].any() and not named.all()
    changes = {name: noisy[name] - clean[name] for name in ("items.weight", "users.source")}
    differences = [
        (noisy["item.id"] - clean["item.id"])[named].flatten(),
        *(change.flatten() for change in changes.values()),
    ]
    assert all(bool(difference.all()) for difference in differences)
    assert float(torch.cat(differences).abs().mean()) == pytest.approx(0.5, rel=0.3)
    assert torch.equal(noisy["user.id"], clean["user.id"])


def test_pseudo_items_have_rows_and_no_part_in_the_loss(local):
    step, start, data, random = local(pseudo=6)
    plain, _, _, again = local()
    items, labels = step._examples(data, stream(0, "client", data.client, 1))
    made = torch.from_numpy(items[labels < 0])
    found, wanted = update_under(step, start, data, random), update_under(plain, start, data, again)
    assert len(made) and found.delta["item.id"][made].all()
    assert found.loss == pytest.approx(wanted.loss) and found.examples == wanted.examples
    torch.testing.assert_close(found.delta["items.weight"], wanted.delta["items.weight"])


@pytest.mark.parametrize(
    "settings",
    [
        {"clip-norm": 1e6},
        {"clip-norm": 0.02, "pseudo": 5, "noise": 0.1},
        {"clip-norm": 0.1, "clip": "message", "pseudo": 4},
    ],
    ids=["plain", "pseudo items and noise", "whole messages"],
)
def test_a_client_learns_in_company_what_it_learns_alone(tiny_experiment, settings):
    """Clients of different sizes, some with more likes than slots, one without likes."""
    table = tiny_experiment() | {
        "model": {"name": "fedgnn", "embedding": WIDTH},
        "step": {"name": "fedgnn", **settings},
    }
    node = Node(load(table), 0, 1, None)
    step = node.step(node.experiment.step)
    clients = [node.population.client(client) for client in range(7)]
    drawn = [step.batches(data, stream(0, "client", data.client, 1)) for data in clients]
    drawn[3] = replace(drawn[3], labels=np.zeros_like(drawn[3].labels))
    users = [data.features for data in clients]
    block = step.block(users, drawn, step.device)
    slots = 4
    random = torch.Generator().manual_seed(1)
    shared = {name: value.double() for name, value in node.initial().items()}
    given = {
        name: value[block.touched] if name == "item.id" else value.expand(7, *value.shape).clone()
        for name, value in shared.items()
    }
    given["user.id"] = torch.randn(7, WIDTH, generator=random).double()
    given["third.neighbours"] = torch.randn(7, slots, 2, WIDTH, generator=random).double()
    given["third.counts"] = torch.randint(3, (7, slots), generator=random)
    given["third.tokens"] = torch.zeros(7, slots, dtype=torch.int64)
    given["third.user"] = torch.zeros(7, WIDTH).double()
    together = step.train_block({}, block, given)
    assert sum(bool(np.isfinite(loss)) for loss in together.losses()) >= 5
    assert math.isnan(together.losses()[3]) and not together.changes_of(3)["user.id"].any()
    for place in range(7):
        alone = step.block(users[place : place + 1], drawn[place : place + 1], step.device)
        count = block.touched_counts[place]
        own = {name: value[place : place + 1] for name, value in given.items()}
        own["item.id"] = own["item.id"][:, :count]
        wanted = step.train_block({}, alone, own)
        np.testing.assert_allclose(together.losses()[place], wanted.losses()[0])
        found = together.changes_of(place)
        for name, value in wanted.changes_of(0).items():
            mine = found[name][:count] if name == "item.id" else found[name]
            torch.testing.assert_close(mine, value)


def test_the_cost_of_the_noise_is_composed():
    """Ten messages of 1,000 coordinates with the paper's S and b."""
    paper = FedgnnStepConfig(clip_norm=0.1, noise=0.2)
    assert paper.spent(1000, 10) == pytest.approx(10_000)
    whole = FedgnnStepConfig(clip="message", clip_norm=0.1, noise=0.2)
    assert whole.spent(1000, 10) == pytest.approx(10)
    assert math.isinf(FedgnnStepConfig().spent(1, 1))
    sizes = {"item.id": np.zeros((30, 4)), "items.weight": np.zeros((4, 4)), "user.id": np.zeros(4)}
    lines = FedgnnStrategy.remarks(FedgnnStrategyConfig(), paper, sizes, 5)
    assert "2 S / b = 1." in lines[1] and "up to 136 numbers cost 136" in lines[1]
    assert "5 rounds 680 " in lines[1]
    assert (
        "no noise"
        in FedgnnStrategy.remarks(FedgnnStrategyConfig(), FedgnnStepConfig(), sizes, 5)[1]
    )


def test_the_epsilon_is_reported_with_the_results(run_tiny):
    result = run_tiny(*SYSTEM, "step={name='fedgnn', noise=0.2}")
    assert any("2 S / b = 1." in line for line in result.privacy)


@pytest.mark.parametrize(
    "wrong",
    [
        ("step={name='sgd'}",),
        ("step={name='fedgnn'}", "model={name='mf'}"),
        ("step={name='fedgnn'}", "strategy={name='reptile'}"),
        ("step={name='fedgnn'}", "evaluation.fine-tune={epochs=1}"),
        ("step={name='fedgnn'}", "privacy={clip-norm=1.0, noise-multiplier=1.0}"),
    ],
)
def test_it_works_with_its_own_parts_alone(run_tiny, wrong):
    with pytest.raises(ExperimentError, match="fedgnn"):
        run_tiny(*SYSTEM, *wrong)
