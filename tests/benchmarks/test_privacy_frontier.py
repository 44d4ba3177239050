# SPDX-License-Identifier: Apache-2.0
"""The points of the frontier load, and their phases together cost their epsilon, by the closed form for Gaussians."""

from __future__ import annotations

import math

import pytest
from scipy.stats import norm

from benchmarks.privacy_frontier import points
from fedrec.experiment import load

POINTS = list(points())


@pytest.mark.parametrize("point", POINTS, ids=[f"{p.experiment}-{p.epsilon:g}" for p in POINTS])
def test_a_point_is_a_shipped_experiment_with_its_settings(point):
    table = load(point.experiment).table()
    del table["privacy"]["epsilon"]
    experiment = load(table, point.settings())
    assert experiment.privacy is not None and experiment.sampler.name == "full"
    if math.isinf(point.epsilon):
        assert experiment.privacy.noise_multiplier == 0
    else:
        assert (experiment.privacy.epsilon, experiment.privacy.delta) == (point.epsilon, 1e-5)
        assert experiment.privacy.adjacency == "replace-one"


def test_each_system_is_there_at_each_epsilon_of_the_table():
    found = {(point.system, point.epsilon) for point in POINTS}
    systems = {"DP-PrivRec", "DP-PrivRec-One", "LM-PrivRec"}
    assert {(system, epsilon) for system in systems for epsilon in (2.0, 5.0, 15.0)} <= found


def test_the_shipped_phases_compose_to_the_target():
    """With everybody in every round: mu^2 = sum of 1 / z^2, and delta(epsilon) of the Gaussian with that mu."""
    from collections import Counter

    from fedrec.privacy.plan import Plan

    for name, main in (("dp-privrec-one-ml1m", 1), ("dp-privrec-ml1m", 2)):
        privacy = load(name).privacy
        assert privacy is not None and privacy.epsilon is not None
        factor = privacy.noise_factor("popularity")
        mix = Counter({factor: 1, 1.0: main})
        plans = [
            Plan.of(privacy.in_phase(phase), "full", {}, 4832, 1 + main, factor=privacy.noise_factor(phase), mix=mix)
            for phase in ("popularity", *["main"] * main)
        ]
        mu = math.sqrt(sum(plan.noise_multiplier**-2 for plan in plans))
        delta = norm.cdf(mu / 2 - 5 / mu) - math.exp(5) * norm.cdf(-mu / 2 - 5 / mu)
        assert delta <= 1.001e-5 and delta == pytest.approx(1e-5, rel=0.02)
