# SPDX-License-Identifier: Apache-2.0
"""Shared parameters: other processes read the owner's current values and cannot change them."""

import gc
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from fedrec.protocol.messages import pack_train, unpack_train
from fedrec.protocol.orders import TrainOrder
from fedrec.protocol.records import read_arrays
from fedrec.protocol.zero_copy import to_record
from fedrec.runtime.shared_memory import is_shared, kept_open, private, share

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="this system has no anonymous shared files"
)


@pytest.fixture
def table():
    return np.random.default_rng(0).normal(size=(5000, 64)).astype(np.float32)


def test_large_arrays_are_shared_and_small_ones_left(table):
    small = np.ones(3)
    arrays = share({"item.id": table, "b": small})
    assert is_shared(arrays["item.id"]) and arrays["b"] is small
    np.testing.assert_array_equal(arrays["item.id"], table)
    assert share(arrays)["item.id"] is arrays["item.id"]
    assert not is_shared(arrays["item.id"][:4999]) and not is_shared(table)


def test_a_reader_sees_changes_and_makes_none(table):
    owner = share({"item.id": table})["item.id"]
    reader = private(*owner.place)
    owner[4000] = 7.0
    reader[0] = -1.0
    assert (reader[4000] == 7.0).all() and (owner[0] == table[0]).all()


def test_what_is_kept_open_is_opened_once_and_shows_changes(table):
    owner = share({"item.id": table})["item.id"]
    reader = kept_open(*owner.place)
    assert reader[4000, 0] == table[4000, 0]
    owner[4000] = 7.0
    assert kept_open(*owner.place) is reader and (reader[4000] == 7.0).all()


def test_another_array_in_the_place_of_one_that_is_kept_open_is_not_mistaken_for_it(table):
    first = share({"item.id": table})["item.id"]
    place, _ = first.place, kept_open(*first.place)
    del first
    gc.collect()
    second = share({"item.id": table + 1})["item.id"]
    assert second.place == place  # the system gives the lowest free number again
    np.testing.assert_array_equal(kept_open(*second.place), table + 1)


def test_a_record_has_one_array_to_read_and_others_to_write(table):
    arrays = share({"item.id": table})
    content = pickle.loads(pickle.dumps(pack_train(to_record(arrays), TrainOrder(1, np.arange(2)))))
    written, _ = unpack_train(content)
    written["item.id"][0] = -1.0
    np.testing.assert_array_equal(read_arrays(content)["item.id"], table)
    np.testing.assert_array_equal(unpack_train(content)[0]["item.id"], table)
    np.testing.assert_array_equal(arrays["item.id"], table)


def test_another_process_opens_it_from_a_pickled_record(table):
    arrays = share({"item.id": table})
    sent = pickle.dumps(to_record(arrays))
    assert len(sent) < 10_000  # the place, not the values
    program = (
        "import pickle, sys; from fedrec.protocol.zero_copy import from_record\na ="
        " from_record(pickle.loads(sys.stdin.buffer.read()))['item.id']; a[0] += 1;"
        " print(float(a[1:].sum()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=sent, capture_output=True, check=True
    )
    assert float(done.stdout) == pytest.approx(float(table[1:].sum()), rel=1e-6)
    np.testing.assert_array_equal(arrays["item.id"], table)


def test_memory_is_given_back(table):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    arrays = share({"item.id": table})
    assert len(os.listdir("/proc/self/fd")) > before
    del arrays
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
