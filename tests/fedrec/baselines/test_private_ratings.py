# SPDX-License-Identifier: Apache-2.0
"""Private rating baselines: scales of their noise, their stated epsilons, and their limits without
noise."""

import math

import numpy as np
import pytest

from fedrec.baselines.base import Ratings
from fedrec.baselines.private.dp_item_mean import DpItemMean, DpItemMeanConfig
from fedrec.baselines.private.dpps_mf import DppsMf, DppsMfConfig
from fedrec.baselines.private.dpps_pnbm import DppsPnbm, DppsPnbmConfig, inclusion
from fedrec.baselines.private.dpsgd_mf import DpsgdMf, DpsgdMfConfig
from fedrec.baselines.private.dpsgd_pnbm import DpsgdPnbm, DpsgdPnbmConfig, error_bound, sensitivity
from fedrec.errors import ExperimentError
from fedrec.evaluation.central import evaluate_baselines
from fedrec.neighbourhood.profiles import Profiles, item_means
from fedrec.privacy.config import PrivacyConfig
from fedrec.privacy.plan import Plan
from fedrec.rng import stream


@pytest.fixture(scope="module")
def ratings():
    random = np.random.default_rng(0)
    rows = np.array(
        [
            (u, i)
            for u in range(40)
            for i in random.choice(60, random.integers(8, 50), replace=False)
        ]
    )
    return Ratings(40, 60, rows[:, 0], rows[:, 1], random.integers(1, 6, len(rows)).astype(float))


def test_bounds_of_algorithm_one():
    """1.6, 1.2, 1.0 for C = 10 and ratings from 1 to 5."""
    assert [sensitivity(t, 4.0, 10.0) for t in (1, 2, 3)] == pytest.approx([1.6, 1.2, 1.0])
    assert error_bound(1, 4.0) == 2 and error_bound(10**9, 4.0) == pytest.approx(0.5)


def test_laplace_noise_of_algorithm_one_has_its_scale(ratings):
    """The noise of one step, off the diagonal: mean 0 and mean magnitude b."""
    one = {
        "iterations": 1,
        "start": "constant",
        "learning_rate": 0.4,
        "rescale": 10.0,
        "minimum_ratings": 9,
    }
    systems = [DpsgdPnbm(DpsgdPnbmConfig(epsilon=epsilon, **one)) for epsilon in (2.0, None)]
    for system in systems:
        system.fit_ratings(ratings)
    noise = systems[0].similarity - systems[1].similarity
    assert not noise.diagonal().any()
    noise, scale = noise[~np.eye(60, dtype=bool)], 0.4 * 10 * 1.6 / 2
    assert np.abs(noise).mean() == pytest.approx(scale, rel=0.06)
    assert abs(noise.mean()) < 0.1 * scale
    # a normal one would have 1.57
    assert np.square(noise).mean() == pytest.approx(2 * scale**2, rel=0.12)


def test_what_algorithm_one_states():
    found = DpsgdPnbm(DpsgdPnbmConfig(epsilon=1.0, iterations=10, sample=0.01)).stated()
    assert found is not None and found.nominal == 1 and found.exact == pytest.approx(54, rel=0.01)
    assert any("n (n - 1)" in line for line in found.caveats)
    started = DpsgdPnbm(DpsgdPnbmConfig(start="pearson")).stated()
    assert started is not None
    assert math.isinf(started.exact)
    assert "start from the ratings" in started.caveats[0]
    assert DpsgdPnbm(DpsgdPnbmConfig(epsilon=None)).stated() is None


def test_too_few_ratings_are_refused(ratings):
    with pytest.raises(ExperimentError, match="no users to learn from"):
        DpsgdPnbm(DpsgdPnbmConfig(minimum_ratings=1000)).fit_ratings(ratings)


