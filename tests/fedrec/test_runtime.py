# SPDX-License-Identifier: Apache-2.0
"""Files, processes and arrays of the runtime."""

import contextlib
import errno
import gc
import os
import pickle
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedrec.errors import RunError
from fedrec.protocol.messages import TrainOrder, pack_order, read_arrays, writable_arrays
from fedrec.protocol.serialization import to_record
from fedrec.runtime.files import open_atomically, require_new_folder, write_atomically
from fedrec.runtime.process import Fork, interrupting, raise_if_interrupted
from fedrec.runtime.ragged import are_distinct, distinct, spans, within_groups
from fedrec.runtime.shared_memory import is_shared, kept_open, private, share

# Files are written completely or not at all.


def fails(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("stage", ["open", "fdopen", "fsync", "fchmod", "replace"])
def test_a_failing_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, stage):
    file = tmp_path / "file"
    write_atomically(file, "old")
    with monkeypatch.context() as patch, pytest.raises(RunError) as caught:
        patch.setattr(f"os.{stage}", fails)
        write_atomically(file, "new")
    assert str(file) in caught.value.problem and caught.value.got == "No space left on device"
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_a_disk_that_fills_up_in_the_middle(tmp_path):
    file = tmp_path / "file"
    write_atomically(file, "old")
    with pytest.raises(RunError), open_atomically(file) as stream:
        stream.write(b"new")
        fails()
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664), (0o027, 0o640)]
)
def test_the_users_umask_determines_who_may_read_a_new_file(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "file", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


SIGNS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("sign", SIGNS, ids=lambda sign: sign.name)
def test_a_signal_interrupts_at_once(sign):
    done = []
    with pytest.raises(KeyboardInterrupt, match=sign.name), interrupting():
        signal.raise_signal(sign)
        done.append("after")
    assert not done


def test_handlers_of_others_stay_and_ours_are_gone_afterwards(monkeypatch):
    own = []
    before = [signal.getsignal(sign) for sign in SIGNS]
    try:
        signal.signal(signal.SIGTERM, lambda number, frame: own.append(number))
        with interrupting(), interrupting():
            signal.raise_signal(signal.SIGTERM)
            assert own == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGINT) is before[0]
        assert signal.getsignal(signal.SIGHUP) is before[2]
    finally:
        for sign, handler in zip(SIGNS, before, strict=True):
            signal.signal(sign, handler)


def test_an_interruption_that_was_dropped_is_raised_again():
    with interrupting():
        raise_if_interrupted()
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt, match="SIGHUP"):
            raise_if_interrupted()
    with interrupting():
        raise_if_interrupted()


def _fail():
    raise ValueError("as meant")


@pytest.mark.parametrize(
    ("work", "status"),
    [
        (lambda: None, 0),
        (_fail, 1),
        (lambda: sys.exit(), 0),
        (lambda: sys.exit(3), 3),
        (lambda: sys.exit("a reason"), 1),
    ],
)
def test_a_fork_ends_with_the_status_of_its_work(work, status):
    _, ended = os.waitpid(Fork(work).pid, 0)
    assert os.WIFEXITED(ended) and os.WEXITSTATUS(ended) == status


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


def test_ids_are_distinct_or_not():
    for ids in ([1, 2, 9], [9, 1, 2], [], ["b", "a"], np.array(["b", 7, "7"], dtype=object)):
        assert are_distinct(np.array(ids)) is True
    for ids in ([9, 1, 9], [1, 1], ["b", "a", "b"], np.array(["b", 7, "b"], dtype=object)):
        assert are_distinct(np.array(ids)) is False


# Folders must be new or empty.


@pytest.mark.parametrize(
    ("name", "got"), [("notes.txt", "got: other files"), ("run.json", "got: a run folder")]
)
def test_a_folder_with_files_is_refused(tmp_path, name, got):
    (tmp_path / name).write_text("")
    with pytest.raises(RunError, match=got):
        require_new_folder(tmp_path)
    require_new_folder(tmp_path, usable=lambda _: True)
    require_new_folder(tmp_path / "new")


# Shared parameters: other processes read the owner's current values and cannot change them.


shares = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="this system has no anonymous shared files"
)


@pytest.fixture
def table():
    return np.random.default_rng(0).normal(size=(5000, 64)).astype(np.float32)


@shares
def test_large_arrays_are_shared_and_small_ones_left(table):
    small = np.ones(3)
    arrays = share({"item.id": table, "b": small})
    assert is_shared(arrays["item.id"]) and arrays["b"] is small
    np.testing.assert_array_equal(arrays["item.id"], table)
    assert share(arrays)["item.id"] is arrays["item.id"]
    assert not is_shared(arrays["item.id"][:4999]) and not is_shared(table)


@shares
def test_a_reader_sees_changes_and_makes_none(table):
    owner = share({"item.id": table})["item.id"]
    reader, kept = private(*owner.place), kept_open(*owner.place)
    assert kept[4000, 0] == table[4000, 0]
    owner[4000] = 7.0
    reader[0] = -1.0
    assert (reader[4000] == 7.0).all() and (owner[0] == table[0]).all()
    assert kept_open(*owner.place) is kept and (kept[4000] == 7.0).all()  # opened once


@shares
def test_another_array_in_the_place_of_one_that_is_kept_open_is_not_mistaken_for_it(table):
    first = share({"item.id": table})["item.id"]
    place, _ = first.place, kept_open(*first.place)
    del first
    gc.collect()
    second = share({"item.id": table + 1})["item.id"]
    assert second.place == place  # the system gives the lowest free number again
    np.testing.assert_array_equal(kept_open(*second.place), table + 1)


@shares
def test_a_record_has_one_array_to_read_and_others_to_write(table):
    arrays = share({"item.id": table})
    content = pickle.loads(pickle.dumps(pack_order(TrainOrder(1, np.arange(2)), to_record(arrays))))
    written = writable_arrays(content)
    written["item.id"][0] = -1.0
    np.testing.assert_array_equal(read_arrays(content)["item.id"], table)
    np.testing.assert_array_equal(writable_arrays(content)["item.id"], table)
    np.testing.assert_array_equal(arrays["item.id"], table)


@shares
def test_another_process_opens_it_from_a_pickled_record(table):
    arrays = share({"item.id": table})
    sent = pickle.dumps(to_record(arrays))
    assert len(sent) < 10_000  # the place, not the values
    program = (
        "import pickle, sys; from fedrec.protocol.serialization import from_record\na ="
        " from_record(pickle.loads(sys.stdin.buffer.read()))['item.id']; a[0] += 1;"
        " print(float(a[1:].sum()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=sent, capture_output=True, check=True
    )
    assert float(done.stdout) == pytest.approx(float(table[1:].sum()), rel=1e-6)
    np.testing.assert_array_equal(arrays["item.id"], table)


@shares
def test_memory_is_given_back(table):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    arrays = share({"item.id": table})
    assert len(os.listdir("/proc/self/fd")) > before
    del arrays
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
