# SPDX-License-Identifier: Apache-2.0
"""FedRAP in its limiting cases, shared and separate matrix factorization, and against sums by
hand."""

import math

import numpy as np
import pytest
import torch

from clients.hosting.node import Node
from clients.training.one_client import update_of
from clients.training.round import train_clients
from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from fedrec.protocol.orders import TrainOrder
from fedrec.protocol.sparse_update import dense_change
from fedrec.rng import stream
from tests.clients.oracles import with_oracle

WIDTH = 3
PLAIN = {"apart": 0.0, "sparse": 0.0}
COMMON = {"epochs": 2, "batch-size": 8, "negatives": 2, "learning-rate": 0.1}
FACTORS = {"item.factors": 5.0, "item.bias": 0.0, "bias": 0.0}


@pytest.fixture
def node(tiny_experiment, tmp_path):
    def make(model="fedrap", private=False, **step):
        model = {"name": model, **({"embedding": WIDTH} if model == "fedrap" else {})}
        name = {"fedrap": "fedrap", "mf": "sgd"}[model["name"]]
        if model["name"] == "mf":
            model["factors"] = WIDTH
        table = tiny_experiment() | {"model": model, "step": {"name": name, **COMMON, **step}}
        return Node(load(table), 0, 1, tmp_path if private else None)

    return make


def drawn(items, seed=0):
    random = torch.Generator().manual_seed(seed)
    return {
        "item.id": torch.randn(items, WIDTH, generator=random).double(),
        "item.personal": torch.randn(items, WIDTH, generator=random).double(),
        "score.weight": torch.randn(WIDTH, 1, generator=random).double(),
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
    for name, change in reply.total.items():
        assert not dense_change(change, arrays[name]).any()
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
        apart = 2 * 0.3 * (personal[item] - shared[item]) / WIDTH
        moved["score.weight"][:, 0] -= 0.1 * error * added / size
        moved["score.bias"] -= 0.1 * error / size
        sparse = 0.2 * np.sign(shared[item]) / WIDTH
        moved["item.id"][item] -= 0.2 * (error * weight + apart + sparse) / size
        moved["item.personal"][item] -= 0.3 * (error * weight - apart) / size
    found = {name: value.clone() for name, value in start.items()}
    step._descend(found, torch.from_numpy(items), torch.from_numpy(labels))
    for name, value in moved.items():
        np.testing.assert_allclose((found[name] - start[name]).numpy(), value, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("terms", [{}, {"apart": 0.3, "sparse": 0.2, "schedule": "constant"}])
def test_the_kernel_trains_as_blocks_do(node, tiny_experiment, tmp_path, terms):
    """What is sent, what is kept, and losses, in two rounds."""
    found = {}
    for path in ("kernel", "blocks"):
        step = {"name": "fedrap", **COMMON, "shared-rate": 3.0, "personal-rate": 5.0, **terms}
        table = tiny_experiment() | {"model": {"name": "fedrap", "embedding": WIDTH}, "step": step}
        one = Node(load(table | {"engine": {"path": path}}), 0, 1, tmp_path / path)
        assert one.paths == {"fedrap": path}
        arrays = {n: v.float().numpy() for n, v in drawn(one.population.schema().num_items).items()}
        replies = [train_clients(one, arrays, TrainOrder(n, one.training[:9])) for n in (1, 2)]
        sent = [dense_change(reply.total["item.id"], arrays["item.id"]) for reply in replies]
        kept = [one.private.load(int(client), 3) for client in one.training[:9]]
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
    step = node(apart=0.5, sparse=0.1, decay=0.9).step
    rising = step(node(apart=0.5, sparse=0.1, decay=0.9).experiment.step)
    first, later = rising.in_round(1).config, rising.in_round(11).config
    assert (first.apart, first.sparse, first.learning_rate) == (0.0, 0.0, 0.1)
    assert later.apart == pytest.approx(0.5 * math.tanh(1))
    assert later.sparse == pytest.approx(0.1 * math.tanh(1))
    assert later.learning_rate == pytest.approx(0.1 * 0.9**10)
    constant = node(apart=0.5, schedule="constant")
    assert constant.step(constant.experiment.step).in_round(1).config.apart == 0.5


def test_diverging_parts_are_reported(node):
    wild = node(private=True, apart=50.0, schedule="constant", epochs=200)
    arrays = {name: value.numpy() for name, value in wild.initial().items()}
    with pytest.raises(ExperimentError, match="diverged"):
        train_clients(wild, arrays, TrainOrder(1, wild.training))


def test_another_model_is_refused(tiny_experiment):
    table = tiny_experiment() | {"step": {"name": "fedrap"}}
    one = Node(load(table), 0, 1, None)
    with pytest.raises(ExperimentError, match=r"model\.name = 'fedrap'"):
        one.step(one.experiment.step)
