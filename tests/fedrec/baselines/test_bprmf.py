# SPDX-License-Identifier: Apache-2.0
"""BPR-MF against autograd and on Amazon Office; the random order against its closed form."""

import numpy as np
import pytest
import torch

from fedrec.baselines.base import Histories
from fedrec.baselines.bprmf import Bprmf, BprmfConfig, _epoch
from fedrec.baselines.evaluate import evaluate_baselines
from fedrec.baselines.random import Random, RandomConfig
from fedrec.data.population import Population
from fedrec.errors import DataError
from fedrec.experiment import load

OFFICE = {
    "name": "office",
    "rounds": 1,
    "dataset": {"name": "amazon-upc"},
    "split": {"name": "published"},
    "sampler": {"name": "fixed-size", "cohort": 10},
}


def two_tastes():
    """Forty users; even ones have seven of the first fifteen items, odd ones of the last fifteen."""
    random = np.random.default_rng(0)
    own = [np.sort(random.choice(15, 7, replace=False)) + 15 * (user % 2) for user in range(40)]
    return Histories(30, np.arange(0, 281, 7), np.concatenate(own), np.arange(40))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_is_the_gradient_of_the_objective(compiled):
    """One triple after the other, against autograd."""
    from fedrec.baselines.bprmf import _descend

    random = np.random.default_rng(1)
    users, items = (random.normal(0, 1, size).astype(np.float32) for size in ((2, 5), (6, 5)))
    own_users, own_items, offsets = np.array([0, 0, 1]), np.array([1, 3, 0]), np.array([0, 2, 3])
    order, ranks = np.array([2, 0, 1]), np.array([4, 1, 3])
    negatives = [5, 2, 5]  # user 1 lacks 1 to 5, user 0 lacks 0, 2, 4 and 5
    wanted = [torch.tensor(part, dtype=torch.float64) for part in (users, items)]
    for place, j in zip(order.tolist(), negatives, strict=True):
        leaves = [part.clone().requires_grad_() for part in wanted]
        p, q_i, q_j = leaves[0][own_users[place]], leaves[1][own_items[place]], leaves[1][j]
        squares = p.square().sum() + q_i.square().sum() + q_j.square().sum()
        loss = -torch.nn.functional.logsigmoid(p @ (q_i - q_j)) + 0.3 / 2 * squares
        wanted = [part - 0.1 * slope for part, slope in zip(wanted, torch.autograd.grad(loss, leaves), strict=True)]
    epoch = _descend() if compiled else _epoch
    epoch(users, items, own_users, own_items, offsets, order, ranks, np.float32(0.1), np.float32(0.3))
    for found, expected in zip((users, items), wanted, strict=True):
        assert np.allclose(found, expected.numpy(), atol=1e-5)


def test_it_learns_tastes_of_users_it_knows_and_of_new_ones():
    histories = two_tastes()
    made = Bprmf(BprmfConfig(factors=8, epochs=60))
    made.fit(histories)
    strangers = Histories(30, np.array([0, 3, 6]), np.array([0, 4, 8, 20, 22, 29]))
    for scores in (made.scores(histories)[:2], made.scores(strangers)):
        assert scores[0, :15].mean() > scores[0, 15:].mean() + 0.5
        assert scores[1, 15:].mean() > scores[1, :15].mean() + 0.5
    assert torch.allclose(made.scores(histories)[7:9], made.scores(histories.block(7, 9)), atol=1e-6)
    assert np.allclose(made.scores(histories), made.users @ made.items.T, atol=1e-6)


def test_a_user_is_who_it_is_whatever_its_order():
    """The same users asked for backwards get the same factors."""
    histories = two_tastes()
    made = Bprmf(BprmfConfig(factors=4, epochs=3))
    made.fit(histories)
    backwards = Histories(30, histories.offsets, histories.items.reshape(40, 7)[::-1].ravel(), np.arange(39, -1, -1))
    assert torch.allclose(made.scores(backwards).flip(0), made.scores(histories), atol=1e-6)


def test_nothing_to_rank_is_an_error():
    with pytest.raises(DataError, match="nothing to rank"):
        Bprmf(BprmfConfig()).fit(Histories(2, np.array([0, 2]), np.array([0, 1])))


def test_random_hits_are_their_closed_form():
    """2,000 users of thirty items with five known each: any other item is in the first ten with 10 / 25."""
    histories = Histories(30, np.arange(0, 10_001, 5), np.tile(np.arange(5), 2000), np.arange(2000))
    scores = Random(RandomConfig()).scores(histories)[:, 5:]
    rank = (scores > scores[:, :1]).sum(1)
    assert (rank < 10).float().mean().item() == pytest.approx(10 / 25, abs=4 * np.sqrt(0.24 / 2000))
    again = Random(RandomConfig()).scores(histories.block(3, 5))[:, 5:]
    assert torch.equal(again, scores[3:5])


@pytest.mark.real_data
def test_office_at_twenty():
    """Published: BPRMF .1254 Recall@20; Random 20 / (M - n) per user, about .0083."""
    found = evaluate_baselines(("bprmf", "random"), Population.of(load(OFFICE)), held_out="test", ks=(20,))
    assert found["bprmf"]["recall@20"] >= 0.120
    assert found["random"]["recall@20"] == pytest.approx(0.0083, abs=0.002)
