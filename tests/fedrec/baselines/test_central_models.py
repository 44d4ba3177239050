# SPDX-License-Identifier: Apache-2.0
"""Models trained in one place: of the federation, autoencoders, LightGCN and NeuMF."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedrec.baselines.base import Histories
from fedrec.baselines.pairwise import _Graph
from fedrec.baselines.training import TrainingConfig, Triples, train
from fedrec.data.client_data import nth_outside
from fedrec.errors import DataError, ExperimentError
from fedrec.rng import stream, torch_stream
from tests.fedrec.baselines.histories import fitted, histories_of

# Any model trained in one place, against plain PyTorch; the loop by hand.


def test_an_epoch_is_a_step_of_adam_on_all_pairs(taste, monkeypatch):
    """One step of Adam on every liked pair and one drawn item each, written down for the loss of a
    logit p_u . q_i + b_u + b_i + b."""
    monkeypatch.setattr("fedrec.baselines.training.NEGATIVES", 1)
    steps = {"epochs": 1, "batch_size": 10_000, "learning_rate": 0.5, "regularisation": 0.1}
    made = fitted("central", taste, model={"name": "mf", "factors": 3}, **steps)
    drawn = made.model.initial(torch_stream(0, "baseline-central"))
    values = {name: value.clone() for name, value in drawn.items()}
    for name in ("user.factors", "user.bias"):
        values[name] = values[name].repeat(40, 1)
    values = {name: value.requires_grad_() for name, value in values.items()}
    random = stream(0, "baseline-central-triples")
    pairs = random.permutation(240)
    users, good = taste.rows()[pairs], np.sort(taste.items.reshape(40, 6)).ravel()[pairs]
    ranks = random.integers(0, np.full(240, 14))
    bad = [
        int(nth_outside(np.sort(taste.items[6 * user : 6 * user + 6]), np.array([rank]))[0])
        for user, rank in zip(users, ranks, strict=True)
    ]
    loss = torch.zeros(())
    for items, sign in ((good, 1), (bad, -1)):
        own, other = values["user.factors"][users], values["item.factors"][items]
        biases = values["user.bias"][users, 0] + values["item.bias"][items, 0] + values["bias"]
        loss = loss + F.softplus(-sign * ((own * other).sum(1) + biases)).sum()
        loss = loss + 0.1 * (other.square().sum() + values["item.bias"][items].square().sum())
    for name in ("user.factors", "user.bias"):
        loss = loss + 0.1 * values[name][users].square().sum()
    (loss / 240).backward()
    torch.optim.Adam(values.values(), lr=0.5).step()
    after = {name: value.detach() for name, value in values.items()}
    rows = torch.cat([after["user.factors"], after["user.bias"]], dim=1)
    torch.testing.assert_close(torch.from_numpy(made.user_rows), rows, atol=1e-4, rtol=0)
    for name in ("item.factors", "item.bias", "bias"):
        torch.testing.assert_close(made.shared[name][0], after[name], atol=1e-4, rtol=0)


def test_the_learning_rate_falls_to_its_last_value():
    """Steps of Adam on x: the gradient is 1, and so is the length of a step over its rate."""
    point = torch.zeros(1).requires_grad_()
    config = TrainingConfig(epochs=5, learning_rate=1.0, final_rate=0.2)
    values = train([point], config, lambda _: [None], lambda _: point.sum().backward(), steps=1)
    torch.testing.assert_close(values[0], -torch.tensor([1.0 + 0.8 + 0.6 + 0.4 + 0.2]))


def test_the_moving_average_of_numbers():
    """By hand, of points that Adam moves by 1 in each step: the first steps weigh 9 / 11 and
    9 / 12, later ones 1 - decay."""
    point = torch.zeros(1).requires_grad_()
    config = TrainingConfig(epochs=30, learning_rate=1.0, average=0.7)
    mean = 0.0
    for step in range(1, 31):
        mean += (1 - min(0.7, (1 + step) / (10 + step))) * (-step - mean)
    values = train([point], config, lambda _: [None], lambda _: point.sum().backward(), steps=1)
    torch.testing.assert_close(values[0], torch.tensor([mean]))
    assert point.item() == pytest.approx(-30)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"name": "metamf"}, "generates"),
        ({"name": "item-weights"}, "no loss for central training"),
        ({"name": "mf", "factorss": 3}, "factorss"),
    ],
)
def test_models_that_are_refused(model, words, taste):
    with pytest.raises(ExperimentError, match=words):
        fitted("central", taste, model=model)


# The centralised autoencoders on two groups of users.


def test_users_without_items_neither_train_nor_fail(taste):
    longer = Histories(20, np.append(taste.offsets, taste.offsets[-1]), taste.items, np.arange(41))
    small = {"hidden": 8, "latent": 2, "epochs": 5}
    models = [fitted("vae", histories, **small) for histories in (taste, longer)]
    assert torch.equal(models[0].scores(taste), models[1].scores(taste))
    assert models[1].scores(longer).isfinite().all()


# LightGCN against PyTorch Geometric, the dense formula, automatic differentiation and matrix
# factorization.


def dense(liked, layers):
    """P of the module's head, `[users + items, users + items]`."""
    table = liked.matrix().double()
    users, items = table.shape
    both = torch.zeros(users + items, users + items, dtype=torch.float64)
    both[:users, users:] = table
    both[users:, :users] = table.T
    scale = both.sum(1).clamp(min=1).rsqrt()
    step = scale[:, None] * both * scale
    return sum(torch.linalg.matrix_power(step, power) for power in range(layers + 1)) / (layers + 1)


