# SPDX-License-Identifier: Apache-2.0
"""LightGCN against PyTorch Geometric, the dense formula, automatic differentiation and matrix
factorization."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedrec.baselines.base import Histories
from fedrec.baselines.neural.lightgcn import Graph, Lightgcn, LightgcnConfig
from fedrec.baselines.triples import Triples
from fedrec.errors import DataError


def dense(liked, layers):
    """P of the module's head, `[users + items, users + items]`."""
    table = liked.matrix().double()
    users, items = table.shape
    both = torch.cat(
        [
            torch.cat([torch.zeros(users, users), table], 1),
            torch.cat([table.T, torch.zeros(items, items)], 1),
        ]
    )
    scale = both.sum(1).clamp(min=1).rsqrt()
    step = scale[:, None] * both * scale
    return sum(torch.linalg.matrix_power(step, power) for power in range(layers + 1)) / (layers + 1)


def fitted(histories, **settings):
    model = Lightgcn(
        LightgcnConfig(**{"factors": 8, "learning_rate": 0.02, "batch_size": 256, **settings})
    )
    model.fit(histories)
    return model


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_propagation_is_the_dense_formula(layers, liked):
    rows = torch.randn(130, 6, generator=torch.Generator().manual_seed(0))
    expected = dense(liked, layers) @ rows.double()
    torch.testing.assert_close(
        Graph(liked.csr()).average(rows, layers).double(), expected, atol=1e-6, rtol=0
    )


def test_propagation_is_that_of_pytorch_geometric(liked):
    geometric = pytest.importorskip("torch_geometric.nn")
    model = geometric.LightGCN(130, 6, 3)
    users, items = torch.from_numpy(liked.rows()), torch.from_numpy(liked.items) + 80
    edges = torch.cat([torch.stack([users, items]), torch.stack([items, users])], 1)
    with torch.no_grad():
        expected = model.get_embedding(edges)
        found = Graph(liked.csr()).average(model.embedding.weight, 3)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_rows_of_half_the_size_differ_by_their_rounding(liked):
    """bfloat16 has 8 bits: each of three layers rounds once by 2^-9 of what it has, the rows
    before it another time."""
    rows = torch.randn(130, 6, generator=torch.Generator().manual_seed(0))
    operator = dense(liked, 3)
    found = Graph(liked.csr(), torch.bfloat16).average(rows, 3)
    difference = (found.double() - operator @ rows.double()).abs()
    assert found.dtype == torch.float32
    assert 0 < difference.max() < 4 * 2**-8 * (operator @ rows.double().abs()).max()


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_some_places_have_what_all_have(precision, liked):
    rows = torch.randn(130, 6, generator=torch.Generator().manual_seed(0))
    graph, places = Graph(liked.csr(), precision), torch.tensor([[3, 129], [80, 3]])
    found = torch.stack(graph.average_at(places, rows, 3))
    torch.testing.assert_close(found, graph.average(rows, 3)[places])


def test_half_the_size_finds_the_same(taste):
    whole, half = (
        fitted(taste, epochs=30, precision=precision).scores(taste)
        for precision in ("float32", "bfloat16")
    )
    assert not torch.equal(whole, half)
    assert torch.corrcoef(torch.stack([whole.flatten(), half.flatten()]))[0, 1] > 0.99


def test_steps_shrink_to_the_final_rate(taste):
    """With gradients of one sign and size Adam moves by the rate: over n steps by their sum."""
    moved = []

    class Constant(Lightgcn):
        def _gradient(self, first, rows):
            moved.append(first.clone())
            return torch.ones_like(first)

    Constant(LightgcnConfig(factors=2, epochs=5, final_rate=0.2, learning_rate=0.1)).fit(taste)
    steps = [float((before - after).mean()) for before, after in itertools.pairwise(moved)]
    np.testing.assert_allclose(steps, [0.1, 0.08, 0.06, 0.04], rtol=1e-3)