@pytest.mark.parametrize(
    ("settings", "exact"),
    [
        ({}, 5 / 0.09),
        ({"bound": "tight"}, 20 / 0.09),
        ({"bound": "tight", "temperature": 1.0}, 20.0),
    ],
)
def test_what_a_posterior_sample_states(settings, exact):
    """Scaled by epsilon / 4B an exact sample is epsilon / 4-DP; the temperature divides."""
    found = DppsPnbm(DppsPnbmConfig(epsilon=20.0, **settings)).stated()
    assert found is not None and found.nominal == 20 and found.exact == pytest.approx(exact)


def profiles_of(ratings):
    return Profiles.of(
        ratings.num_users, ratings.num_items, ratings.users, ratings.items, ratings.values
    )


def test_batches_estimate_the_gradient_without_bias(ratings):
    """Mean over many batches against a batch of everything, for similarities and for factors."""
    profiles, random = profiles_of(ratings), np.random.default_rng(1)
    point = {DppsPnbm: random.random((60, 60)), DppsMf: random.normal(size=(100, 3))}
    configs = {
        DppsPnbm: DppsPnbmConfig(batch=2000, epsilon=None),
        DppsMf: DppsMfConfig(batch=2000, factors=3, epsilon=None),
    }
    for cls, start in point.items():
        estimate = cls(configs[cls]).gradient(profiles)
        draws = np.array([estimate(start, random) for _ in range(150)])
        half = draws[:75].mean(0) - draws[75:].mean(0)
        if cls is DppsPnbm:
            from fedrec.neighbourhood.gradients import Bounds, Examples

            examples = Examples(profiles, item_means(profiles)[0])
            exact, _ = examples.gradient(start, np.arange(len(examples)), Bounds(low=1.0, high=5.0))
            exact = exact + 0.02 / inclusion(profiles, 2000) * start
        else:
            means, users = item_means(profiles)[0], profiles.users
            guess = means[profiles.items] + (start[users] * start[40 + profiles.items]).sum(1)
            errors = np.where((guess < 1) | (guess > 5), 0, guess - profiles.values)
            dense = np.zeros((40, 60))
            dense[users, profiles.items] = errors
            exact = np.concatenate([dense @ start[40:], dense.T @ start[:40]]) + 0.02 * start
        assert np.square(draws.mean(0) - exact).sum() < 1.5 * np.square(half / 2).sum()


@pytest.mark.slow
def test_a_chain_without_noise_goes_downhill(ratings):
    """A temperature near 0 is gradient descent on the scaled energy."""
    for cls, config in (
        (
            DppsPnbm,
            DppsPnbmConfig(
                epsilon=None, temperature=1e-12, steps=60, learning_rate=0.02, batch=2000, decay=0.0
            ),
        ),
        (
            DppsMf,
            DppsMfConfig(
                epsilon=None,
                temperature=1e-12,
                steps=200,
                learning_rate=0.01,
                batch=2000,
                decay=0.0,
            ),
        ),
    ):
        errors = []
        for steps in (0, config.steps):
            system = cls(config.model_copy(update={"steps": steps}))
            system.fit_ratings(ratings)
            found = system.predict(ratings, ratings.users, ratings.items)
            errors.append(np.square(found - ratings.values).mean())
        assert errors[1] < 0.95 * errors[0], cls


def test_inclusion_is_the_printed_formula(ratings):
    found, total = inclusion(profiles_of(ratings), 7), len(ratings.items)
    counts, i, j = np.bincount(ratings.items, minlength=60), 3, 11
    expected = (
        1
        - counts[i]
        * counts[j]
        / total**2
        * (1 - counts[j] / total) ** 6
        * (1 - counts[i] / total) ** 6
    )
    assert found[i, j] == pytest.approx(expected, rel=1e-12) and found.min() > 0.99


