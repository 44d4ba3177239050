# SPDX-License-Identifier: Apache-2.0
"""Bootstrap intervals: against resampling one by one, coverage, shared draws, and time."""

import time

import numpy as np
import pytest

from fedrec.report.bootstrap import bootstrap_intervals


def one_by_one(values, resamples, seed):
    """Efron's percentile interval with a loop."""
    random = np.random.default_rng(seed)
    means = [random.choice(values, len(values)).mean() for _ in range(resamples)]
    return np.quantile(means, [0.025, 0.975])


def test_an_interval_is_that_of_resampling_one_by_one():
    values = np.random.default_rng(3).exponential(1.0, 300)
    (found,) = bootstrap_intervals([values], resamples=10_000)
    np.testing.assert_allclose(found, one_by_one(values, 10_000, 1), atol=0.01)


def test_many_samples_at_once_have_the_intervals_that_each_has_alone():
    random = np.random.default_rng(0)
    samples = [random.normal(size=n) for n in (40, 7, 40, 1, 40)]
    together = bootstrap_intervals(samples, resamples=500, seed=5)
    alone = [bootstrap_intervals([values], resamples=500, seed=5)[0] for values in samples]
    np.testing.assert_allclose(together, alone, rtol=1e-12)
    assert together[3] == pytest.approx((samples[3][0], samples[3][0]))


def test_draws_are_paired():
    """A constant difference for all users shifts the interval by that constant."""
    values = np.random.default_rng(0).normal(size=50)
    one, other = bootstrap_intervals([values, values + 0.25], resamples=300)
    np.testing.assert_allclose(np.subtract(other, one), 0.25)


def test_nothing_has_no_interval():
    with pytest.raises(ValueError, match="got none"):
        bootstrap_intervals([np.ones(3), np.empty(0)])


def test_many_systems_cost_little_more_than_one():
    """Resamples are drawn once: 200 systems take less than 20 times as long as one."""
    samples = list(np.random.default_rng(0).normal(size=(200, 1000)))
    bootstrap_intervals(samples[:1], resamples=500)
    started = time.process_time()
    bootstrap_intervals(samples[:1], resamples=2000)
    one = time.process_time() - started
    bootstrap_intervals(samples, resamples=2000)
    assert time.process_time() - started - one < 20 * one


def test_the_bootstrap_interval_has_its_coverage():
    random, hits = np.random.default_rng(1), 0
    for trial in range(200):
        ((low, high),) = bootstrap_intervals([random.normal(0.3, 1, 50)], resamples=400, seed=trial)
        hits += low <= 0.3 <= high
    assert 0.88 <= hits / 200 <= 0.99


def test_the_interval_of_a_large_sample_is_the_normal_one():
    values = np.random.default_rng(0).normal(2, 1, 4000)
    ((low, high),) = bootstrap_intervals([values], resamples=2000)
    half = 1.96 * values.std() / np.sqrt(4000)
    assert low == pytest.approx(values.mean() - half, abs=0.005)
    assert high == pytest.approx(values.mean() + half, abs=0.005)
