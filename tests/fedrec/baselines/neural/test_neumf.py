# SPDX-License-Identifier: Apache-2.0
"""NeuMF and its parts against `cornac`, in limiting cases, and for folded-in users."""

import numpy as np
import pytest
import torch

from fedrec.baselines.base import Histories
from fedrec.baselines.neural.gmf import Gmf
from fedrec.baselines.neural.mf import CentralMf
from fedrec.baselines.neural.mlp import Mlp
from fedrec.baselines.neural.neumf import CentralNeumf
from fedrec.baselines.triples import Triples
from fedrec.errors import ExperimentError
from fedrec.rng import stream

ALL = [Gmf, CentralMf, Mlp, CentralNeumf]
LABELS = torch.tensor([1.0, 0, 0]).expand(5, -1)
"""Of three items, the first of which is liked."""


def fitted(baseline, histories, **settings):
    model = baseline(
        baseline.Config.parse({key.replace("_", "-"): value for key, value in settings.items()})
    )
    model.fit(histories)
    return model


@pytest.mark.parametrize("baseline", ALL)
def test_scores_are_the_logits_of_every_pair(baseline, liked):
    """The catalogue is scored in another order than single pairs."""
    model = fitted(baseline, liked, epochs=2, learning_rate=0.01)
    with torch.no_grad():
        every = torch.arange(50).expand(80, -1)
        pairs = model.logits(torch.from_numpy(model.own), every, liked.numbers)
    torch.testing.assert_close(model.scores(liked), pairs, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("baseline", ALL)
def test_it_finds_each_users_own_half(baseline, taste):
    model = fitted(baseline, taste, epochs=60, batch_size=32, learning_rate=0.025)
    lower, upper = model.scores(taste).split(10, dim=1)
    assert (lower[0::2].mean(1) > upper[0::2].mean(1)).all()
    assert (lower[1::2].mean(1) < upper[1::2].mean(1)).all()


def test_logits_by_hand(taste):
    """The formula in the module's head, one pair at a time, with the tower's first layer on the
    joined rows."""
    model = fitted(CentralNeumf, taste, factors=3, tower=(6, 5, 4), epochs=1)
    values = {name: value.numpy() for name, value in model.shared.items()}
    p, q = model.own[7], values["items"][11]
    hidden = np.concatenate([p[3:], q[3:]])
    for place in range(2):
        hidden = np.maximum(values[f"W{place}"] @ hidden + values[f"b{place}"], 0)
    expected = np.concatenate([p[:3] * q[:3], hidden]) @ values["h"] + values["b"]
    assert model.scores(taste)[7, 11].item() == pytest.approx(float(expected), rel=1e-5, abs=1e-6)


def test_gmf_with_equal_weights_is_mf(taste):
    """With h = 1 the logits, and the gradients of rows, are those of MF."""
    gmf, mf = (fitted(baseline, taste, epochs=1, factors=4) for baseline in (Gmf, CentralMf))
    gmf.shared |= {
        "h": torch.ones(4),
        "b": mf.shared["b"],
        "items": mf.shared["items"],
    }
    rows = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    items = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [0, 0, 0]])
    losses = [model.batch_loss(rows, items, LABELS, np.arange(5)) for model in (gmf, mf)]
    gradients = [torch.autograd.grad(loss, rows)[0] for loss in losses]
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_batchs_loss_is_cross_entropy(taste):
    model = fitted(CentralNeumf, taste, epochs=1, regularisation=0.3)
    rows, items = torch.from_numpy(model.own[:2]), torch.tensor([[0, 5, 9], [11, 2, 3]])
    their = model.shared["items"][items]
    logits = model.logits(rows, items, np.arange(2))
    losses = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, LABELS[:2], reduction="sum"
    )
    expected = losses / 2
    expected = expected + 0.3 * (rows.square().sum() + their.square().sum()) / 2
    torch.testing.assert_close(model.batch_loss(rows, items, LABELS[:2], np.arange(2)), expected)


@pytest.mark.parametrize(("share", "part"), [(1.0, "product"), (0.0, "tower")])
def test_joined_with_one_parts_share_it_is_that_part(share, part, liked):
    """alpha = 1 is GMF, alpha = 0 is MLP, both compared with the baselines `gmf` and `mlp`, which
    have no pre-training."""
    shared = {"learning_rate": 0.01, "regularisation": 0.01, "seed": 3}
    joined = fitted(CentralNeumf, liked, epochs=0, pretrain_epochs=4, product_share=share, **shared)
    alone = fitted(Gmf if part == "product" else Mlp, liked, epochs=4, **shared)
    torch.testing.assert_close(joined.scores(liked), alone.scores(liked), atol=1e-5, rtol=1e-4)


def test_joined_it_is_the_weighted_mean_of_both_parts_logits(liked):
    shared = {"learning_rate": 0.01, "factors": 6}
    joined = fitted(CentralNeumf, liked, epochs=0, pretrain_epochs=4, product_share=0.3, **shared)
    parts = [
        fitted(part, liked, epochs=4, learning_rate=0.01, **own)
        for part, own in ((Gmf, {"factors": 6}), (Mlp, {}))
    ]
    product, tower = (part.scores(liked) for part in parts)
    torch.testing.assert_close(
        joined.scores(liked), 0.3 * product + 0.7 * tower, atol=1e-5, rtol=1e-4
    )
    rows = joined.folded_in(liked)
    assert rows.shape == joined.own.shape == (80, 6 + 32)


