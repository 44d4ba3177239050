# SPDX-License-Identifier: Apache-2.0
"""The file of the nodes that a run has seen."""

import sqlite3
import stat
import zlib

import numpy as np
import pytest

from fedrec.errors import RunError
from fedrec.protocol.orders import Presence
from server.deployed.roster_file import RosterFile


def equal(one, other):
    return list(one) == list(other) and all(
        one[node].partition == other[node].partition
        and np.array_equal(one[node].training, other[node].training)
        and np.array_equal(one[node].evaluated, other[node].evaluated)
        for node in one
    )


def test_what_was_added_is_read_in_order_whatever_the_ids(tmp_path):
    none = np.empty(0, dtype=np.int64)
    random = np.unique(np.random.default_rng(0).integers(2**62, size=1000))
    first = {
        2**64 - 1: Presence(2**61, random, none),
        3: Presence(0, np.array([0, 2**63 - 1]), none),
    }
    later = {1: Presence(1, none, np.array([7]))}
    file = RosterFile(tmp_path / "roster.sqlite")
    assert file.read() == {} and not (tmp_path / "roster.sqlite").exists()
    file.add(first)
    file.add(later)
    assert equal(RosterFile(tmp_path / "roster.sqlite").read(), first | later)
    assert stat.S_IMODE((tmp_path / "roster.sqlite").stat().st_mode) == 0o600


def test_a_node_that_joins_adds_its_own_clients_to_the_file_and_no_more(tmp_path):
    """Ids that are equally spaced, as those of a simulated federation, take hardly any space."""
    ids = np.arange(0, 2_000_000, 2)
    file = RosterFile(tmp_path / "roster.sqlite")
    file.add({1: Presence(0, ids, ids[:10])})
    assert (tmp_path / "roster.sqlite").stat().st_size < 100_000
    assert np.array_equal(file.read()[1].training, ids)


@pytest.mark.parametrize(
    "change",
    [
        ("UPDATE nodes SET training_count = 3", ()),
        ("UPDATE nodes SET training_count = -1", ()),
        ("UPDATE nodes SET training_count = 9223372036854775807", ()),
        ("UPDATE nodes SET training = ?", (zlib.compress(b"\0" * 10**7),)),
        ("UPDATE nodes SET training = 'text'", ()),
        ("UPDATE nodes SET node = 'x'", ()),
        ("ALTER TABLE nodes RENAME COLUMN place TO other", ()),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, change):
    path = tmp_path / "roster.sqlite"
    RosterFile(path).add({1: Presence(0, np.array([4, 9]), np.array([4]))})
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(*change)
    connection.close()
    if "RENAME" in change[0]:
        path.write_bytes(b"SQLite format 3\0" + b"x" * 200)
    with pytest.raises(RunError) as error:
        RosterFile(path).read()
    assert "the nodes are asked again" in error.value.text()
