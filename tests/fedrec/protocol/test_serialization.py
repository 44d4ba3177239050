# SPDX-License-Identifier: Apache-2.0
"""Serialization of arrays: packing and unpacking are inverse, and other data are refused."""

import json

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedrec.protocol.serialization import PackedArray, opened, packed
from fedrec.protocol.zero_copy import for_the_network, from_record, from_the_network, to_record

PARTS = [
    PackedArray("a.b", "float32", (2, 3), "numpy.ndarray", b"\x00\xff" * 12),
    PackedArray("é#/", "int64", (), "x", b""),
]


def test_what_goes_in_comes_out_in_its_order():
    assert opened(packed(PARTS)) == PARTS
    assert opened(packed(PARTS[::-1])) == PARTS[::-1]
    assert opened(packed([])) == []


def with_table(table, data=b"1234"):
    header = json.dumps(table).encode()
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 40,
        packed(PARTS)[:-1],
        packed(PARTS) + b"x",
        with_table([["a", "uint8", [4], "x", 5]]),
        with_table([["a", "uint8", [4], "x", -1]]),
        with_table([["a", "uint8", [4], "x", 1e9]]),
        with_table([["a", "uint8", [4], "x", 2], ["a", "uint8", [4], "x", 2]]),
        with_table([["a", "uint8", 4, "x", 4]]),
        with_table({"a": 1}),
        with_table(7),
        with_table([[[[[[[]]]]]]]),
        (10**6).to_bytes(8, "little") + b"[" * 10**6,
    ],
)
def test_what_is_no_packed_record_is_an_error_and_a_record_with_it_is_left_alone(data):
    with pytest.raises(Exception):  # noqa: B017  (of whatever kind)
        opened(data)
    content = RecordDict(
        {"arrays": ArrayRecord({"#packed": Array("uint8", (len(data),), "#packed", data)})}
    )
    assert list(from_the_network(content)["arrays"]) == ["#packed"]


def test_a_message_is_sent_as_one_array_and_unpacked_unchanged():
    arrays = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array(2.5),
        "n": np.zeros((0, 3), np.int64),
    }
    content = RecordDict({"arrays": to_record(arrays), "config": ConfigRecord({"a": 1})})
    shared: dict = {}
    other = RecordDict({"arrays": content["arrays"]})
    for_the_network(content, shared)
    for_the_network(other, shared)
    assert [len(record) for record in content.array_records.values()] == [1]
    assert other["arrays"] is content["arrays"]
    assert type(next(iter(content["arrays"].values()))) is Array
    for_the_network(content)  # a second time changes nothing
    found = from_record(from_the_network(content)["arrays"])
    assert list(found) == list(arrays) and content["config"]["a"] == 1
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
    from_the_network(content)  # unpacking twice has no effect either
    assert list(content["arrays"]) == list(arrays)
