# SPDX-License-Identifier: Apache-2.0
"""Dense indices and the fingerprint of interactions."""

import numpy as np
import pytest

from fedrec.data.files.indexing import dense_index, index_rows


@pytest.mark.parametrize(
    ("ids", "names", "codes"),
    [
        (np.array([5, 2, 5], np.int32), [2, 5], [1, 0, 1]),
        (np.array([5, 10**12]), [5, 10**12], [0, 1]),
        (np.array([3, -3]), [-3, 3], [1, 0]),
        (np.array(["b", "a", "b"], dtype=object), ["a", "b"], [1, 0, 1]),
        (np.array([], np.int64), [], []),
    ],
)
def test_dense_index(ids, names, codes):
    got_names, got_codes = dense_index(ids)
    assert (got_names.tolist(), got_codes.tolist()) == (names, codes)
    assert got_codes.dtype == np.int64


def rows(users=(1, 1, 2), items=(7, 8, 7), ratings=(5, 3, 0), times=(1, 2, 3)):
    columns = [np.array(column) for column in (users, items, ratings, times)]
    return index_rows(
        "x", **dict(zip(("users", "items", "ratings", "times"), columns, strict=True))
    )


def test_fingerprint_is_pinned():
    # The same on any machine and with any version of the libraries: published data are recognised
    # by it.
    assert (
        rows().fingerprint() == "5268e73afee1c3d428e1422525f4c8d90c9d4bf99c8566e5e6663eaf9eb91197"
    )


def test_fingerprint_ignores_order_times_type_of_ids_and_sign_of_zero():
    same = rows(users=["2", "1", "1"], items=["7", "8", "7"], ratings=(-0.0, 3, 5), times=(9, 9, 9))
    assert same.fingerprint() == rows().fingerprint()


@pytest.mark.parametrize(
    "other",
    [
        rows(ratings=(3, 5, 0)),
        rows(users=(1, 2, 1)),
        rows(items=(8, 7, 7), ratings=(5, 3, 0)),
        rows(users=(7, 8, 7), items=(1, 1, 2)),
        rows(users=(1, 1), items=(7, 8), ratings=(5, 3), times=(1, 2)),
        rows(users=(1, 1, 2, 2), items=(7, 8, 7, 7), ratings=(5, 3, 0, 0), times=(1, 2, 3, 4)),
    ],
)
def test_fingerprint_sees_every_other_change(other):
    assert other.fingerprint() != rows().fingerprint()
