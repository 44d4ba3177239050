# SPDX-License-Identifier: Apache-2.0
"""What arrays have in a message: the shortest of three forms, of which each is undone."""

import numpy as np
import pytest
from flwr.app import RecordDict

from fedrec.protocol.compact import (
    ROWS,
    TRIANGLE,
    WHOLE,
    bytes_of_rows,
    bytes_of_triangle,
    compacted,
    expanded,
    network_bytes,
)
from fedrec.protocol.zero_copy import for_the_network, from_record, from_the_network, to_record

DRAWN = np.random.default_rng(0).normal(size=(50, 50)).astype(np.float32)
SOME = np.array([3, 8, 20])


def with_rows(width):
    table = np.zeros((50, width), np.float32)
    table[SOME] = DRAWN[SOME, :width]
    return table


def outer(rows):
    vector = np.zeros(50, np.float32)
    vector[rows] = DRAWN[0, rows]
    return np.outer(vector, vector)


CASES = {
    "dense": (DRAWN[:, :4], WHOLE, 50 * 4 * 4),
    "zeros": (np.zeros((50, 4), np.float32), ROWS, 0),
    "a vector of zeros": (np.zeros(7), ROWS, 0),
    "some rows": (with_rows(4), ROWS, 3 * (8 + 4 * 4)),
    "one number a row": (with_rows(1), ROWS, 3 * (8 + 4)),
    "products of three items": (outer(SOME), TRIANGLE, 3 * 8 + 6 * 4),
    "products of all items": (DRAWN @ DRAWN.T, TRIANGLE, 50 * 8 + 50 * 51 // 2 * 4),
    "not quite symmetric": (DRAWN @ DRAWN.T + np.eye(50, k=1, dtype=np.float32), WHOLE, 10_000),
    "a number": (np.array(2.5), WHOLE, 8),
    "none": (np.zeros((0, 3)), WHOLE, 0),
    "masked integers": (np.zeros(9, np.uint64), WHOLE, 72),
    "not a number": (np.full((2, 2), np.nan), WHOLE, 32),
}


@pytest.mark.parametrize(("array", "form", "size"), CASES.values(), ids=CASES)
def test_an_array_takes_its_shortest_form_and_comes_back(array, form, size):
    if form == TRIANGLE:
        array = (array + array.T) / 2  # a product of matrices may round its halves differently
    found, data = compacted(array)
    assert (found, len(data), network_bytes({"a": array})) == (form, size, size)
    back = expanded(found, data, array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)
    assert back.dtype == array.dtype and back.flags.writeable


def test_bytes_without_the_arrays_are_those_of_the_arrays():
    counts = np.arange(1, 51)
    tables = []
    for count in counts:
        table = np.zeros((50, 3), np.float32)
        table[:count] = 1
        tables.append(table)
    assert bytes_of_rows(counts, 12, 600).tolist() == [network_bytes({"t": t}) for t in tables]
    products = [outer(np.arange(count)) for count in counts]
    expected = [network_bytes({"p": one}) for one in products]
    assert bytes_of_triangle(counts, 4, 10_000).tolist() == expected


def test_a_message_has_these_forms():
    arrays = {"p": outer(SOME), "w": DRAWN, "z": np.zeros((300, 300), np.float32)}
    content = for_the_network(RecordDict({"arrays": to_record(arrays)}))
    (packed,) = content["arrays"].values()
    assert 0 < len(packed.data) - network_bytes(arrays) < 300  # names, types and shapes
    found = from_record(from_the_network(content)["arrays"])
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


FLOAT = np.dtype("float32")
ROW = np.array([1], "<i8").tobytes() + bytes(4)


@pytest.mark.parametrize(
    ("form", "data", "kind", "shape"),
    [
        (ROWS, ROW, FLOAT, (1, 1)),  # a row that is not there
        (ROWS, ROW + ROW, FLOAT, (4, 1)),  # a row twice
        (ROWS, ROW[:-1], FLOAT, (4, 1)),
        (ROWS, b"", FLOAT, (2**20, 2**20)),  # more memory than anything that is sent
        (TRIANGLE, ROW, FLOAT, (4, 3)),
        (TRIANGLE, ROW[:-1], FLOAT, (4, 4)),
        (WHOLE, b"123", FLOAT, (1,)),
        (WHOLE, ROW, np.dtype(object), (1,)),
        (WHOLE, b"", FLOAT, (-1, 0)),
        ("other", ROW, FLOAT, (3, 1)),
    ],
)
def test_other_bytes_are_refused(form, data, kind, shape):
    with pytest.raises(ValueError):
        expanded(form, data, kind, shape)
