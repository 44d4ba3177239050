# SPDX-License-Identifier: Apache-2.0
"""Distinct numbers against numpy's own."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedrec.runtime.grouping import distinct, spans, within_groups


@given(arrays(np.int64, st.integers(0, 50), elements=st.integers(-9, 9)))
def test_it_is_numpys_unique_and_leaves_its_argument(numbers):
    before = numbers.copy()
    found = distinct(numbers)
    assert found.dtype == np.int64 and found.tolist() == np.unique(numbers).tolist()
    assert numbers.tolist() == before.tolist()


def test_of_groups_of_any_size():
    counts = np.array([0, 3, 1, 0, 2, 0])
    starts = np.array([9, 5, 0, -1, 7, 2])
    assert within_groups(counts).tolist() == [0, 1, 2, 0, 0, 1]
    assert spans(starts, counts).tolist() == [5, 6, 7, 0, 7, 8]
    assert within_groups(counts[:1]).tolist() == spans(starts[:0], counts[:0]).tolist() == []