def test_after_pre_training_gradient_descent_continues(liked):
    """One step of plain gradient descent over all pairs: each parameter less the rate times its
    gradient, at the parameters that were joined."""
    shared = {"pretrain_epochs": 2, "batch_size": 10_000}
    start = fitted(CentralNeumf, liked, epochs=0, **shared)
    users = torch.from_numpy(start.own).requires_grad_()
    start.shared = {k: v.clone().requires_grad_() for k, v in start.shared.items()}
    triples = Triples(liked.csr(), "pairs", stream(0, "baseline-joined-triples"))
    own, good, other = next(triples.epoch(10_000))
    others = [other, *(triples.others(own) for _ in range(3))]
    items = torch.from_numpy(np.stack([good, *others], 1))
    start.batch_loss(users[own], items, LABELS, own).backward()
    one = fitted(CentralNeumf, liked, epochs=1, optimiser="sgd", learning_rate=0.001, **shared)
    expected = users - 0.001 * users.grad
    torch.testing.assert_close(torch.from_numpy(one.own), expected.detach())
    weights = start.shared["W0"]
    expected = weights - 0.001 * weights.grad
    torch.testing.assert_close(one.shared["W0"], expected.detach())


def test_a_decay_of_almost_zero_gives_the_last_parameters(liked):
    scores = [
        fitted(CentralNeumf, liked, epochs=4, learning_rate=0.01, average=average).scores(liked)
        for average in (0.0, 1e-12, 0.9)
    ]
    torch.testing.assert_close(scores[1], scores[0])
    assert not torch.allclose(scores[2], scores[0], atol=1e-4)


@pytest.mark.slow
def test_folded_in_users_are_served(planted):
    """Half of the users do not train; alone and in a block they get the same scores."""
    known = planted.known
    model = fitted(
        Gmf,
        known.take(np.arange(0, 600, 2)),
        epochs=60,
        learning_rate=0.005,
        unseen_users="fold-in",
    )
    scores = model.scores(known)
    reached = scores.masked_fill(known.matrix() > 0, -torch.inf).topk(10).indices
    hit = (reached == torch.from_numpy(planted.held_out)[:, None]).any(1).double()
    popular = np.bincount(known.items, minlength=200).astype(np.float32)
    assert hit[1::2].mean() > planted.recall(torch.from_numpy(popular).expand(600, -1)) + 0.05
    torch.testing.assert_close(
        model.scores(known.take(np.array([5]))), scores[[5]], atol=1e-4, rtol=1e-4
    )


def test_users_without_items_get_the_mean_row(taste):
    model = fitted(CentralNeumf, taste)
    nobody = Histories(20, np.zeros(3, dtype=np.int64), np.zeros(0, dtype=np.int64))
    np.testing.assert_allclose(
        model.folded_in(nobody), np.tile(model.own.mean(0), (2, 1)), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("baseline", "settings", "word"),
    [
        (CentralNeumf, {"factors": 0, "tower": []}, "factors or a tower"),
        (CentralNeumf, {"tower": [5, 3]}, "even width"),
        (CentralNeumf, {"tower": [8]}, "at least one layer"),
        (Mlp, {"factors": 4}, "factors"),
        (Gmf, {"tower": [8, 4]}, "tower"),
        (Gmf, {"pretrain-epochs": 2}, "both factors and a tower"),
        (CentralNeumf, {"epochs": 0}, "pretrain-epochs"),
    ],
)
def test_shapes_that_are_refused(baseline, settings, word):
    with pytest.raises(ExperimentError, match=word):
        baseline.Config.parse(settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["NeuMF", "GMF"])
def test_it_ranks_as_well_as_cornac(name, planted):
    """Recall over five seeds with default settings, but more epochs and larger steps, because the
    data are small."""
    models = pytest.importorskip("cornac.models")
    from cornac.data import Dataset

    known = planted.known
    rows = [
        (user, item, 1.0)
        for user, item in zip(known.rows().tolist(), known.items.tolist(), strict=True)
    ]
    data = Dataset.from_uir(rows)
    items = torch.tensor([data.iid_map[item] for item in range(200)])
    shared = {
        "num_factors": 8,
        "num_epochs": 30,
        "batch_size": 256,
        "num_neg": 4,
        "lr": 0.003,
        "verbose": False,
    }
    tower = {"layers": (64, 32, 16, 8), "act_fn": "relu"} if name == "NeuMF" else {}
    ours, theirs = [], []
    for seed in range(5):
        settings = {
            "factors": 8,
            "epochs": 30,
            "batch_size": 256,
            "learning_rate": 0.003,
            "seed": seed,
        }
        settings |= {"tower": [64, 32, 16, 8]} if name == "NeuMF" else {}
        ours.append(
            planted.recall(
                fitted(CentralNeumf if name == "NeuMF" else Gmf, known, **settings).scores(known)
            )
        )
        reference = getattr(models, name)(**shared, **tower, backend="pytorch", seed=seed)
        reference.fit(data)
        scores = np.stack([reference.score(data.uid_map[user]) for user in range(600)])
        theirs.append(planted.recall(torch.from_numpy(scores)[:, items]))
    assert planted.agrees(ours, theirs), (ours, theirs)
