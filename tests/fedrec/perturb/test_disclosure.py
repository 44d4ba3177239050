# SPDX-License-Identifier: Apache-2.0
"""Linkage and recovery against brute force, and the linkage of random replacement on Amazon
Office."""

import math

import numpy as np
import pytest

from fedrec.data.perturbation import Perturbed
from fedrec.data.population import Population
from fedrec.experiment.loading import load
from fedrec.perturb.disclosure import binary, disclosure, linkage
from fedrec.perturb.members.random_replacement import RandomReplacement, RandomReplacementConfig

OFFICE = {
    "name": "office",
    "rounds": 1,
    "dataset": {"name": "amazon-upc"},
    "split": {"name": "published"},
    "sampler": {"name": "fixed-size", "cohort": 10},
}


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
            shared = sum(
                math.log(real.num_users / having[i]) for i in sorted(own & other) if having[i]
            )
            scores.append(shared / math.sqrt(max(1, len(other))))
        best = [
            n for n, score in enumerate(scores) if math.isclose(score, max(scores), abs_tol=1e-9)
        ]
        found += (user in best) / len(best)
    return found / len(profiles[1])


def replaced(data, ratio, seed=0):
    return RandomReplacement(
        RandomReplacementConfig.parse({"replacement-ratio": ratio}), seed
    ).perturb(data)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.6, 0.9])
def test_linkage_by_hand(two_tastes, ratio):
    found = replaced(two_tastes, ratio).rows
    expected = by_hand(two_tastes.rows, found)
    assert linkage(binary(two_tastes.rows), binary(found)) == pytest.approx(expected, abs=1e-9)


def test_shares_of_what_is_kept(two_tastes):
    found = disclosure(two_tastes.rows, replaced(two_tastes, 0.5), 0)
    assert found.kept == pytest.approx(1 - found.replaced) and 0.4 < found.kept < 0.6
    whole = disclosure(two_tastes.rows, replaced(two_tastes, 0.0), 0)
    assert (whole.kept, whole.replaced, whole.chance) == (1.0, 0.0, 1 / 60)
    assert math.isnan(whole.recovered["top-1"])  # nothing was replaced


def test_a_substitute_that_reveals_its_original_is_detected(make_data):
    """Item n is always replaced by n + 20: an attacker who knows half of the users can recover the
    others."""
    users = np.repeat(np.arange(200), 3)
    items = (
        np.random.default_rng(0).permuted(np.tile(np.arange(20), (200, 1)), axis=1)[:, :3].ravel()
    )
    data = make_data(users.tolist(), items.tolist(), 200, 40)
    moved = make_data(users.tolist(), (items + 20).tolist(), 200, 40).rows
    found = disclosure(data.rows, Perturbed(moved, np.arange(600)), 0)
    assert found.recovered["top-1"] > 0.95 and found.frequent["top-1"] < 0.15
    hidden = disclosure(data.rows, Perturbed(replaced(data, 1.0).rows, np.arange(600)), 0)
    assert hidden.recovered["top-1"] < 0.25


@pytest.mark.slow
@pytest.mark.real_data
def test_linkage_of_random_replacement_on_office():
    """Measured by an independent implementation: .996, .954, .751, .062 at k .2, .4, .6, .8."""
    for ratio, expected in ((0.2, 0.996), (0.4, 0.954), (0.6, 0.751), (0.8, 0.062)):
        perturb = {"name": "random-replacement", "replacement-ratio": ratio}
        population = Population.of(load({**OFFICE, "perturb": perturb}))
        real = population.interactions.with_rows(population.partition.train_rows)
        assert linkage(binary(real), binary(population.perturbed.rows)) == pytest.approx(
            expected, abs=0.02
        )
