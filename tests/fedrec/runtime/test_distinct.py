# SPDX-License-Identifier: Apache-2.0
"""Distinct numbers against numpy's own."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedrec.runtime.distinct import distinct


@given(arrays(np.int64, st.integers(0, 50), elements=st.integers(-9, 9)))
def test_it_is_numpys_unique_and_leaves_its_argument(numbers):
    before = numbers.copy()
    found = distinct(numbers)
    assert found.dtype == np.int64 and found.tolist() == np.unique(numbers).tolist()
    assert numbers.tolist() == before.tolist()
