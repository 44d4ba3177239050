# SPDX-License-Identifier: Apache-2.0
"""The chain against a closed form, and against another sampler of the same posterior."""

import numpy as np
import pytest

from fedrec.neighbourhood.gradients import Bounds, Examples, predicted
from fedrec.neighbourhood.langevin import Langevin
from fedrec.neighbourhood.profiles import Profiles, item_means


def chain(langevin, start, gradient, random, *, burn_in):
    """All points after a burn-in, of many chains in parallel."""
    point, kept = start.copy(), []
    for step in range(1, langevin.steps + 1):
        point = langevin.stepped(point, gradient, step, random)
        if step > burn_in:
            kept.append(point.copy())
    return np.concatenate(kept)


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_the_conjugate_limit(temperature):
    """Without the denominator the posterior of a row is normal; its mean and covariance are known,
    and scale with rho."""
    random = np.random.default_rng(0)
    design, target = random.normal(size=(40, 3)), random.normal(size=40)
    precision = design.T @ design + 2 * np.eye(3)
    mean = np.linalg.solve(precision, design.T @ target)
    points = chain(
        Langevin(steps=600, rate=2e-3, decay=0.0, temperature=temperature),
        np.zeros((500, 3)),
        lambda s, _: s @ precision - design.T @ target,
        random,
        burn_in=300,
    )
    np.testing.assert_allclose(points.mean(0), mean, atol=0.02)
    # Euler steps of size h have the covariance (P (1 - h P / 4))^-1 exactly.
    expected = temperature * np.linalg.inv(precision @ (np.eye(3) - 2e-3 / 4 * precision))
    np.testing.assert_allclose(np.cov(points.T), expected, rtol=0.1, atol=0.03 * expected.max())


def test_noise_and_steps_have_the_scale_of_the_schedule():
    """Without an energy a chain is a random walk of variance rho eta_1 sum of t^-xi."""
    random, steps = np.random.default_rng(1), 50
    langevin = Langevin(steps, rate=0.3, decay=0.3, temperature=0.09)
    found = langevin.sample(np.zeros(200_000), lambda x, _: np.zeros_like(x), random)
    expected = 0.09 * 0.3 * (np.arange(1, steps + 1) ** -0.3).sum()
    assert found.var() == pytest.approx(expected, rel=0.02)
    assert abs(found.mean()) < 5 * np.sqrt(expected / 200_000)
    drift = Langevin(3, rate=0.1, decay=1.0, temperature=1e-30).sample(
        np.ones(1), lambda x, _: np.ones_like(x), random
    )
    assert drift[0] == pytest.approx(1 - 0.05 * (1 + 1 / 2 + 1 / 3))


def elliptical_slices(log_likelihood, draw_prior, sweeps, random):
    """Elliptical slice sampling (Murray, Adams and MacKay 2010): no step size, so no bias."""
    point, kept = draw_prior(), []
    for _ in range(sweeps):
        other, height = draw_prior(), log_likelihood(point) + np.log(random.random())
        angle = random.uniform(0, 2 * np.pi)
        low, high = angle - 2 * np.pi, angle
        while True:
            proposal = point * np.cos(angle) + other * np.sin(angle)
            if log_likelihood(proposal) > height:
                break
            low, high = (angle, high) if angle < 0 else (low, angle)
            angle = random.uniform(low, high)
        point = proposal
        kept.append(point)
    return np.array(kept)


def test_the_posterior_of_similarities_is_that_of_elliptical_slice_sampling():
    """Mean and spread of predictions from 6 items, with predictions clipped inside the density."""
    random = np.random.default_rng(2)
    users, items = (
        grid.ravel() for grid in np.meshgrid(np.arange(25), np.arange(6), indexing="ij")
    )
    taste = random.normal(size=(25, 1)) @ np.array([[1.0, 1, -1, -1, 1, -1]])
    values = np.clip(3 + taste + 0.4 * random.normal(size=(25, 6)), 1, 5).ravel()
    profiles = Profiles.of(25, 6, users, items, values)
    means, _ = item_means(profiles)
    examples, bounds = Examples(profiles, means), Bounds(low=1.0, high=5.0)
    everything, asked = np.arange(len(examples)), (np.arange(6), np.arange(6))

    def energy_gradient(similarity, _):
        return examples.gradient(similarity, everything, bounds)[0] + similarity

    def guesses(samples):
        return np.array([predicted(one, profiles, means, *asked) for one in samples])

    def log_likelihood(similarity):
        return -0.5 * examples.gradient(similarity, everything, bounds)[1]

    slices = elliptical_slices(log_likelihood, lambda: random.normal(size=(6, 6)), 6000, random)[
        500::3
    ]
    langevin, point, kept = Langevin(12_000, rate=0.02, decay=0.0), random.normal(size=(6, 6)), []
    for step in range(1, langevin.steps + 1):
        point = langevin.stepped(point, energy_gradient, step, random)
        if step > 1000 and step % 6 == 0:
            kept.append(point.copy())
    one, other = guesses(slices), guesses(kept)
    np.testing.assert_allclose(one.mean(0), other.mean(0), atol=0.12)
    np.testing.assert_allclose(one.std(0), other.std(0), atol=0.1, rtol=0.25)
