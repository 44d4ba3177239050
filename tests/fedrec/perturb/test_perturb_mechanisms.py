# SPDX-License-Identifier: Apache-2.0
"""The mechanisms follow the equations: frequencies of all outcomes against their probabilities."""

import math

import numpy as np
import pytest
from scipy.stats import chisquare

from fedrec.errors import DataError
from fedrec.perturb.targeted.mechanisms import (
    Interaction,
    coin_flip,
    keep_probability,
    randomised_response,
)

DRAWS = 20_000


def test_keep_probability_is_that_of_the_equation():
    for epsilon in (0.1, 3.0):
        assert keep_probability(epsilon) == pytest.approx(
            math.exp(epsilon) / (math.exp(epsilon) + 1)
        )
    assert keep_probability(0.1) == pytest.approx(0.525, abs=5e-4)
    assert keep_probability(0.1, 3707) == pytest.approx(2.98e-4, rel=2e-3)
    assert keep_probability(2000.0, 5) == 1.0


@pytest.mark.parametrize("num_values", [1, 3])
def test_coin_flip_of_one_slot(num_values):
    """The client has items 1 and 4 of 6; the slot holds item 4 with the last value."""
    epsilon = 0.8
    values = None if num_values == 1 else np.full(DRAWS, num_values - 1)
    real = Interaction(np.full(DRAWS, 4), values)
    sizes = {"num_items": 6, "num_values": num_values, "epsilon": epsilon}
    out = coin_flip(real, np.array([1, 4]), random=np.random.default_rng(0), **sizes)
    code = out.items * num_values + (0 if out.values is None else out.values)
    keep = math.exp(epsilon) / (math.exp(epsilon) + 1)
    chance = np.zeros((6, num_values))
    chance[[0, 2, 3, 5]] = (1 - keep) / (4 * num_values)
    chance[4, -1] = keep
    seen = np.bincount(code, minlength=6 * num_values)
    assert (seen[chance.ravel() == 0] == 0).all()
    possible = chance.ravel() > 0
    assert chisquare(seen[possible], DRAWS * chance.ravel()[possible]).pvalue > 1e-4


@pytest.mark.parametrize("num_values", [1, 2])
def test_randomised_response_of_one_slot(num_values):
    epsilon, outcomes = 1.2, 5 * num_values
    values = None if num_values == 1 else np.zeros(DRAWS, dtype=np.int64)
    out = randomised_response(
        Interaction(np.full(DRAWS, 3), values),
        num_items=5,
        num_values=num_values,
        epsilon=epsilon,
        random=np.random.default_rng(0),
    )
    code = out.items * num_values + (0 if out.values is None else out.values)
    chance = np.full(outcomes, 1 / (math.exp(epsilon) + outcomes - 1))
    chance[3 * num_values] *= math.exp(epsilon)
    assert chisquare(np.bincount(code, minlength=outcomes), DRAWS * chance).pvalue > 1e-4


def test_a_client_without_unvisited_items_is_refused():
    own = np.arange(4)
    with pytest.raises(DataError, match="unvisited"):
        coin_flip(
            Interaction(own, None),
            own,
            num_items=4,
            num_values=1,
            epsilon=1.0,
            random=np.random.default_rng(0),
        )


def test_one_outcome_stays():
    real = Interaction(np.zeros(3, dtype=np.int64), None)
    assert (
        randomised_response(
            real, num_items=1, num_values=1, epsilon=1.0, random=np.random.default_rng(0)
        )
        is real
    )
