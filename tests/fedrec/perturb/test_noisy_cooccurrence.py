# SPDX-License-Identifier: Apache-2.0
"""Synthetic profiles from noisy counts, and what they disclose."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import sparse
from scipy.stats import chisquare, kstest, norm

from fedrec.data.perturbation import Perturbed
from fedrec.errors import ExperimentError
from fedrec.perturb.noisy_cooccurrence import (
    NoisyCooccurrence,
    NoisyCooccurrenceConfig,
    _linkage,
    _noisy_release,
    _NoisyCounts,
    _profiles,
    binary,
    disclosure,
)
from fedrec.perturb.substitutes import RandomReplacement
from fedrec.perturb.upc_sdg import ReplacementConfig
from fedrec.privacy import mechanisms
from fedrec.privacy.statement import report

# The generator with a guarantee: its sensitivity, its noise, and the drawn rows.


def release(matrix, noise, seed=0, **settings):
    settings = {"items": matrix.shape[1], "clip_items": 3, "threshold": 0.0, **settings}
    config = NoisyCooccurrenceConfig.model_construct(epsilon=1.0, **settings)
    return _noisy_release(sparse.csr_array(matrix.astype(float)), noise, config, seed)


@pytest.fixture
def given(monkeypatch):
    """The exact sums, and the noise that is added to them."""
    seen = {}

    def note(mechanism, arrays, scale, source, *address):
        seen.update({name: (np.array(value), scale, address) for name, value in arrays.items()})
        return {name: np.asarray(value, dtype=np.float32) for name, value in arrays.items()}

    monkeypatch.setattr(mechanisms, "add_noise", note)
    return seen


def test_one_user_moves_each_sum_by_the_clip_norm_at_most(given):
    """Not exceeded by users of any size, and attained by those with enough items."""
    for size in (1, 2, 3, 4, 9):
        matrix = np.zeros((1, 12))
        matrix[0, :size] = 1
        release(matrix, 1.0)
        for name, bound in (("counts", np.sqrt(3)), ("pairs", np.sqrt(6))):
            exact, scale, _ = given[name]
            assert scale == pytest.approx(bound)
            norm = np.linalg.norm(exact)
            assert norm <= bound * (1 + 1e-9) and (size < 3 or norm == pytest.approx(bound))
    assert given["counts"][2] != given["pairs"][2]  # no noise is used twice


def test_sums_are_those_of_users_and_pairs(given):
    matrix = np.random.default_rng(0).random((30, 8)) < 0.2
    found = release(matrix, 0.0, clip_items=8)
    both = matrix.T.astype(float) @ matrix
    assert np.allclose(given["pairs"][0], np.triu(both))
    assert np.allclose(given["counts"][0], np.diag(both))
    np.fill_diagonal(both, 0)
    assert np.allclose(found.pairs, both)
    assert found.length == pytest.approx(max(1, min(4, matrix.sum() / 30)))


def test_the_noise_is_gaussian_of_that_scale():
    matrix = np.zeros((1, 60))
    matrix[0, :2] = 1
    found = [
        release(matrix, 5.0, seed, threshold=-1e9).pairs[np.triu_indices(60, 3)]
        for seed in range(3)
    ]
    assert kstest(np.concatenate(found) / (5.0 * np.sqrt(6)), "norm").pvalue > 1e-3


def test_the_plan_spends_what_was_asked_for_on_two_releases():
    plan = NoisyCooccurrence(NoisyCooccurrenceConfig(epsilon=3.0), 0).plan(5000)
    assert plan.rounds == 2 and plan.clip_norm == 1.0 and plan.config.adjacency == "replace-one"
    assert 2.9 < report(plan).epsilon <= 3.0
    # Two Gaussian releases of sensitivity sqrt(2) with this noise have mu^2 = 2 x 2 / noise^2;
    # delta(epsilon) by Balle and Wang, theorem 8.
    mu = 2 / plan.noise_scale
    delta = norm.cdf(mu / 2 - 3 / mu) - np.exp(3) * norm.cdf(-mu / 2 - 3 / mu)
    assert delta <= 1e-5 and delta > 0.8e-5


def test_only_the_most_popular_items_are_in_the_matrix():
    matrix = np.zeros((50, 10))
    matrix[:, 4], matrix[:25, 7], matrix[:2, 1] = 1, 1, 1
    assert release(matrix, 0.0, items=2).items.tolist() == [4, 7]


def test_profiles_follow_popularity_then_pairs():
    pairs = np.zeros((4, 4))
    pairs[0, 1] = pairs[1, 0] = pairs[2, 3] = pairs[3, 2] = 5
    made = _NoisyCounts(np.arange(4), np.array([4.0, 3.0, 2.0, 1.0]), pairs, 2.0)
    users, items = _profiles(made, 20_000, 0.0, np.random.default_rng(0))
    first = items[np.unique(users, return_index=True)[1]]
    expected = np.array([0.4, 0.3, 0.2, 0.1]) * 20_000
    assert chisquare(np.bincount(first, minlength=4), expected).pvalue > 1e-3
    sizes = np.bincount(users)
    assert sizes.min() == 1 and sizes.mean() == pytest.approx(2.0, abs=0.05) and sizes.max() <= 4
    for user in range(500):
        own = items[users == user]
        assert len(set(own)) == len(own)
        if len(own) > 1:
            assert {own[0], own[1]} in ({0, 1}, {2, 3})


def test_ratings_are_refused(two_tastes):
    made = NoisyCooccurrence(NoisyCooccurrenceConfig(epsilon=1.0), 0)
    with pytest.raises(ExperimentError, match="give no ratings"):
        made.perturb(dataclasses.replace(two_tastes, rated=True))


# Linkage and recovery against brute force, and the linkage of random replacement on Amazon Office.


def by_hand(real, perturbed):
    """Share of users found, by loops over pairs of profiles."""
    profiles = [
        [set(rows.items[rows.rows_of(u)]) for u in range(rows.num_users)]
        for rows in (real, perturbed)
    ]
    having = [sum(i in own for own in profiles[0]) for i in range(real.num_items)]
    found = 0.0
    for user, own in enumerate(profiles[1]):
        scores = []
        for other in profiles[0]:
            shared = (math.log(real.num_users / having[i]) for i in sorted(own & other))
            scores.append(sum(shared) / math.sqrt(max(1, len(other))))
        best = np.flatnonzero(np.isclose(scores, max(scores), rtol=1e-9, atol=1e-9)).tolist()
        found += (user in best) / len(best)
    return found / len(profiles[1])


def replaced(data, ratio, seed=0):
    config = ReplacementConfig(replacement_ratio=ratio)
    return RandomReplacement(config, seed).perturb(data)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.6, 0.9])
def test_linkage_by_hand(two_tastes, ratio):
    found = replaced(two_tastes, ratio).rows
    expected = by_hand(two_tastes.rows, found)
    assert _linkage(binary(two_tastes.rows), binary(found)) == pytest.approx(expected, abs=1e-9)


def test_shares_of_what_is_kept(two_tastes):
    found = disclosure(two_tastes.rows, replaced(two_tastes, 0.5), 0)
    assert found["kept"] == pytest.approx(1 - found["replaced"]) and 0.4 < found["kept"] < 0.6
    whole = disclosure(two_tastes.rows, replaced(two_tastes, 0.0), 0)
    assert (whole["kept"], whole["replaced"], whole["chance"]) == (1.0, 0.0, 1 / 60)
    assert math.isnan(whole["recovered"]["top-1"])  # nothing was replaced


def test_a_substitute_that_reveals_its_original_is_detected(make_data):
    """Item n is always replaced by n + 20: an attacker who knows half of the users can recover the
    others."""
    users = np.repeat(np.arange(200), 3)
    drawn = np.random.default_rng(0).permuted(np.tile(np.arange(20), (200, 1)), axis=1)
    items = drawn[:, :3].ravel()
    data = make_data(users, items, 200, 40)
    moved = make_data(users, items + 20, 200, 40).rows
    found = disclosure(data.rows, Perturbed(moved, np.arange(600)), 0)
    assert found["recovered"]["top-1"] > 0.95 and found["frequent"]["top-1"] < 0.15
    hidden = disclosure(data.rows, Perturbed(replaced(data, 1.0).rows, np.arange(600)), 0)
    assert hidden["recovered"]["top-1"] < 0.25
