# SPDX-License-Identifier: Apache-2.0
"""Exact totals of nominal schedules, against the formula in exact arithmetic and a mechanism by
hand."""

import math

import pytest

from fedrec.privacy.stated import Stated, amplified, schedule_total


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 5.0])
@pytest.mark.parametrize("rate", [0.01, 0.2, 1.0])
def test_amplification_is_that_of_randomised_response(epsilon, rate):
    """Worst case: the row is in the sample with probability `rate`, and answers e^eps / (1 + e^eps)
    : 1 / (1 + e^eps)."""
    p, q = math.exp(epsilon) / (1 + math.exp(epsilon)), 1 / (1 + math.exp(epsilon))
    assert amplified(epsilon, rate) >= math.log(rate * p / q + 1 - rate) - 1e-12
    assert amplified(epsilon, rate) == pytest.approx(math.log1p(rate * math.expm1(epsilon)))


def test_totals():
    """K ln(1 + g (exp(e / (K g)) - 1)) for several schedules: 1 at K = 10, g = .01 is 54, and so
    on."""
    expected = {
        (1, 10, 0.01): 54,
        (1, 20, 0.05): 1.65,
        (5, 20, 0.01): 408,
        (20, 10, 0.2): 84,
        (0.1, 10, 0.05): 0.110,
    }
    for (nominal, steps, rate), total in expected.items():
        assert schedule_total(nominal, steps, rate) == pytest.approx(total, rel=0.01)
    assert schedule_total(3.0, 7, 1.0) == pytest.approx(3.0)
    assert math.isfinite(schedule_total(20.0, 1, 1e-4))
    assert amplified(1e6, 0.5) == pytest.approx(1e6 - math.log(2))


def test_words_hold_both_numbers():
    said = Stated(1.0, 54.0, "one rating", ("Not so.",)).lines()
    assert "epsilon 1 as stated, for one rating" in said[0]
    assert "54" in said[0]
    assert said[1] == "Not so."