def test_without_noise_dpsgd_mf_is_plain_descent(ratings):
    """Against a loop over ratings, from the same start and in the same order."""
    config = DpsgdMfConfig(
        epsilon=None, epochs=2, factors=3, learning_rate=0.01, regularisation=0.2,
        error_bound=1e9, seed=4,
    )  # fmt: skip
    system = DpsgdMf(config)
    system.fit_ratings(ratings)
    random = stream(4, "baseline-dpsgd-mf")
    p, q = random.normal(0, 0.1, (40, 3)), random.normal(0, 0.1, (60, 3))
    left = (
        ratings.values
        - system._mean
        - system._of_items[ratings.items]
        - system._of_users[ratings.users]
    )
    for _ in range(2):
        for n in random.permutation(len(left)):
            u, i = ratings.users[n], ratings.items[n]
            error = left[n] - p[u] @ q[i]
            p[u], q[i] = (
                p[u] + 0.01 * (error * q[i] - 0.2 * p[u]),
                q[i] + 0.01 * (error * p[u] - 0.2 * q[i]),
            )
    np.testing.assert_allclose(system.users, p, atol=1e-12)
    np.testing.assert_allclose(system.items, q, atol=1e-12)


def test_noise_of_dpsgd_mf_and_what_it_states():
    """Every access to a rating has its share of epsilon: K of them and a third of each average."""
    system = DpsgdMf(DpsgdMfConfig(epsilon=2.0, epochs=10, average_share=0.1))
    noise = system._noise(np.random.default_rng(0), 100_000, 10 / 0.9)
    assert np.abs(noise).mean() == pytest.approx(4 * 10 / (0.9 * 2), rel=0.02)
    found = system.stated()
    assert found is not None and found.exact == found.nominal == 2


def test_noisy_item_means(ratings):
    """Without noise and clipping they are damped item means; the plan equals the stated one."""

    class Noiseless(DpItemMean):
        def plan(self, users):
            return Plan.of(PrivacyConfig(clip_norm=1e3, noise_multiplier=0.0), "full", {}, users, 1)

    exact = Noiseless(DpItemMeanConfig(damping=3.0, user_damping=2.0))
    exact.fit_ratings(ratings)
    overall = ratings.values.mean()
    sums = np.bincount(ratings.items, ratings.values, 60)
    counts = np.bincount(ratings.items, minlength=60)
    means = (sums + 3 * overall) / (counts + 3)
    np.testing.assert_allclose(exact._means, means, atol=1e-5)
    left = np.bincount(ratings.users, ratings.values - means[ratings.items]) / (
        np.bincount(ratings.users) + 2
    )
    found = exact.predict(ratings, ratings.users, ratings.items)
    np.testing.assert_allclose(
        found, np.clip(means[ratings.items] + left[ratings.users], 1, 5), atol=1e-5
    )
    private = DpItemMean(DpItemMeanConfig(epsilon=1.0, clip_norm=5.0))
    private.fit_ratings(ratings)
    told = private.stated()
    assert told is not None and told.exact == pytest.approx(1.0, rel=1e-3) and told.nominal == 1
    # replace-one: no two users' contributions have a negative inner product
    assert private.plan(40).sensitivity == pytest.approx(5 * 2**0.5)
    assert (
        DpItemMean(DpItemMeanConfig(clip_norm=5.0, adjacency="add-remove")).plan(40).sensitivity
        == 5
    )


def test_numbers_are_shown_with_the_errors(world):
    """`nominal-epsilon` and `epsilon` in the table of results, if the system states them."""
    names = {"dpsgd-mf": {"epsilon": 3.0}, "item-mean": {}}
    found = evaluate_baselines(names, world("rating"), held_out="test")
    assert found["dpsgd-mf"]["nominal-epsilon"] == found["dpsgd-mf"]["epsilon"] == 3
    assert set(found["item-mean"]) == {"mae", "rmse"}


@pytest.mark.parametrize(
    ("config", "settings", "match"),
    [
        (DpsgdMfConfig, {"average-share": 1.0}, "average-share"),
        (DppsPnbmConfig, {"bound": "loose"}, "bound"),
        (DppsMfConfig, {"temperature": 0.0}, "temperature"),
        (DpItemMeanConfig, {"clip-norm": 0.0}, "clip-norm"),
        (DpItemMeanConfig, {"clipnorm": 1.0}, "clip-norm"),
    ],
)
def test_wrong_settings_are_named(config, settings, match):
    with pytest.raises(ExperimentError, match=match):
        config.parse(settings)
