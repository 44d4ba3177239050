# SPDX-License-Identifier: Apache-2.0
"""Two datasets that differ in one rating: the paper's algorithm leaks more than it states, a
correct mechanism does not."""

import numpy as np
import pytest

from fedrec.attacks.audit.one_rating import audit_one_rating, laplace_score, lower_bound, neighbours
from fedrec.baselines.private.dpsgd_pnbm import DpsgdPnbmConfig


def settings(epsilon):
    return DpsgdPnbmConfig(
        epsilon=epsilon,
        iterations=1,
        start="constant",
        rescale=0.05,
        learning_rate=0.1,
        floor=10.0,
        minimum_ratings=20,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "trials"), [(1.0, 150), (0.5, 300)])
def test_one_rating_of_a_user_with_200_shows_more_than_the_nominal_epsilon(epsilon, trials):
    found = audit_one_rating(settings(epsilon), 200, trials)
    assert found.epsilon > 2 * epsilon, found


def test_a_mechanism_that_holds_is_not_accused():
    """Laplace noise in proportion to the whole L1 distance: the datasets can be distinguished, but
    not beyond epsilon."""
    random = np.random.default_rng(0)
    first, second = np.zeros(40), np.full(40, 0.1)
    scale = np.abs(first - second).sum() / 1.0
    called = [
        sum(
            laplace_score(one + random.laplace(0, scale, 40), first, second, scale) > 0
            for _ in range(4000)
        )
        for one in (first, second)
    ]
    assert lower_bound(*called, 4000).epsilon <= 1.0
    single = [
        sum(
            laplace_score(one + random.laplace(0, 1, 1), np.zeros(1), np.ones(1), 1.0) > 0
            for _ in range(4000)
        )
        for one in (np.zeros(1), np.ones(1))
    ]
    # right with chance .697, wrong with .303: ln of that is .83
    assert 0.6 < lower_bound(*single, 4000).epsilon <= 1.0


def test_the_data_sets_differ_in_one_rating():
    one, other = neighbours(30)
    assert np.array_equal(one.users, other.users) and np.array_equal(one.items, other.items)
    assert np.flatnonzero(one.values != other.values).tolist() == [0]
    assert (one.users == 0).sum() == 30


@pytest.mark.parametrize("change", [{"epsilon": None}, {"iterations": 2}, {"start": "uniform"}])
def test_what_cannot_be_audited_is_refused(change):
    with pytest.raises(ValueError, match="one iteration"):
        audit_one_rating(settings(1.0).model_copy(update=change), 30, 2)
