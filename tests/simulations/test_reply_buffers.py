# SPDX-License-Identifier: Apache-2.0
"""Reply buffers: arrays are returned unchanged, and no buffer is written while it is still read."""

import gc
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from fedrec.protocol.zero_copy import to_record, zero_copy_arrays
from fedrec.runtime.shared_memory import offered
from simulations.engines import reply_buffers
from simulations.engines.reply_buffers import BufferPool, ReplyBuffer, put
from tests.runs import assert_close

pytestmark = pytest.mark.skipif(not offered(), reason="this system has no anonymous shared files")


def content(*arrays):
    return RecordDict(
        {"arrays": to_record({f"a{place}": array for place, array in enumerate(arrays)})}
    )


ORDER = content(np.zeros((400, 100), np.float32), np.zeros(3))


def answer(seed=0):
    random = np.random.default_rng(seed)
    table = random.normal(size=(100, 400)).astype(np.float32)
    return content(
        table,
        table.T[3:9],
        np.arange(5),
        np.float64(2.5),
        np.zeros((0, 4)),
        np.array([True, False]),
    )


def copies(found):
    return {name: np.array(array) for name, array in zero_copy_arrays(found["arrays"]).items()}


def assert_equal(found, expected):
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        np.testing.assert_array_equal(found[name], array)


def test_a_reply_is_unchanged_and_read_only():
    pool, sent = BufferPool(), answer()
    sent["metrics"], expected = MetricRecord({"n": 1}), copies(sent)
    memory = pool.buffer(ORDER)
    spots = put(sent, memory.assign())
    assert set(sent) == {"metrics"}
    found = memory.take_back(pickle.loads(pickle.dumps(spots)))
    arrays = zero_copy_arrays(found["arrays"])
    assert_equal(arrays, expected)
    assert not any(array.ctypes.data % 64 for array in arrays.values() if array.size), (
        "each begins a line of the cache"
    )
    with pytest.raises(ValueError, match="read-only"):
        arrays["a0"][0] = 1


@pytest.mark.slow
def test_another_process_puts_it_there():
    memory = BufferPool().buffer(ORDER)
    program = (
        "import pickle, sys; from tests.simulations.test_reply_buffers import answer; from"
        " simulations.engines.reply_buffers import"
        " put\nsys.stdout.buffer.write(pickle.dumps(put(answer(7), pickle.load(sys.stdin.buffer))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(memory.assign()),
        capture_output=True,
        check=True,
    )
    assert_equal(
        zero_copy_arrays(memory.take_back(pickle.loads(done.stdout))["arrays"]), copies(answer(7))
    )


def test_a_buffer_is_used_again_when_nothing_of_the_last_answer_is_in_use():
    pool = BufferPool()
    first = pool.buffer(ORDER)
    spots = put(answer(), first.assign())
    assert not first.free and pool.buffer(ORDER) is not first, "an answer may still come"
    part = zero_copy_arrays(first.take_back(spots)["arrays"])["a0"][3:, 5].T
    kept = part.copy()
    second = pool.buffer(ORDER)
    assert not first.free and second is not first
    put(answer(1), second.assign())
    np.testing.assert_array_equal(part, kept)
    del part
    assert first.free and pool.buffer(ORDER) is first


def test_a_buffer_that_brought_nothing_is_used_again():
    pool = BufferPool()
    memory = pool.buffer(ORDER)
    memory.assign()
    assert memory.take_back({}) == {} and pool.buffer(ORDER) is memory


def test_memory_that_is_too_small_goes():
    open_files, pool = [], BufferPool()
    for size in (0, 10**5, 10**6, 10**5):
        pool.buffer(content(np.zeros(size, np.float32)))
        gc.collect()
        open_files.append(len(os.listdir("/proc/self/fd")))
    none, *one = open_files
    assert len(set(one)) == 1 and one[0] > none
    del pool
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == none


def test_nodes_that_never_answer_use_no_more_than_some(monkeypatch):
    monkeypatch.setattr(reply_buffers, "_MOST", 3)
    pool, memories = BufferPool(), []
    for _ in range(3):
        memories.append(pool.buffer(ORDER))
        memories[-1].assign()
    assert pool.buffer(ORDER) is None
    memories[1].take_back({})
    assert pool.buffer(ORDER) is memories[1]


def test_what_is_small_or_does_not_fit_stays_in_the_answer():
    pool = BufferPool()
    assert pool.buffer(content(np.zeros(10))) is None and pool.buffer(RecordDict()) is None
    memory = pool.buffer(ORDER)
    small, large = content(np.zeros(10)), content(np.zeros((400, 200), np.float32))
    for sent in (small, large, RecordDict({"metrics": MetricRecord({"n": 1})})):
        names = list(sent)
        assert put(sent, memory.assign()) == {} and list(sent) == names


def test_records_of_flowers_own_arrays_come_back_too():
    memory, table = BufferPool().buffer(ORDER), np.random.default_rng(0).normal(size=(200, 100))
    found = memory.take_back(put(RecordDict({"parameters": ArrayRecord([table])}), memory.assign()))
    (own,) = found["parameters"].to_numpy_ndarrays()
    np.testing.assert_array_equal(own, table)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.ray
def test_sums_of_a_simulation_come_in_buffers_that_are_used_again_in_every_round(
    run_tiny, monkeypatch, shared_engine
):
    wide = "model.hidden=[256, 128, 64]"
    serial = run_tiny(wide, "engine.nodes=3", output="serial")
    taken, take_back = [], ReplyBuffer.take_back

    def noted(memory, spots):
        taken.append((memory, {name: len(own) for name, own in spots.items()}))
        return take_back(memory, spots)

    def after_a_collection(pool, content):
        """A buffer for a reply after a garbage collection: replies are in reference cycles, and
        such a small run may not trigger Python's own collections."""
        gc.collect()
        return buffer(pool, content)

    buffer = BufferPool.buffer
    monkeypatch.setattr(BufferPool, "buffer", after_a_collection)
    monkeypatch.setattr(ReplyBuffer, "take_back", noted)
    result = run_tiny(wide, "engine={name='ray', nodes=3}", output="ray")
    whole = {"arrays": len(serial.parameters)}
    sums = [memory for memory, found in taken if found == whole]
    assert len(sums) == 2 * len(serial.rounds) and len(set(map(id, sums))) == 2, (
        "one for each of two actors"
    )
    assert_close(result.parameters, serial.parameters, atol=1e-6)
