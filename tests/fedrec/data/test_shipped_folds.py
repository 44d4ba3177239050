# SPDX-License-Identifier: Apache-2.0
"""The test folds that MovieLens-100K ships."""

import numpy as np
import pytest

from fedrec.data.files.indexing import index_rows
from fedrec.data.splits.kfold import read_test_fold
from fedrec.errors import DataError


@pytest.fixture
def interactions():
    return index_rows("small", users=np.array([5, 5, 9, 9]), items=np.array([1, 3, 3, 1]))


def test_rows_follow_the_file(tmp_path, interactions):
    (tmp_path / "u2.test").write_text("9\t1\t3\t0\n5\t3\t3\t0\n")
    assert read_test_fold(tmp_path, 2, interactions).tolist() == [3, 1]


@pytest.mark.parametrize("pair", ["9\t7", "6\t1", "5\t2"])
def test_unknown_pair_is_named(tmp_path, interactions, pair):
    (tmp_path / "u1.test").write_text(f"9\t1\t3\t0\n{pair}\t3\t0\n")
    with pytest.raises(DataError, match=r"u1\.test, line 2") as caught:
        read_test_fold(tmp_path, 1, interactions)
    user, item = pair.split("\t")
    assert caught.value.got == f"user {user}, item {item}"


def test_a_missing_file_is_named(tmp_path, interactions):
    with pytest.raises(DataError, match="file of fold 3 is missing"):
        read_test_fold(tmp_path, 3, interactions)


def test_cut_file_is_refused(tmp_path, interactions):
    (tmp_path / "u1.test").write_text("9\t1\t3\t0\n5\t3\t3\t88")
    with pytest.raises(DataError, match="cut off"):
        read_test_fold(tmp_path, 1, interactions)


def test_repeated_pairs_are_refused(tmp_path):
    (tmp_path / "u1.test").write_text("5\t1\t3\t0\n")
    twice = index_rows("small", users=np.array([5, 5]), items=np.array([1, 1]))
    with pytest.raises(DataError, match="pair once"):
        read_test_fold(tmp_path, 1, twice)
