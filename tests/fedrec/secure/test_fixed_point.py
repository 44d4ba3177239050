# SPDX-License-Identifier: Apache-2.0
"""Fixed point: sums are exact to the step, nothing wraps around, and numbers that are too large are
refused."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fedrec.errors import ClientError, ExperimentError
from fedrec.secure.fixed_point import bits_for, decoded, encoded, limit

SURE = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
FINITE = st.floats(-1000, 1000)


@pytest.mark.parametrize(
    ("value", "bits", "expected"),
    [
        (0.0, 8, 0),
        (1.0, 8, 256),
        (-1.0, 8, 2**64 - 256),
        (0.5, 0, 0),
        (1.5, 0, 2),
        (-2.75, 1, 2**64 - 6),
    ],
)
def test_by_hand(value, bits, expected):
    """Ties go to the even integer."""
    assert encoded(np.array([value]), bits, 2).tolist() == [expected]


@SURE
@given(
    st.lists(st.lists(FINITE, min_size=4, max_size=4), min_size=1, max_size=6), st.integers(0, 40)
)
def test_a_sum_is_the_exact_sum_within_half_a_step_per_node(rows, bits):
    total = sum(
        (encoded(np.array(row), bits, len(rows)) for row in rows), np.zeros(4, dtype=np.uint64)
    )
    for place, found in enumerate(decoded(total, bits)):
        exact = sum(Fraction(row[place]) for row in rows)
        assert (
            abs(Fraction(float(found)) - exact)
            <= Fraction(len(rows), 2 ** (bits + 1)) + abs(exact) / 2**52
        )


@SURE
@given(st.integers(1, 200), st.floats(1e-9, 1e9))
@example(1, 1.0)
@example(2, 1.0)
@example(4, 0.25)
def test_as_many_digits_as_there_is_room_for(nodes, bound):
    bits = bits_for(bound, nodes)
    assert Fraction(bound) * 2**bits <= limit(nodes) and nodes * limit(nodes) < 2**63
    assert bits == 100 or Fraction(bound) * 2 ** (bits + 1) > limit(nodes)
    most = np.full(1, bound)
    for sign in (1, -1):
        total = nodes * int(encoded(sign * most, bits, nodes).view(np.int64)[0])
        assert -(2**63) <= total < 2**63


@pytest.mark.parametrize("bits", [0, 1, 30, 61])
@pytest.mark.parametrize("nodes", [2, 3, 7])
def test_the_last_number_with_room_passes_and_the_next_is_refused(bits, nodes):
    last = float(np.ldexp(1.0, 62 - int(np.ceil(np.log2(nodes))) - bits))
    total = encoded(np.array([last]), bits, nodes).view(np.int64)
    assert int(total[0]) == round(Fraction(last) * 2**bits) <= limit(nodes)
    for sign in (1, -1):
        with pytest.raises(
            ClientError, match=r"too large.*\n(.*\n)*.*raise secure-aggregation.largest"
        ):
            encoded(np.array([0.0, sign * 2.0 * limit(nodes) / 2**bits]), bits, nodes)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_invalid_numbers_are_refused_and_not_shown(value):
    with pytest.raises(ClientError) as refused:
        encoded(np.array([0.0, value]), 20, 3)
    assert str(value) not in str(refused.value).replace("finite", "")


@pytest.mark.parametrize("bound", [0.0, -1.0, np.inf, 1e19])
def test_a_bound_without_room_is_refused(bound):
    with pytest.raises(ExperimentError, match=r"no room"):
        bits_for(bound, 4)
