# SPDX-License-Identifier: Apache-2.0
"""Cohort samplers: functions of the seed and the round, with the documented distribution."""

import numpy as np
import pytest

from fedrec.errors import ExperimentError
from server.samplers.fixed_size import FixedSizeConfig, FixedSizeSampler
from server.samplers.full import FullConfig, FullSampler
from server.samplers.poisson import PoissonConfig, PoissonSampler

CLIENTS = np.arange(5, 205, 5)  # 40 clients, ids with gaps


def fixed(cohort=10, clients=CLIENTS, seed=0):
    return FixedSizeSampler(FixedSizeConfig(cohort=cohort), clients, seed)


def poisson(cohort=10.0, clients=CLIENTS, seed=0):
    return PoissonSampler(PoissonConfig(cohort=cohort), clients, seed)


def test_fixed_size():
    assert {len(fixed(7).sample(round_number)) for round_number in range(100)} == {7}
    assert fixed(40).sample(1).tolist() == CLIENTS.tolist()


def test_fixed_size_is_uniform():
    """Chi-square over 40 clients and 2000 cohorts of 10, corrected for drawing without
    replacement."""
    sampler = fixed()
    counts = np.bincount(np.concatenate([sampler.sample(r) for r in range(2000)]), minlength=205)[
        CLIENTS
    ]
    assert counts.sum() == 20_000
    # Each count is binomial(2000, 1/4), and they sum to a constant: 39 degrees of freedom.
    statistic = ((counts - 500) ** 2 / (2000 * 0.25 * 0.75)).sum() * 39 / 40
    assert 15 < statistic < 80  # all but 1e-4 of the distribution on either side


def test_poisson_mean_and_independence():
    sampler = poisson()
    taken = np.stack([np.isin(CLIENTS, sampler.sample(r)) for r in range(4000)])
    sizes = taken.sum(1)
    assert sampler.probability == 0.25
    assert sizes.mean() == pytest.approx(10, abs=5 * np.sqrt(7.5 / 4000))
    assert sizes.var() == pytest.approx(7.5, rel=0.12)  # 40 * 1/4 * 3/4; a fixed size would have 0
    correlations = np.corrcoef(taken.T)[np.triu_indices(40, 1)]
    # Drawing without replacement would give a mean of -1/39 = -0.026.
    assert abs(correlations.mean()) < 0.005 and np.abs(correlations).max() < 5.5 / np.sqrt(4000)


def test_poisson_may_draw_no_client_and_all_clients():
    assert any(len(poisson(0.1).sample(r)) == 0 for r in range(20))
    assert poisson(40).sample(1).tolist() == CLIENTS.tolist()


@pytest.mark.parametrize("make", [fixed, poisson])
def test_more_than_there_are_is_refused_with_the_number(make):
    with pytest.raises(ExperimentError) as caught:
        make(41)
    assert "sampler.cohort" in caught.value.problem and caught.value.got == "41"
    assert caught.value.fix == "set sampler.cohort = 40 or less"


def test_full_is_all_clients_in_every_round():
    sampler = FullSampler(FullConfig(), CLIENTS, 0)
    assert all(sampler.sample(number).tolist() == CLIENTS.tolist() for number in (1, 2))
