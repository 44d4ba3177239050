# SPDX-License-Identifier: Apache-2.0
"""Private state: by client and round, readable by its owner only."""

import sqlite3
from contextlib import closing

import numpy as np
import pytest

from clients.storage.private_state import PrivateState
from fedrec.errors import RunError
from fedrec.protocol.sparse_update import SparseUpdate


@pytest.fixture
def state(tmp_path):
    return PrivateState(tmp_path / "private" / "node-0.sqlite")


def put(state, client, round_, value, keep=10):
    state.save(client, round_, {"own": np.array([value], np.float32)}, keep=keep)


def got(state, client, before):
    found = state.load(client, before)
    return found["own"].item() if found else None


def rounds(state, client):
    with closing(sqlite3.connect(state.file)) as connection:
        return [
            row[0]
            for row in connection.execute(
                "SELECT round FROM state WHERE client=? ORDER BY 1", (client,)
            )
        ]


def test_a_round_reads_the_newest_of_the_earlier_rounds(state):
    for round_ in (1, 3, 7):
        put(state, 5, round_, round_)
    assert [got(state, 5, before) for before in (1, 2, 3, 4, 7, 8, 100)] == [None, 1, 1, 3, 3, 7, 7]
    assert got(state, 6, 100) is None


def test_writing_a_round_replaces_it_and_the_later_ones(state):
    for round_ in (1, 2, 3):
        put(state, 5, round_, round_)
        put(state, 6, round_, round_)
    put(state, 5, 2, 20)
    assert rounds(state, 5) == [1, 2] and got(state, 5, 100) == 20
    assert rounds(state, 6) == [1, 2, 3]


def test_the_state_of_the_last_rounds_remains(state):
    """Also for a client in few rounds: every state that one of the last rounds read can be read
    again."""
    for round_ in (1, 3, 8, 9, 14):
        put(state, 7, round_, round_, keep=4)
    assert rounds(state, 7) == [9, 14]  # rounds 11 to 14 remain, and 11 ended with the entry of 9
    assert [got(state, 7, before) for before in (12, 15)] == [9, 14]


@pytest.mark.parametrize("filled", [[], [2], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]])
def test_a_table_of_few_rows_is_small_and_comes_back_whole(state, filled):
    table = np.zeros((7, 3), dtype=np.float32)
    table[filled] = np.random.default_rng(0).normal(size=(len(filled), 3))
    state.save(1, 1, {"table": table, "none": np.zeros((0, 3))}, keep=2)
    found = state.load(1, 2)
    np.testing.assert_array_equal(found["table"], table)
    assert found["table"].dtype == np.float32 and found["none"].shape == (0, 3)
    wide = np.zeros((1000, 300), dtype=np.float32)
    wide[5] = 1
    state.save(1, 2, {"wide": wide}, keep=1)
    assert state.file.stat().st_size < wide.nbytes / 4
    np.testing.assert_array_equal(state.load(1, 3)["wide"], wide)


@pytest.mark.parametrize("filled", [[], [2], [0, 1, 2, 3, 4, 5, 6]])
def test_rows_alone_come_back_as_a_whole_table(state, filled):
    table = np.zeros((7, 3), dtype=np.float32)
    table[filled] = np.random.default_rng(0).normal(size=(len(filled), 3))
    rows = SparseUpdate(table.shape, np.array(filled, dtype=np.int64), table[filled])
    state.save(1, 1, {"table": rows}, keep=2)
    found = state.load(1, 2)["table"]
    np.testing.assert_array_equal(found, table)
    assert found.dtype == np.float32


def test_only_the_arrays_that_are_named_are_loaded(state):
    state.save(1, 1, {"own": np.ones(1), "table": np.ones((2, 2))}, keep=2)
    assert [set(one) for one in state.load_all([1, 2], 2, ["own", "other"])] == [{"own"}, set()]


def test_only_the_newest_entries_of_a_client_remain(state):
    for round_ in range(1, 8):
        put(state, 5, round_, round_, keep=3)
    put(state, 6, 1, 1, keep=3)
    assert rounds(state, 5) == [5, 6, 7] and rounds(state, 6) == [1]


def test_arrays_keep_names_bits_and_shapes(state):
    arrays = {
        "layer1.weight": np.arange(6, dtype=np.float32).reshape(2, 3) / 7,
        "scalar": np.array(np.pi),
    }
    state.save(1, 1, arrays, keep=2)
    found = PrivateState(state.file).load(1, 2)
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        np.testing.assert_array_equal(found[name], array)


def test_the_file_is_for_its_owner_only_and_is_not_made_by_reading(state):
    assert state.load(1, 5) == {} and not state.file.exists()
    put(state, 1, 1, 1)
    assert state.file.stat().st_mode & 0o777 == 0o600


def test_a_write_that_fails_changes_nothing(state):
    put(state, 1, 1, 1)
    put(state, 1, 2, 2)
    with pytest.raises(RunError, match="cannot be used"):
        # fails in the last of its three commands
        state.save(1, 1, {"own": np.zeros(1)}, keep=object())
    assert rounds(state, 1) == [1, 2] and got(state, 1, 2) == 1


def pages(state):
    with closing(sqlite3.connect(state.file)) as connection:
        return connection.execute("PRAGMA page_size").fetchone()[0]


def test_a_new_file_has_large_pages_and_one_with_others_is_still_used(tmp_path):
    new = PrivateState(tmp_path / "new.sqlite")
    put(new, 1, 1, 2.0)
    assert pages(new) == 65536
    old = PrivateState(tmp_path / "old.sqlite")
    with closing(sqlite3.connect(old.file)) as connection:
        connection.execute("PRAGMA page_size = 4096")
        connection.execute(PrivateState.opening[-1])
        connection.commit()
    put(old, 1, 1, 2.0)
    put(old, 1, 2, 3.0)
    assert (got(old, 1, 2), got(old, 1, 3)) == (2.0, 3.0)
    assert pages(old) == 4096
