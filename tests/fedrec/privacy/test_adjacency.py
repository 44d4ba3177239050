# SPDX-License-Identifier: Apache-2.0
"""Sensitivities by adversarial pairs: at most sqrt(2) S for non-negative contributions, 2 S for
signed ones."""

import math

import numpy as np
import pytest

from fedrec.neighbourhood.means import scaled
from fedrec.privacy.clipping import Clip
from fedrec.privacy.config import PrivacyConfig
from fedrec.privacy.plan import Plan

SIZE = 12


def counts(random):
    """Adversarial non-negative vectors: single items, disjoint sets, all items, no items,
    failures."""
    halves = np.repeat([9.0, 0.0], SIZE // 2)
    yield from (
        1e20 * np.eye(SIZE)[0],
        np.eye(SIZE)[1],
        halves,
        9 - halves,
        np.ones(SIZE),
        np.zeros(SIZE),
    )
    yield from (np.full(SIZE, math.inf), np.full(SIZE, math.nan))
    yield from np.abs(random.standard_normal((10, SIZE))) * 10
    yield from (random.random((10, SIZE)) < 0.3).astype(float)


def gram_matrices(random):
    """Positive semi-definite matrices of orthogonal, equal and random vectors, and of several of
    them."""
    for vector in (
        np.eye(SIZE)[0] * 1e3,
        np.eye(SIZE)[1] * 1e3,
        np.eye(SIZE)[0] - np.eye(SIZE)[1],
        np.ones(SIZE),
    ):
        yield np.outer(vector, vector)
    for width in (1, 1, 2, SIZE):
        factors = random.standard_normal((SIZE, width)) * 10
        yield factors @ factors.T
    yield from (np.eye(SIZE), np.zeros((SIZE, SIZE)))


def profiles(random):
    """Ratings 1 to 5 of some items: opposite ratings of the same items, disjoint items, random
    ones, ratings outside the scale."""
    whole = [
        np.where(np.arange(SIZE) < SIZE // 2, low, high)
        for low in (0, 1, 5)
        for high in (0, 1, 5, 9)
    ]
    yield from whole
    yield from (random.integers(0, 6, SIZE) for _ in range(20))


def ratings(random):
    """Contributions to item means: each rating mapped to [-1, 1], and an indicator."""
    for own in profiles(random):
        yield np.stack([scaled(own, (1.0, 5.0)), np.ones(SIZE)]) * (own > 0)


def deviations(random):
    """The same ratings in units of the scale, which is not equivalent."""
    for own in profiles(random):
        yield np.stack([own - 3.0, np.ones(SIZE)]) * (own > 0)


def updates(random):
    """Vectors with signs."""
    yield from (np.eye(SIZE)[0] * 9, -np.eye(SIZE)[0] * 9, np.ones(SIZE), -np.ones(SIZE))
    yield from random.standard_normal((10, SIZE))


def symmetric_matrices(random):
    """Matrices that are symmetric and not semi-definite."""
    yield from (np.eye(SIZE) * 5, -np.eye(SIZE) * 5)
    yield from (part + part.T for part in random.standard_normal((5, SIZE, SIZE)))


def largest_move(kind, order=2):
    clip = Clip(3.0, order)
    clipped = [clip({"x": one})["x"].ravel() for one in kind(np.random.default_rng(4))]
    return max(np.linalg.norm(one - other, ord=order) for one in clipped for other in clipped)


@pytest.mark.parametrize("kind", [counts, gram_matrices, ratings])
def test_without_signs_an_exchange_moves_the_sum_by_sqrt_2_of_the_clip_norm_and_no_more(kind):
    bound = Clip(3.0, 2, "non-negative").sensitivity("replace-one")
    assert bound == pytest.approx(3 * math.sqrt(2))
    assert largest_move(kind) <= bound * (1 + 1e-12)
    assert largest_move(kind) == pytest.approx(bound, rel=1e-5), (
        "the bound is reached, so nothing smaller would do"
    )


@pytest.mark.parametrize("kind", [updates, symmetric_matrices])
def test_signed_updates_do_not_get_it(kind):
    assert largest_move(kind) > 1.4 * Clip(3.0, 2, "non-negative").sensitivity("replace-one")
    assert largest_move(kind) == pytest.approx(Clip(3.0).sensitivity("replace-one"), rel=1e-5)
    assert Clip(3.0).sensitivity("replace-one") == 6.0


def test_ratings_in_other_units_than_their_counts_do_not_get_it_either():
    assert largest_move(deviations) > 1.2 * Clip(3.0, 2, "non-negative").sensitivity("replace-one")


def test_in_the_l1_norm_nothing_is_gained():
    assert largest_move(counts, order=1) == pytest.approx(6.0, rel=1e-5)
    assert Clip(3.0, 1, "non-negative").sensitivity("replace-one") == 6.0


def test_adding_or_removing_a_user_moves_the_sum_by_at_most_the_clip_norm():
    for clip in (Clip(3.0), Clip(3.0, 2, "non-negative"), Clip(3.0, 1)):
        assert clip.sensitivity("add-remove") == 3.0


def plan(contributions, **settings):
    config = PrivacyConfig.parse({"clip-norm": 3.0, **settings}, at="privacy")
    return Plan.of(config, "full", {}, 100, 1, contributions=contributions)


def test_a_plan_needs_less_noise_for_the_same_event():
    signed, counted = (
        plan(kind, epsilon=2.0, delta=1e-5, backend="pld") for kind in ("signed", "non-negative")
    )
    assert counted.noise_multiplier == pytest.approx(signed.noise_multiplier)
    assert counted.noise_std == pytest.approx(signed.noise_std / math.sqrt(2))
    assert counted.sensitivity * counted.noise_multiplier == pytest.approx(counted.noise_std)


def test_noise_that_is_given_relative_to_the_clip_norm_counts_for_more():
    given = {"noise-multiplier": 2.0, "noise-relative-to": "clip-norm"}
    assert plan("signed", **given).noise_multiplier == pytest.approx(1.0)
    assert plan("non-negative", **given).noise_multiplier == pytest.approx(math.sqrt(2))
    laplace = {**given, "mechanism": "laplace"}
    assert plan("non-negative", **laplace).event() == plan("signed", **laplace).event()
