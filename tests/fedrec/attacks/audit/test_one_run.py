# SPDX-License-Identifier: Apache-2.0
"""The one-run bound against values of an independent implementation, and on randomised response,
whose epsilon is known."""

import math

import numpy as np
import pytest
from scipy import stats

from fedrec.attacks.audit.one_run import one_run_bound, one_run_epsilon

# (canaries, guesses, correct, delta): what jax_privacy's one-run auditor gives at significance .05
REFERENCE = {
    (1000, 600, 600, 1e-5): 5.2704,
    (1000, 100, 90, 1e-5): 1.6261,
    (1000, 1000, 700, 1e-5): 0.7318,
    (500, 50, 50, 1e-6): 2.7833,
    (2000, 400, 300, 1e-5): 0.9028,
}


@pytest.mark.parametrize("case", REFERENCE)
def test_reference_values(case):
    assert one_run_epsilon(*case, significance=0.05) == pytest.approx(REFERENCE[case], abs=1e-4)


def test_without_delta_it_is_the_exact_limit_of_a_proportion():
    low = stats.beta.ppf(0.05, 80, 21)  # one-sided Clopper-Pearson for 80 right guesses of 100
    assert one_run_epsilon(100, 100, 80, 0.0) == pytest.approx(math.log(low / (1 - low)), abs=1e-5)


def test_no_more_than_chance_is_no_bound():
    assert one_run_epsilon(100, 100, 50, 1e-5) == one_run_epsilon(100, 50, 0, 1e-5) == 0.0


@pytest.mark.parametrize("bad", [(10, 11, 5), (10, 5, 6), (10, 5, -1)])
def test_wrong_counts_are_refused(bad):
    with pytest.raises(ValueError, match="correct <= guesses <= canaries"):
        one_run_epsilon(*bad, 1e-5)


def test_it_holds_for_randomised_response_and_is_not_far_below():
    epsilon, bounds = 1.5, []
    for seed in range(100):
        random = np.random.default_rng(seed)
        signs = random.choice([-1, 1], 500)
        honest = random.random(500) < math.exp(epsilon) / (1 + math.exp(epsilon))
        bounds.append(
            one_run_bound(
                np.where(honest, signs, -signs) * random.uniform(1, 2, 500), signs, 0.0
            ).epsilon
        )
    assert np.mean(np.array(bounds) > epsilon) <= 0.05
    assert np.median(bounds) > 1.1


def test_only_the_most_extreme_canaries_are_guessed():
    random = np.random.default_rng(0)
    signs = random.choice([-1, 1], 1000)
    scores = random.normal(size=1000)
    loud = random.permutation(1000)[:100]
    scores[loud] = 9.0 * signs[loud]  # these guesses are certain, the others random
    found = one_run_bound(scores, signs, 1e-5)
    assert (found.guesses, found.correct) == (100, 100) and found.epsilon > 2.5


def test_a_score_of_zero_is_no_right_guess():
    signs = np.repeat([-1, 1], 50)
    assert one_run_bound(np.zeros(100), signs, 1e-5).epsilon == 0.0
