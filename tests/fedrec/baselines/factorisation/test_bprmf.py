# SPDX-License-Identifier: Apache-2.0
"""BPR-MF against autograd and on Amazon Office; the random order against its closed form."""

import numpy as np
import pytest
import torch

from fedrec.baselines.base import Histories
from fedrec.baselines.factorisation.bprmf import Bprmf, BprmfConfig, _epoch
from fedrec.baselines.simple.random import Random, RandomConfig
from fedrec.data.population import Population
from fedrec.errors import DataError
from fedrec.evaluation.central import evaluate_baselines
from fedrec.experiment.loading import load

OFFICE = {
    "name": "office",
    "rounds": 1,
    "dataset": {"name": "amazon-upc"},
    "split": {"name": "published"},
    "sampler": {"name": "fixed-size", "cohort": 10},
}


def two_tastes():
    """Forty users; even ones have seven of the first fifteen items, odd ones of the last
    fifteen."""
    random = np.random.default_rng(0)
    own = [np.sort(random.choice(15, 7, replace=False)) + 15 * (user % 2) for user in range(40)]
    return Histories(30, np.arange(0, 281, 7), np.concatenate(own), np.arange(40))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_is_the_gradient_of_the_objective(compiled, biased):
    """One triple after the other, against autograd."""
    random = np.random.default_rng(1)
    users, items = (random.normal(0, 1, size).astype(np.float32) for size in ((2, 5), (6, 5)))
    own_users, own_items, others = np.array([1, 0, 0]), np.array([0, 1, 3]), np.array([5, 2, 5])
    biases = random.normal(0, 1, 6).astype(np.float32)
    wanted = [torch.tensor(part, dtype=torch.float64) for part in (users, items, biases)]
    for place, j in enumerate(others.tolist()):
        leaves = [part.clone().requires_grad_() for part in wanted]
        p, q_i, q_j = leaves[0][own_users[place]], leaves[1][own_items[place]], leaves[1][j]
        b_i, b_j = leaves[2][own_items[place]], leaves[2][j]
        squares = p.square().sum() + q_i.square().sum() + q_j.square().sum() + b_i**2 + b_j**2
        loss = -torch.nn.functional.logsigmoid(p @ (q_i - q_j) + b_i - b_j) + 0.3 / 2 * squares
        slopes = torch.autograd.grad(loss, leaves)
        rates = (0.1, 0.1, 0.1 if biased else 0.0)
        wanted = [
            part - rate * slope for part, rate, slope in zip(wanted, rates, slopes, strict=True)
        ]
    epoch = _epoch if compiled else _epoch.__wrapped__
    epoch(
        users, items, biases, own_users, own_items, others, np.float32(0.1), np.float32(0.3), biased
    )
    for found, expected in zip((users, items, biases), wanted, strict=True):
        assert np.allclose(found, expected.numpy(), atol=1e-5)


def test_it_learns_tastes_of_users_it_knows_and_of_new_ones():
    histories = two_tastes()
    made = Bprmf(BprmfConfig(factors=8, epochs=60))
    made.fit(histories)
    strangers = Histories(30, np.array([0, 3, 6]), np.array([0, 4, 8, 20, 22, 29]))
    for scores in (made.scores(histories)[:2], made.scores(strangers)):
        assert scores[0, :15].mean() > scores[0, 15:].mean() + 0.5
        assert scores[1, 15:].mean() > scores[1, :15].mean() + 0.5
    assert torch.allclose(
        made.scores(histories)[7:9], made.scores(histories.block(7, 9)), atol=1e-6
    )
    assert np.allclose(made.scores(histories), made.own @ made.items.T, atol=1e-6)


def test_user_numbers_do_not_depend_on_the_order():
    """The same users in reverse order get the same factors."""
    histories = two_tastes()
    made = Bprmf(BprmfConfig(factors=4, epochs=3))
    made.fit(histories)
    backwards = Histories(
        30, histories.offsets, histories.items.reshape(40, 7)[::-1].ravel(), np.arange(39, -1, -1)
    )
    assert torch.allclose(made.scores(backwards).flip(0), made.scores(histories), atol=1e-6)