def test_the_gradient_is_that_of_automatic_differentiation(liked):
    model, operator = fitted(liked, epochs=1, layers=2, decay=0.3), dense(liked, 2)
    first = torch.randn(
        130, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    rows = torch.stack([torch.randint(0, 80, (40,)), *torch.randint(80, 130, (2, 40))])
    own, good, other = (operator @ first)[rows]
    loss = (
        F.softplus((own * (other - good)).sum(1)).mean() + 0.3 / 2 * first[rows].square().sum() / 40
    )
    expected = torch.autograd.grad(loss, first)[0]
    found = model._gradient(first.detach().float(), rows)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-4)


def test_it_finds_each_users_own_half(taste):
    scores = fitted(taste, epochs=60, decay=0.01).scores(taste)
    lower, upper = scores.split(10, dim=1)
    assert (lower[0::2].mean(1) > upper[0::2].mean(1)).all()
    assert (lower[1::2].mean(1) < upper[1::2].mean(1)).all()


@pytest.mark.slow
def test_it_beats_popularity_and_serves_folded_in_users(planted):
    known = planted.known
    popular = torch.from_numpy(np.bincount(known.items, minlength=200).astype(np.float32)).expand(
        600, -1
    )
    scores = fitted(known, epochs=40, factors=16).scores(known)
    half = fitted(
        known.take(np.arange(0, 600, 2)), epochs=80, factors=16, unseen_users="fold-in"
    ).scores(known)
    assert planted.recall(scores) > planted.recall(half) > planted.recall(popular) + 0.03


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_a_folded_in_user_gets_what_the_graph_brings(layers, liked, others):
    """A row of zeros, then of each layer the sum over its items by the roots of both degrees; the
    mean of all."""
    model = fitted(liked, epochs=1, layers=layers)
    first = torch.randn(130, 8, generator=torch.Generator().manual_seed(2))
    model._settle(first)
    table, known = others.matrix().double(), liked.matrix().double()
    scale = known.sum(0).rsqrt().nan_to_num(posinf=0)  # an item without likes contributes nothing
    arriving = torch.zeros(9, 8, dtype=torch.float64)
    for layer in range(layers):
        rows = (
            dense(liked, layer) * (layer + 1) - (dense(liked, layer - 1) * layer if layer else 0)
        ) @ first.double()
        arriving += table @ (rows[80:] * scale[:, None]) / table.sum(1, keepdim=True).sqrt()
    np.testing.assert_allclose(
        model.folded_in(others), (arriving / (layers + 1)).numpy(), atol=1e-5
    )


class TestTriples:
    def test_others_are_drawn_uniformly_from_what_is_not_liked(self, liked):
        """Chi-square of each user's draws, over 500 times the number of other items, stays near its
        mean."""
        triples = Triples(liked.csr(), "users", np.random.default_rng(0))
        table = liked.matrix().numpy()
        for user in range(0, 80, 9):
            counts = np.bincount(triples.others(np.full(20_000, user)), minlength=50)
            free = table[user] == 0
            assert not counts[~free].any()
            statistic = (np.square(counts[free] - 20_000 / free.sum()) * free.sum() / 20_000).sum()
            assert statistic < free.sum() + 6 * (2 * free.sum()) ** 0.5

    @pytest.mark.parametrize("draw", ["users", "pairs"])
    def test_an_epoch_has_as_many_triples_as_pairs(self, draw, liked):
        own, good, other = (
            np.concatenate(part)
            for part in zip(
                *Triples(liked.csr(), draw, np.random.default_rng(0)).epoch(64), strict=True
            )
        )
        table = liked.matrix().numpy()
        assert (
            len(own) == len(liked.items) and table[own, good].all() and not table[own, other].any()
        )
        if draw == "pairs":
            assert len(np.unique(own * 50 + good)) == len(own)

    def test_who_has_nothing_or_everything_is_never_drawn(self):
        histories = Histories(3, np.array([0, 0, 3, 4]), np.array([0, 1, 2, 1]))
        for draw in ("users", "pairs"):
            own = np.concatenate(
                [
                    users
                    for users, _, _ in Triples(
                        histories.csr(), draw, np.random.default_rng(0)
                    ).epoch(9)
                ]
            )
            assert set(own.tolist()) == {2}

    def test_there_is_nothing_to_rank(self):
        with pytest.raises(DataError, match="nothing to rank"):
            Triples(
                Histories(2, np.array([0, 2]), np.array([0, 1])).csr(),
                "users",
                np.random.default_rng(0),
            )