SMALL = {"factors": 8, "learning_rate": 0.02, "batch_size": 256, "epochs": 1}


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_propagation_is_the_dense_formula(layers, liked):
    rows = torch.randn(130, 6, generator=torch.Generator().manual_seed(0))
    expected = dense(liked, layers) @ rows.double()
    found = _Graph(liked.csr()).average(rows, layers).double()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_propagation_is_that_of_pytorch_geometric(liked):
    geometric = pytest.importorskip("torch_geometric.nn")
    model = geometric.LightGCN(130, 6, 3)
    users, items = torch.from_numpy(liked.rows()), torch.from_numpy(liked.items) + 80
    edges = torch.cat([torch.stack([users, items]), torch.stack([items, users])], 1)
    with torch.no_grad():
        expected = model.get_embedding(edges)
        found = _Graph(liked.csr()).average(model.embedding.weight, 3)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_rows_of_half_the_size_differ_by_their_rounding(liked):
    """bfloat16 has 8 bits: each of three layers rounds once by 2^-9 of what it has, the rows
    before it another time."""
    rows = torch.randn(130, 6, generator=torch.Generator().manual_seed(0))
    operator = dense(liked, 3)
    found = _Graph(liked.csr(), torch.bfloat16).average(rows, 3)
    difference = (found.double() - operator @ rows.double()).abs()
    assert found.dtype == torch.float32
    assert 0 < difference.max() < 4 * 2**-8 * (operator @ rows.double().abs()).max()


def test_the_gradient_is_that_of_automatic_differentiation(liked):
    model, operator = fitted("lightgcn", liked, **SMALL, layers=2, decay=0.3), dense(liked, 2)
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(130, 8, dtype=torch.float64, generator=generator).requires_grad_()
    rows = torch.stack([torch.randint(0, 80, (40,)), *torch.randint(80, 130, (2, 40))])
    own, good, other = (operator @ first)[rows]
    loss = (
        F.softplus((own * (other - good)).sum(1)).mean() + 0.3 / 2 * first[rows].square().sum() / 40
    )
    expected = torch.autograd.grad(loss, first)[0]
    found = model._gradient(first.detach().float(), rows)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-4)


def test_scores_are_products_of_averaged_rows(liked, monkeypatch):
    first = torch.randn(130, 8, generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr("fedrec.baselines.pairwise.train", lambda *_, **__: [first])
    averaged = dense(liked, 2) @ first.double()
    found = fitted("lightgcn", liked, factors=8, layers=2).scores(liked).double()
    torch.testing.assert_close(found, averaged[:80] @ averaged[80:].T, atol=1e-4, rtol=1e-4)


def epoch(liked, draw):
    """Users, liked items and others of an epoch's triples."""
    batches = Triples(liked.csr(), draw, np.random.default_rng(0)).epoch(64)
    return map(np.concatenate, zip(*batches, strict=True))


@pytest.mark.parametrize("draw", ["users", "pairs"])
def test_an_epoch_has_as_many_triples_as_pairs(draw, liked):
    """Of users with an item and without another; who has nothing or everything is never drawn."""
    own, good, other = epoch(liked, draw)
    table = liked.matrix().numpy()
    assert len(own) == len(liked.items) and table[own, good].all() and not table[own, other].any()
    if draw == "pairs":
        assert len(np.unique(own * 50 + good)) == len(own)
    own, _, _ = epoch(histories_of([[], [0, 1, 2], [1]], 3), draw)
    assert set(own.tolist()) == {2}
    with pytest.raises(DataError, match="liked and other items"):
        epoch(histories_of([[0, 1]], 2), draw)


# NeuMF and its parts by hand.


@pytest.mark.parametrize(
    ("name", "factors", "tower"),
    [("neumf", 3, (6, 5, 4)), ("gmf", 3, ()), ("mf", 3, ()), ("mlp", 0, (6, 5))],
)
def test_logits_by_hand(name, factors, tower, taste):
    """The formula in the module's head, one pair at a time, with the tower's first layer on the
    joined rows."""
    model = fitted(name, taste, factors=factors, tower=tower, epochs=1)
    values = {name: value.numpy() for name, value in model.shared.items()}
    weights = values.get("h", np.ones(3))
    for user, item in itertools.product((0, 7, 39), (1, 11, 19)):
        p, q = model.user_rows[user], values["items"][item]
        hidden = np.concatenate([p[factors:], q[factors:]])
        for layer in range(len(tower) - 1):
            hidden = np.maximum(values[f"W{layer}"] @ hidden + values[f"b{layer}"], 0)
        joined = np.concatenate([p[:factors] * q[:factors], hidden])
        expected = float(joined @ weights + values["b"])
        assert model.scores(taste)[user, item].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_batchs_loss_is_cross_entropy(taste):
    model = fitted("neumf", taste, epochs=1, regularisation=0.3)
    rows, items = torch.from_numpy(model.user_rows[:2]), torch.tensor([[0, 5, 9], [11, 2, 3]])
    their = model.shared["items"][items]
    logits = model.scores(taste)[:2].gather(1, items)
    labels = torch.tensor([1.0, 0, 0]).expand(2, -1)
    losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    expected = losses / 2
    expected = expected + 0.3 * (rows.square().sum() + their.square().sum()) / 2
    torch.testing.assert_close(model.batch_loss(rows, items, np.arange(2)), expected)


def test_users_who_did_not_train_have_the_mean_row(taste):
    model = fitted("neumf", taste.block(0, 30), epochs=1)
    torch.testing.assert_close(
        model.rows(taste)[30:], np.tile(model.user_rows.mean(0), (10, 1)), check_stride=False
    )
