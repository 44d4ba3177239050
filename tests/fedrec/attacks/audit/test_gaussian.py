# SPDX-License-Identifier: Apache-2.0
"""Epsilon between normal distributions, against numerical integration of the densities."""

import math

import numpy as np
import pytest
from scipy import optimize, stats

from fedrec.attacks.audit.gaussian import epsilon_of_normals
from fedrec.privacy.accounting.gdp import gdp_delta, gdp_epsilon


def integrated(first, second, delta):
    """Epsilon by summing (p - e^eps q)+ over a fine grid, the larger of both directions."""
    points = np.linspace(-60, 60, 1_200_001)
    p, q = (stats.norm.pdf(points, *parts) for parts in (first, second))

    def spent(epsilon, p, q):
        return np.maximum(p - math.exp(epsilon) * q, 0).sum() * (points[1] - points[0]) - delta

    return max(
        optimize.brentq(spent, 0, 600, args=pair) if spent(0, *pair) > 0 else 0
        for pair in ((p, q), (q, p))
    )


@pytest.mark.slow
@pytest.mark.parametrize(("mu", "delta"), [(0.5, 1e-5), (1.0, 1e-5), (1.0, 1e-2), (3.0, 1e-6)])
def test_equal_variances(mu, delta):
    expected = integrated((mu, 1), (0, 1), delta)
    assert gdp_epsilon(mu, delta) == pytest.approx(expected, abs=1e-6)
    found = epsilon_of_normals(
        (np.array([mu]), np.array([0.0])), (np.array([1.0]), np.array([1.0])), delta
    )
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((0.0, 1.2), (0.0, 1.0)),
        ((1.0, 1.1), (0.0, 1.0)),
        ((-2.0, 0.5), (1.0, 2.0)),
        ((5.0, 3.0), (4.5, 2.9)),
    ],
)
def test_unequal_variances(first, second):
    means, sds = zip(first, second, strict=True)
    found = epsilon_of_normals(
        tuple(np.array([m]) for m in means), tuple(np.array([s]) for s in sds), 1e-5
    )
    assert found == pytest.approx(integrated(first, second, 1e-5), abs=1e-5)


def test_many_at_once_and_the_odd_ones():
    means = np.array([1.0, 2.0, 2.0, 0.0]), np.array([1.0, 0.0, 0.0, 0.0])
    sds = np.array([1.0, 0.0, 1.0, 0.0]), np.array([1.0, 1.0, 0.0, 0.0])
    assert epsilon_of_normals(means, sds, 1e-5).tolist() == [0.0, math.inf, math.inf, 0.0]


def test_known_values():
    assert gdp_epsilon(0.0, 1e-5) == gdp_epsilon(-1.0, 1e-5) == 0.0
    assert gdp_epsilon(math.inf, 1e-5) == math.inf
    assert gdp_epsilon(0.1, 0.1) == 0.0  # delta alone covers it
    # total variation of N(mu, 1) and N(0, 1) is 2 Phi(mu/2) - 1
    assert gdp_delta(0.0, 1.7) == pytest.approx(2 * stats.norm.cdf(0.85) - 1)
