# SPDX-License-Identifier: Apache-2.0
"""The steps of FedGNN, GPFedRec and FedRAP."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from clients.blocks import update_of
from clients.evaluation import requested_items
from clients.node import Node, _training_path
from clients.round import train_clients, train_each
from clients.step import Step, private_names
from clients.steps import personal
from clients.steps.personal import GpfedrecStep
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import load
from fedrec.graphs import tokens
from fedrec.models.base import Model
from fedrec.protocol.messages import ItemQuery, TrainOrder
from fedrec.protocol.updates import ClientArrays, dense_change
from fedrec.rng import stream
from fedrec.training.block import Batches
from tests.clients.oracles import update_under, with_oracle

# A client of FedGNN: the gradient of its local graph, and its clip.

WIDTH, SLOTS = 4, 20
SYSTEM = (
    "model={name='fedgnn', embedding=4}",
    "strategy={name='fedgnn', neighbours=2, history=5}",
    "split={name='leave-one-out'}",
    "evaluation.fine-tune={epochs=0}",
)


@pytest.fixture(autouse=True)
def few_examples(monkeypatch):
    """Several batches of a client's few examples."""
    monkeypatch.setattr(personal, "SHUFFLED_BATCH", 8)


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


def examples(step, data):
    """The distinct items that a client draws in round 1, and their labels."""
    drawn = step.batches(data, stream(0, "client", data.client, 1))
    items, first = np.unique(drawn.items[0, : drawn.sizes[0]], return_index=True)
    return items, drawn.labels[0, first]


def layer_by_hand(targets, sources, parameters, name):
    """Attention of each target over its list of sources, by loops."""
    weight, source, target = (parameters[f"{name}.{p}"] for p in ("weight", "source", "target"))
    out = []
    for own, near in zip(targets, sources, strict=True):
        values = torch.stack([one @ weight for one in near])
        raw = torch.nn.functional.leaky_relu(values @ source + own @ weight @ target, 0.2)
        out.append(torch.softmax(raw, 0) @ values)
    return torch.stack(out)


def test_it_sends_rows_of_likes_and_negatives_and_tokens(local):
    step, start, data, random = local()
    update = update_under(step, start, data, random)
    likes = len(np.unique(data.positives))
    items, labels = examples(step, data)
    named = update.delta["item.id"].any(1).nonzero()[:, 0].numpy()
    assert set(named) <= set(items) and set(items[labels == 1]) == set(data.positives)
    assert 0 < (labels == 0).sum() <= 4 * likes  # two draws may be of one item
    sent = update.delta["third.tokens"][:likes].numpy()
    np.testing.assert_array_equal(sent, tokens(items[labels == 1].tolist(), "fedgnn"))


@pytest.mark.parametrize("neighbours", [0, 2])
def test_without_a_clip_it_is_the_gradient_of_the_whole_graph(local, neighbours):
    """By automatic differentiation of the paper's model; without neighbours it is attention over
    the user's own items."""
    step, start, data, random = local(neighbours)
    items, labels = examples(step, data)
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
    torch.testing.assert_close(
        update.delta["third.user"], start["user.id"] + update.delta["user.id"]
    )


def test_what_is_sent_is_clipped(local):
    step, start, data, random = local(**{"clip-norm": 1e-3})
    sent = update_under(step, start, data, random).delta
    shared = torch.cat(
        [v.flatten() for n, v in sent.items() if n[:5] in ("item.", "items", "users")]
    )
    assert float(shared.abs().max()) == pytest.approx(1e-3)