@pytest.mark.parametrize("peer", ["cornac", "implicit"])
def test_it_ranks_as_well_as_its_peers(peer, planted):
    """Recall over five seeds with the same settings. Both draw pairs with replacement; implicit has
    item biases and draws negatives by popularity."""
    models = pytest.importorskip({"cornac": "cornac.models", "implicit": "implicit.bpr"}[peer])
    known = planted.known
    settings = {"factors": 8, "epochs": 40, "regularisation": 0.01, "spread": 0.036}
    settings |= {"negatives": "popular", "biases": True} if peer == "implicit" else {}
    ours, theirs = [], []
    for seed in range(5):
        made = Bprmf(BprmfConfig.parse({**settings, "seed": seed}))
        made.fit(known)
        ours.append(planted.recall(made.scores(known)))
        theirs.append(
            planted.recall((_of_cornac if peer == "cornac" else _of_implicit)(models, known, seed))
        )
    assert planted.agrees(ours, theirs), (ours, theirs)


def _of_cornac(models, known, seed):
    from cornac.data import Dataset

    rows = [
        (user, item, 1.0)
        for user, item in zip(known.rows().tolist(), known.items.tolist(), strict=True)
    ]
    data = Dataset.from_uir(rows)
    shared = {
        "learning_rate": 0.05,
        "lambda_reg": 0.01,
        "use_bias": False,
        "num_threads": 1,
        "verbose": False,
    }
    model = models.BPR(k=8, max_iter=40, seed=seed, **shared)
    model.fit(data)
    users, items = ([ids[n] for n in range(len(ids))] for ids in (data.uid_map, data.iid_map))
    return torch.from_numpy(model.u_factors[users] @ model.i_factors[items].T)


def _of_implicit(models, known, seed):
    from scipy.sparse import csr_matrix

    shared = {"learning_rate": 0.05, "regularization": 0.01, "num_threads": 1}
    model = models.BayesianPersonalizedRanking(
        factors=8, iterations=40, random_state=seed, use_gpu=False, **shared
    )
    model.fit(csr_matrix(known.csr()), show_progress=False)
    return torch.from_numpy(model.user_factors @ model.item_factors.T)


@pytest.mark.parametrize("unseen", ["transductive", "fold-in"])
def test_it_states_how_unseen_users_are_treated(unseen):
    assert Bprmf(BprmfConfig.parse({"unseen-users": unseen})).transductive == (
        unseen == "transductive"
    )


def test_along_its_training_it_is_what_fewer_epochs_give():
    histories, made = two_tastes(), Bprmf(BprmfConfig(factors=4, epochs=5, seed=3))
    done = []
    for epochs in made.training(histories):
        fewer = Bprmf(BprmfConfig(factors=4, epochs=epochs, seed=3))
        fewer.fit(histories)
        assert (made.own == fewer.own).all() and (made.items == fewer.items).all()
        done.append(epochs)
    assert done == [1, 2, 3, 4, 5]


def test_nothing_to_rank_is_an_error():
    with pytest.raises(DataError, match="nothing to rank"):
        Bprmf(BprmfConfig()).fit(Histories(2, np.array([0, 2]), np.array([0, 1])))


def test_random_hits_are_their_closed_form():
    """2,000 users of thirty items with five known each: any other item is in the first ten with 10
    / 25."""
    histories = Histories(30, np.arange(0, 10_001, 5), np.tile(np.arange(5), 2000), np.arange(2000))
    scores = Random(RandomConfig()).scores(histories)[:, 5:]
    rank = (scores > scores[:, :1]).sum(1)
    assert (rank < 10).float().mean().item() == pytest.approx(10 / 25, abs=4 * np.sqrt(0.24 / 2000))
    again = Random(RandomConfig()).scores(histories.block(3, 5))[:, 5:]
    assert torch.equal(again, scores[3:5])


@pytest.mark.real_data
@pytest.mark.slow
def test_office_at_twenty():
    """Published: BPRMF .1254 Recall@20; Random 20 / (M - n) per user, about .0083."""
    found = evaluate_baselines(
        ("bprmf", "random"), Population.of(load(OFFICE)), held_out="test", ks=(20,)
    )
    assert found["bprmf"]["recall@20"] >= 0.120
    assert found["random"]["recall@20"] == pytest.approx(0.0083, abs=0.002)
