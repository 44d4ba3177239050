# SPDX-License-Identifier: Apache-2.0
"""Limited sampling: no client more often than allowed, and cohorts that are a function of seed and
round."""

import numpy as np

from server.samplers.limited import Limited, LimitedConfig

CLIENTS = np.array([2, 3, 5, 7, 11, 13, 17])


def make(cohort=3, participations=2, seed=0):
    return Limited(LimitedConfig(cohort=cohort, participations=participations), CLIENTS, seed)


def test_every_client_takes_part_as_often_as_allowed_and_no_more():
    sampler = make()
    cohorts = [sampler.sample(number) for number in range(1, 12)]
    counts = np.bincount(np.concatenate(cohorts), minlength=18)
    assert counts[CLIENTS].tolist() == [2] * 7 and counts.sum() == 14
    assert all(len(np.unique(cohort)) == len(cohort) <= 3 for cohort in cohorts)
    assert len(cohorts[-1]) == 0


def test_without_limit_in_reach_each_client_is_drawn_about_equally_often():
    sampler = make(participations=10_000)
    counts = np.bincount(
        np.concatenate([sampler.sample(number) for number in range(1, 3501)]), minlength=18
    )[CLIENTS]
    assert abs(counts - 1500).max() < 4 * np.sqrt(3500 * 3 / 7 * 4 / 7)
