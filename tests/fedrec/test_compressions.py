# SPDX-License-Identifier: Apache-2.0
"""Compressions against what their papers state: unbiased rounding in b bits, the largest rows and
what is left."""

import math

import numpy as np
import pytest

from fedrec.compression.codec import Rounding, TopK, _quantised, _restored
from fedrec.protocol.updates import SparseUpdate, dense_change, network_bytes

ROWS = np.array([0, 3, 4, 9, 250])
DRAWS = 4000


def generator(seed=0):
    return np.random.default_rng(seed)


def table(seed=0, width=16):
    values = generator(seed).normal(size=(len(ROWS), width)).astype(np.float32)
    return SparseUpdate((300, width), ROWS, values)


def decoded(compression, change, seed=0):
    return compression.decode(compression.encode(change, generator(seed)), change.shape)


def made(cls, **settings):
    return cls(cls.Config.parse(settings))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 3), (4, 3, 2), (0, 8)])
def test_rounding_is_to_neighbouring_steps_of_a_row_in_so_many_bits(bits, shape):
    values = generator(1).normal(size=shape)
    sent = _quantised(values, bits, generator())
    found = _restored(sent, shape, bits)
    rows = values.reshape(shape[0] if len(shape) > 1 else 1, math.prod(shape[len(shape) > 1 :]))
    step = np.abs(rows).max(axis=1, initial=0.0, keepdims=True) / (2 ** (bits - 1) - 1)
    assert found.shape == shape
    assert (np.abs(found.reshape(rows.shape) - rows) <= step * (1 + 1e-6)).all()
    assert sent["codes"].nbytes == -(-values.size * bits // 8)
    assert sent["scales"].nbytes == 4 * len(rows)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_mean_of_rounding_is_the_value(bits):
    values = generator(2).normal(size=(3, 5))
    random = generator()
    drawn = [_restored(_quantised(values, bits, random), (3, 5), bits) for _ in range(DRAWS)]
    error = np.mean(drawn, axis=0) - values
    assert (np.abs(error) <= 5 * np.std(drawn, axis=0) / DRAWS**0.5 + 1e-6).all()
    assert np.std(drawn) > 0


def test_huge_and_tiny_numbers_round():
    values = np.array([[1e38, -3e38], [1e-45, 0.0], [1e-300, 1e-301]])
    found = _restored(_quantised(values, 8, generator()), (3, 2), 8)
    assert np.isfinite(found).all() and found[0, 1] == pytest.approx(-3e38, rel=1e-6)


def test_no_bits_are_lost_with_32():
    for change in (table(), table().values, table().values[0]):
        found = decoded(made(Rounding, bits=32), change)
        wanted = dense_change(change)
        assert np.array_equal(dense_change(found), wanted)
    sent = made(Rounding, bits=32).encode(table(), generator())
    assert network_bytes(sent) == 5 * 16 * 4 + 5 * 2  # rows of a table of 300 fit two bytes


def test_the_largest_rows_are_sent():
    compression = made(TopK, share=0.4, bits=32)
    change = table()
    found = decoded(compression, change)
    norms = np.linalg.norm(change.values, axis=1)
    largest = np.sort(np.argsort(-norms)[:2])
    assert found.rows.tolist() == ROWS[largest].tolist()
    assert np.array_equal(found.values, change.values[largest])
    vector = np.array([0.1, -3.0, 0.0, 2.0, 0.0], dtype=np.float32)
    assert decoded(made(TopK, share=0.34, bits=32), vector).tolist() == [0, -3, 0, 2, 0]


def test_rows_of_zeros_are_not_counted():
    change = SparseUpdate((300, 2), ROWS, np.array([[0, 0], [1, 0], [0, 0], [0, 2], [0, 0]], float))
    assert decoded(made(TopK, share=0.5, bits=32), change).rows.tolist() == [9]


@pytest.mark.parametrize(
    ("cls", "settings", "numbers"),
    [
        (Rounding, {"bits": 2}, 5 * (16 // 4 + 4 + 2)),
        (TopK, {"share": 0.2, "bits": 8}, 1 * (16 + 4 + 2)),
    ],
)
def test_bytes_are_those_that_are_sent(cls, settings, numbers):
    sent = made(cls, **settings).encode(table(), generator())
    assert network_bytes(sent) == numbers == sum(len(array.tobytes()) for array in sent.values())
