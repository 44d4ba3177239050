# SPDX-License-Identifier: Apache-2.0
"""Distinct numbers against numpy's own."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedrec.runtime.grouping import are_distinct, distinct, numbered, spans, within_groups


@given(
    arrays(
        st.sampled_from([np.int64, np.int32, np.float64]),
        st.integers(0, 50),
        elements=st.integers(-9, 9),
    ),
    st.sampled_from([0, 9, 2000]),
)
def test_it_is_numpys_unique_and_leaves_its_argument(numbers, least):
    numbers += least  # from 0 on there may be a table, which 2000 is too large for
    before = numbers.copy()
    found = distinct(numbers)
    assert found.dtype == numbers.dtype and found.tolist() == np.unique(numbers).tolist()
    assert numbers.tolist() == before.tolist()


def test_of_groups_of_any_size():
    counts = np.array([0, 3, 1, 0, 2, 0])
    starts = np.array([9, 5, 0, -1, 7, 2])
    assert within_groups(counts).tolist() == [0, 1, 2, 0, 0, 1]
    assert spans(starts, counts).tolist() == [5, 6, 7, 0, 7, 8]
    assert within_groups(counts[:1]).tolist() == spans(starts[:0], counts[:0]).tolist() == []


@given(arrays(np.int64, st.integers(0, 50), elements=st.integers(0, 9)), st.integers(1, 2**40))
def test_numbers_are_in_the_order_in_which_values_first_occur(values, times):
    before = values.copy()
    found = numbered(values * times)  # in a table, or too large for one
    assert found.dtype == np.int64 and found.tolist() == pd.factorize(values)[0].tolist()
    assert values.tolist() == before.tolist()


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (np.array([1, 2, 9]), True),
        (np.array([9, 1, 2]), True),
        (np.array([9, 1, 9]), False),
        (np.array([1, 1]), False),
        (np.array([], dtype=np.int64), True),
        (np.array(["b", "a"]), True),
        (np.array(["b", "a", "b"]), False),
        (np.array(["b", 7, "7"], dtype=object), True),
        (np.array(["b", 7, "b"], dtype=object), False),
    ],
)
def test_ids_are_distinct_or_not(ids, expected):
    assert are_distinct(ids) is expected
