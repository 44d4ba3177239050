# SPDX-License-Identifier: Apache-2.0
"""The points of the frontier load, and their phases together cost their epsilon, by the closed form
for Gaussian noise."""

from __future__ import annotations

import dataclasses
import math

import pytest
from scipy.stats import norm, ttest_1samp

from fedrec.errors import RunError
from fedrec.experiment.loading import load
from simulations import runner
from simulations.reproduce.grids import privacy_frontier
from simulations.reproduce.grids.privacy_frontier import gap, points

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
        adjacency = "add-remove" if "add-remove" in point.experiment else "replace-one"
        assert experiment.privacy.adjacency == adjacency
        assert all(own.get("adjacency", "replace-one") == adjacency for own in point.beside)


def test_each_system_is_there_at_each_epsilon_of_the_table():
    found = {(point.system, point.epsilon) for point in POINTS}
    systems = {"DP-PrivRec", "DP-PrivRec-One", "LM-PrivRec"}
    assert {(system, epsilon) for system in systems for epsilon in (2.0, 5.0, 15.0)} <= found
    once = {"Fold-in", "Fold-in, +-1", "PureSVD"}
    assert {(system, epsilon) for system in once for epsilon in (1.0, 2.0, 5.0, 15.0)} <= found


@pytest.mark.parametrize("point", POINTS, ids=[f"{p.experiment}-{p.epsilon:g}" for p in POINTS])
def test_settings_at_the_shipped_epsilon_are_those_of_the_experiment(point):
    """What the grid sets for epsilon 5 is what the experiment has anyway, up to the digits of the
    noise factor."""
    if point.epsilon != 5.0 or not point.experiment.startswith(("fed-", "dp-fed-")):
        pytest.skip("its rates follow epsilon elsewhere")
    shipped, found = load(point.experiment), load(point.experiment, point.settings())
    assert found.model == shipped.model and found.strategy == shipped.strategy
    assert shipped.privacy is not None and found.privacy is not None
    factors = [own.noise_factor("popularity") for own in (shipped.privacy, found.privacy)]
    assert factors[0] == pytest.approx(factors[1], abs=5e-3)


def test_the_shipped_phases_compose_to_the_target():
    """With all clients in every round: mu^2 = sum of 1 / z^2, and delta(epsilon) of the Gaussian
    mechanism with that mu."""
    from collections import Counter

    from fedrec.privacy.plan import Plan

    for name, main in (("dp-privrec-one-ml1m", 1), ("dp-privrec-ml1m", 2)):
        privacy = load(name).privacy
        assert privacy is not None and privacy.epsilon is not None
        factor = privacy.noise_factor("popularity")
        mix = Counter({factor: 1, 1.0: main})
        plans = [
            Plan.of(
                privacy.in_phase(phase),
                "full",
                {},
                4832,
                1 + main,
                factor=privacy.noise_factor(phase),
                mix=mix,
            )
            for phase in ("popularity", *["main"] * main)
        ]
        mu = math.sqrt(sum(plan.noise_multiplier**-2 for plan in plans))
        delta = norm.cdf(mu / 2 - 5 / mu) - math.exp(5) * norm.cdf(-mu / 2 - 5 / mu)
        assert delta <= 1.001e-5 and delta == pytest.approx(1e-5, rel=0.02)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    small = [
        "rounds=1",
        "engine.name=serial",
        "dataset.users=60",
        "dataset.items=40",
        "evaluation.every=0",
    ]
    baselines = (
        "evaluation.baselines=['popularity', {name='dp-popularity', epsilon=20.0,"
        " backend='tight-rdp'}]"
    )
    return runner.run(
        "privrec-synthetic", [*small, baselines], output=tmp_path_factory.mktemp("frontier") / "run"
    )


def test_the_gap_is_the_difference_of_the_means_with_the_interval_of_a_paired_t_test(result):
    mean, half = gap(result, "dp-popularity")
    assert mean == pytest.approx(
        result.metrics["hits@20"] - result.baselines["dp-popularity"]["hits@20"]
    )
    # A baseline against itself has no spread; the system against it has that of its users.
    everyone = dataclasses.replace(result, users=result.users * 0)
    flat, spread = gap(everyone, "popularity")
    assert flat == pytest.approx(-result.baselines["popularity"]["hits@20"])
    low, high = ttest_1samp(result.users["hits@20"].to_numpy(), 0).confidence_interval()
    assert 0 < half < spread + (high - low)  # a triangle inequality of standard deviations


def test_a_gap_to_a_baseline_that_has_changed_is_refused(result):
    changed = dataclasses.replace(result, baselines={"popularity": {"hits@20": 0.5}})
    with pytest.raises(RunError, match="not what it was"):
        gap(changed, "popularity")


def test_seeds_before_the_first_are_left_out(result, monkeypatch, capsys):
    asked = []

    def run(point, seed, folder, *, validation):
        asked.append((point.experiment, point.epsilon, seed))
        return result

    monkeypatch.setattr(privacy_frontier, "run", run)
    wanted = [
        "--only",
        "dp-privrec-ml1m",
        "--epsilons",
        "2,inf",
        "--first-seed",
        "1",
        "--seeds",
        "3",
    ]
    privacy_frontier.main(["--output", "unused", *wanted])
    assert asked == [
        ("dp-privrec-ml1m", epsilon, seed) for epsilon in (2.0, math.inf) for seed in (1, 2)
    ]
    printed = capsys.readouterr().out
    assert (
        printed.count("against dp-popularity") == 4
        and f"{result.metrics['hits@20']:.4f} +- 0.0000" in printed
    )