def test_a_client_learns_in_company_what_it_learns_alone(tiny_experiment):
    """Clients of different sizes, some with more likes than slots, one without likes."""
    table = tiny_experiment() | {
        "model": {"name": "fedgnn", "embedding": WIDTH},
        "step": {"name": "fedgnn", "clip-norm": 0.02},
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


def test_the_missing_guarantee_is_reported_with_the_results(run_tiny):
    result = run_tiny(*SYSTEM, "step={name='fedgnn'}")
    assert any("values have no guarantee" in line for line in result.privacy)


@pytest.mark.parametrize(
    "wrong",
    [
        ("step={name='sgd'}",),
        ("step={name='fedgnn'}", "model={name='mf'}"),
        ("step={name='fedgnn'}", "strategy={name='reptile'}"),
        ("step={name='fedgnn'}", "evaluation.fine-tune={epochs=1}"),
    ],
)
def test_it_works_with_its_own_parts_alone(run_tiny, wrong):
    with pytest.raises(ExperimentError, match="fedgnn"):
        run_tiny(*SYSTEM, *wrong)


# A client of GPFedRec in its limiting cases: without guidance it is plain gradient descent, with
# guidance only it converges to it.


class Mine(Model):
    """A model of a plug-in."""


MODEL_SETTINGS = {"embedding": 3, "hidden": [4]}
MODEL = {"name": "gpfedrec", **MODEL_SETTINGS}
COMMON = {"epochs": 2, "learning-rate": 0.1}


@pytest.fixture
def guided(tiny_experiment):
    """A node with the step, a client's initial parameters, and the client's data."""

    def make(name="gpfedrec", **step):
        table = tiny_experiment() | {"model": MODEL, "step": {"name": name, **COMMON, **step}}
        if name == "sgd":
            table["step"]["batch-size"] = 8
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
    private = set(private_names(step, start))
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
    monkeypatch.setattr("clients.blocks.cut_blocks", lambda *_, **__: map(np.array, parts))
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
        "clients.blocks.cut_blocks",
        lambda sizes, *_, **__: (np.array([i]) for i in range(len(sizes.steps))),
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
    path = _training_path(other, node.model, node.experiment.engine)
    assert callable(other.in_kernel()) and path.name == "blocks"


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


@pytest.mark.parametrize(
    ("step", "model"),
    [
        ("gpfedrec", "model.name = 'gpfedrec'"),
        ("fedrap", "model.name = 'fedrap'"),
        ("vae", "model.name = 'vae'"),
        ("sgd-profile", "model.name = 'privrec-profile'"),
        ("sequence", "trains the model"),
    ],
)
def test_another_model_is_refused(tiny_experiment, step, model):
    node = Node(load(tiny_experiment() | {"step": {"name": step}}), 0, 1, None)
    with pytest.raises(ExperimentError, match=re.escape(model)):
        node.step(node.experiment.step)


def test_a_model_of_a_plug_in_is_named_by_its_class(tiny_experiment):
    node = Node(load(tiny_experiment()), 0, 1, None)

    class Rating(Step):
        trains = Mine
        train_block = None  # type: ignore[assignment]

    with pytest.raises(ExperimentError, match=rf"model\.name = '{__name__}:Mine'\n") as caught:
        Rating(Rating.Config(), node.model, node.device)
    assert caught.value.got == "PrivRec"


# FedRAP in its limiting cases, shared and separate matrix factorization, and against sums by hand.

FEDRAP_STEP_WIDTH = 3
PLAIN = {"apart": 0.0, "sparse": 0.0}
FEDRAP_STEP_COMMON = {"epochs": 2, "learning-rate": 0.1}
FACTORS = {"item.factors": 5.0, "item.bias": 0.0, "bias": 0.0}


@pytest.fixture
def node(tiny_experiment, tmp_path):
    def make(model="fedrap", private=False, **step):
        model = {"name": model, **({"embedding": FEDRAP_STEP_WIDTH} if model == "fedrap" else {})}
        name = {"fedrap": "fedrap", "mf": "sgd"}[model["name"]]
        if model["name"] == "mf":
            model["factors"] = FEDRAP_STEP_WIDTH
        table = tiny_experiment() | {
            "model": model,
            "step": {"name": name, **FEDRAP_STEP_COMMON, **step},
        }
        if name == "sgd":
            table["step"]["batch-size"] = 8
        return Node(load(table), 0, 1, tmp_path if private else None)

    return make


def drawn(items, seed=0):
    random = torch.Generator().manual_seed(seed)
    return {
        "item.id": torch.randn(items, FEDRAP_STEP_WIDTH, generator=random).double(),
        "item.personal": torch.randn(items, FEDRAP_STEP_WIDTH, generator=random).double(),
        "score.weight": torch.randn(FEDRAP_STEP_WIDTH, 1, generator=random).double(),
        "score.bias": torch.randn(1, generator=random).double(),
    }


def both(rap, mf, start, table):
    """Updates of one client: FedRAP's, and those of matrix factorization whose item factors are
    `table`."""
    data = mf.population.client(int(mf.training[0]))
    same = {
        "bias": torch.zeros(1).double(),
        "user.factors": start["score.weight"][:, 0],
        "user.bias": start["score.bias"],
        "item.factors": start[table],
        "item.bias": torch.zeros(len(start[table]), 1).double(),
    }
    found, wanted = (
        update_of(
            one.step(one.experiment.step), given, data, stream(0, "client", data.client, 1)
        ).delta
        for one, given in ((rap, start), (mf, same))
    )
    torch.testing.assert_close(found["score.weight"][:, 0], wanted["user.factors"])
    torch.testing.assert_close(found["score.bias"], wanted["user.bias"])
    torch.testing.assert_close(found[table], wanted["item.factors"])
    assert wanted["item.factors"].any()
    return found


def test_without_a_personal_part_it_is_matrix_factorization_that_is_shared(node):
    rap, mf = node(personal_rate=0.0, shared_rate=5.0, **PLAIN), node("mf", rates=FACTORS)
    start = drawn(mf.population.schema().num_items)
    start["item.personal"].zero_()
    found = both(rap, mf, start, "item.id")
    assert not found["item.personal"].any()


def test_without_a_shared_part_clients_learn_alone(node):
    rap, mf = node(personal_rate=5.0, shared_rate=0.0, **PLAIN), node("mf", rates=FACTORS)
    start = drawn(mf.population.schema().num_items)
    start["item.id"].zero_()
    found = both(rap, mf, start, "item.personal")
    assert not found["item.id"].any()


def test_what_learns_alone_sends_nothing(node):
    alone = node(private=True, shared_rate=0.0)
    arrays = {name: value.numpy() for name, value in alone.initial().items()}
    reply = train_clients(alone, arrays, TrainOrder(1, alone.training))
    assert not any(dense_change(change).any() for change in reply.total.values())
    kept = alone.private.load(int(alone.training[0]), 2)
    assert kept["item.personal"].any() and kept["item.personal"].shape == arrays["item.id"].shape


def test_a_step_is_the_sum_over_examples_by_hand(node):
    """Both regularisers with their weights, also for an item that is in the batch twice."""
    one = node(epochs=1, apart=0.3, sparse=0.2, shared_rate=2.0, personal_rate=3.0)
    step = with_oracle(one).step(one.experiment.step)
    start = drawn(one.population.schema().num_items, 4)
    items, labels = np.array([3, 7, 3, 1]), np.array([1.0, 0.0, 0.0, 1.0])
    moved = {name: np.zeros(value.shape) for name, value in start.items()}
    shared, personal = start["item.id"].numpy(), start["item.personal"].numpy()
    weight, size = start["score.weight"].numpy()[:, 0], len(items)
    for item, label in zip(items, labels, strict=True):
        added = shared[item] + personal[item]
        error = 1 / (1 + math.exp(-added @ weight - float(start["score.bias"]))) - label
        apart = 2 * 0.3 * (personal[item] - shared[item]) / FEDRAP_STEP_WIDTH
        moved["score.weight"][:, 0] -= 0.1 * error * added / size
        moved["score.bias"] -= 0.1 * error / size
        sparse = 0.2 * np.sign(shared[item]) / FEDRAP_STEP_WIDTH
        moved["item.id"][item] -= 0.2 * (error * weight + apart + sparse) / size
        moved["item.personal"][item] -= 0.3 * (error * weight - apart) / size
    found = {name: value.clone() for name, value in start.items()}
    step._descend(found, torch.from_numpy(items), torch.from_numpy(labels))
    for name, value in moved.items():
        np.testing.assert_allclose((found[name] - start[name]).numpy(), value, rtol=1e-6, atol=1e-9)


def test_pfedrec_trains_score_function_and_items_in_turns(tiny_experiment, tmp_path):
    """As one client after the other by autograd, over several batches and epochs."""
    step = {"name": "pfedrec", "epochs": 2, "learning-rate": 0.2, "item-rate": 5.0}
    table = tiny_experiment() | {"model": {"name": "pfedrec"}, "step": step}
    fast, slow = (Node(load(table), 0, 1, tmp_path / name) for name in ("fast", "slow"))
    arrays = {name: value.numpy() for name, value in fast.initial().items()}
    order = TrainOrder(1, fast.training[:9])
    got, wanted = (train_clients(node, arrays, order) for node in (fast, with_oracle(slow)))
    expected = dense_change(wanted.total["item.id"])
    assert np.abs(expected).max() > 0.01 and got.loss == pytest.approx(wanted.loss, rel=1e-5)
    np.testing.assert_allclose(dense_change(got.total["item.id"]), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("terms", [{}, {"apart": 0.6, "sparse": 0.4}])
def test_the_kernel_trains_as_blocks_do_of_fedrap_step(node, tiny_experiment, tmp_path, terms):
    """What is sent, what is kept, and losses, in two rounds."""
    found = {}
    for path in ("kernel", "blocks"):
        step = {
            "name": "fedrap",
            **FEDRAP_STEP_COMMON,
            "shared-rate": 3.0,
            "personal-rate": 5.0,
            **terms,
        }
        table = tiny_experiment() | {
            "model": {"name": "fedrap", "embedding": FEDRAP_STEP_WIDTH},
            "step": step,
        }
        one = Node(load(table | {"engine": {"path": path}}), 0, 1, tmp_path / path)
        assert one.paths == {"fedrap": path}
        arrays = {n: v.float().numpy() for n, v in drawn(one.population.schema().num_items).items()}
        replies = [train_clients(one, arrays, TrainOrder(n, one.training[:9])) for n in (1, 9)]
        sent = [dense_change(reply.total["item.id"]) for reply in replies]
        kept = [one.private.load(int(client), 10) for client in one.training[:9]]
        found[path] = sent, kept, [reply.loss for reply in replies]
    (sent, kept, losses), (wanted, wanted_kept, wanted_losses) = found["kernel"], found["blocks"]
    assert np.abs(wanted).max() > 0.01
    np.testing.assert_allclose(sent, wanted, rtol=1e-4, atol=1e-5)
    assert losses == pytest.approx(wanted_losses, rel=1e-5)
    for own, other in zip(kept, wanted_kept, strict=True):
        assert set(own) == set(other) == {"item.personal", "score.weight", "score.bias"}
        for name, value in own.items():
            np.testing.assert_allclose(value, other[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_the_weights_rise_with_the_rounds(node):
    rap = node(apart=0.5, sparse=0.1)
    first, later = (rap.step(rap.experiment.step, number).config for number in (1, 11))
    assert (first.apart, first.sparse, first.learning_rate) == (0.0, 0.0, 0.1)
    assert later.apart == pytest.approx(0.5 * math.tanh(1))
    assert later.sparse == pytest.approx(0.1 * math.tanh(1))


def test_diverging_parts_are_reported(node):
    wild = node(private=True, apart=500.0, epochs=200)
    arrays = {name: value.numpy() for name, value in wild.initial().items()}
    with pytest.raises(ExperimentError, match="diverged"):
        train_clients(wild, arrays, TrainOrder(9, wild.training))
