# SPDX-License-Identifier: Apache-2.0
"""WARP against `lightfm-next`, its weights by formula, side features, and users who are folded
in."""

import numpy as np
import pytest
import torch

from fedrec.baselines.base import Histories
from fedrec.baselines.factorisation.warp import Warp, WarpConfig
from fedrec.baselines.factorisation.warp_steps import rank_weight
from fedrec.data.features import Feature, FeatureTable
from fedrec.errors import ExperimentError


def fitted(histories, **settings):
    model = Warp(WarpConfig(**settings))
    model.fit(histories)
    return model


def test_weights_of_steps():
    """ln of the estimated rank: of 1,001 items, found in the first, third, and tenth draw, and of
    two items."""
    expected = {
        (1001, 1): np.log(1000),
        (1001, 3): np.log(333),
        (1001, 10): np.log(100),
        (2, 1): 0,
        (2, 9): 0,
    }
    assert {sizes: rank_weight(*sizes) for sizes in expected} == pytest.approx(expected)
    assert rank_weight(10**9, 1) == 10


@pytest.mark.slow
def test_it_finds_each_users_own_half(taste):
    """On average over the half: unobserved items in it are pushed down, too."""
    lower, upper = fitted(taste, factors=4).scores(taste).split(10, dim=1)
    apart = lower.mean(1) - upper.mean(1)
    assert (apart[0::2] > 0).all() and (apart[1::2] < 0).all()


def test_one_step_by_hand():
    """One user, two items, of which it likes the first: every step is on items 0 and 1, by
    Adagrad's rule."""
    liked = Histories(2, np.array([0, 1]), np.array([0]), np.array([0]))
    model = fitted(liked, factors=2, epochs=1)
    assert model._biases.tolist() == [0, 0]  # the rank is 1, and the weight ln 1
    longer = Histories(40, np.array([0, 1]), np.array([0]), np.array([0]))
    # which does not draw item 0 itself
    biases = fitted(longer, factors=2, epochs=1, max_sampled=1, seed=1)._biases
    moved = np.flatnonzero(biases)
    assert len(moved) == 2 and moved[0] == 0
    np.testing.assert_allclose(biases[moved], [0.05 * np.log(39), -0.05 * np.log(39)], rtol=1e-6)


def test_folded_in_users_are_served_alike(planted):
    """Half of the users do not train: from their items they are served nearly as well as the
    others."""
    known = planted.known
    half = known.take(np.arange(0, 600, 2))
    model = fitted(half, unseen_users="fold-in")
    assert not model.transductive and fitted(half, epochs=1).transductive
    found = model.scores(known)
    hit = (
        found.masked_fill(known.matrix() > 0, -torch.inf).topk(10).indices
        == torch.from_numpy(planted.held_out)[:, None]
    )
    seen, unseen = hit[0::2].any(1).double().mean(), hit[1::2].any(1).double().mean()
    assert unseen > 0.7 * seen > 0.7 * 2 * 10 / 200
    torch.testing.assert_close(model.scores(known.take(np.array([5]))), found[[5]])


def test_side_features_are_learned():
    """Users without likes, from one of two groups with different preferences."""
    random = np.random.default_rng(0)
    items = np.concatenate(
        [random.choice(10, 5, replace=False) + 10 * (user % 2) for user in range(60)]
    )
    offsets = np.concatenate([np.arange(0, 301, 5), [300, 300]])
    group = FeatureTable(62, (Feature.single("group", [f"g{user % 2}" for user in range(62)]),))
    histories = Histories(20, offsets, items, np.arange(62), group, FeatureTable(20))
    scores = fitted(histories.block(0, 60), features=("group",)).scores(histories.block(60, 62))
    assert scores[0, :10].min() > scores[0, 10:].max()
    assert scores[1, 10:].min() > scores[1, :10].max()
    alike = fitted(histories.block(0, 60)).scores(histories.block(60, 62))
    assert torch.equal(alike[0], alike[1])


def test_an_unknown_feature_is_named(taste):
    with pytest.raises(ExperimentError, match="no side feature 'genre'"):
        fitted(taste, features=("genre",))


@pytest.mark.parametrize("featured", [False, True])
def test_it_ranks_as_well_as_lightfm(featured, planted):
    """Recall over five seeds, with ids alone and with two side features."""
    lightfm = pytest.importorskip("lightfm")
    from scipy.sparse import coo_matrix, csr_matrix, eye, hstack

    random = np.random.default_rng(3)
    codes = [random.integers(0, 6, 600), random.integers(0, 5, 200)]
    tables = [
        FeatureTable(len(own), (Feature.single(name, own),))
        for name, own in zip(("age", "genre"), codes, strict=True)
    ]
    known = planted.known
    histories = Histories(200, known.offsets, known.items, known.users, *tables)
    described = [
        csr_matrix(hstack([eye(len(own)), np.eye(own.max() + 1)[own]]), dtype=np.float32)
        for own in codes
    ]
    features = (
        dict(zip(("user_features", "item_features"), described, strict=True)) if featured else {}
    )
    pairs = known.rows().astype(np.int32), known.items.astype(np.int32)
    liked = coo_matrix((np.ones(len(known.items), np.float32), pairs), (600, 200))
    ours, theirs = [], []
    for seed in range(5):
        names = ("age", "genre") if featured else ()
        ours.append(planted.recall(fitted(histories, seed=seed, features=names).scores(histories)))
        model = lightfm.LightFM(no_components=10, loss="warp", random_state=seed)
        model.fit(liked, epochs=30, num_threads=1, **features)
        (biases, items) = model.get_item_representations(features.get("item_features"))
        (_, users) = model.get_user_representations(features.get("user_features"))
        theirs.append(planted.recall(torch.from_numpy(users @ items.T + biases)))
    assert planted.agrees(ours, theirs), (ours, theirs)
