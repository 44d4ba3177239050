# SPDX-License-Identifier: Apache-2.0
"""Parts of the kernel against numpy in float64: products, activations, sums."""

import itertools

import numpy as np
import pytest
from numba import njit

from fedrec.nn.native import activations, products, sparse_products, weight_rows
from fedrec.nn.native.memory import aligned
from fedrec.nn.native.products import transpose
from fedrec.nn.native.sparse_tiles import descend_row, nonzero_row
from fedrec.nn.native.tiles import tile
from fedrec.nn.update_sums import add_dense, add_rows, powers
from fedrec.runtime.compilation import compiled

F = np.float32
add_product = compiled(products.add_product.py_func)  # compiled once per machine: it takes 7 s
SIZES = [
    (1, 1, 1),
    (5, 1, 7),
    (1, 6, 4),
    (4, 6, 1),
    (3, 4, 5),
    (16, 40, 64),
    (7, 130, 90),
    (130, 65, 43),
    (64, 128, 72),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("transposed", list(itertools.product([False, True], repeat=2)), ids=str)
@pytest.mark.parametrize("factors", [(1.0, 0.0), (-0.5, 1.0), (2.0, 0.25)], ids=str)
def test_products_are_those_of_numpy(size, transposed, factors):
    rows, inner, columns = size
    random = np.random.default_rng(sum(size))
    a = random.normal(size=(inner, rows) if transposed[0] else (rows, inner)).astype(F)
    b = random.normal(size=(columns, inner) if transposed[1] else (inner, columns)).astype(F)
    out = random.normal(size=(rows, columns)).astype(F)
    alpha, beta = factors
    wide = [(m.T if t else m).astype(float) for m, t in zip((a, b), transposed, strict=True)]
    wanted = alpha * wide[0] @ wide[1] + beta * out
    if not beta:
        out[:] = np.nan  # the previous content is arbitrary
    add_product(
        F(alpha), a, transposed[0], b, transposed[1], F(beta), out, np.empty(b.size, dtype=F)
    )
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


@compiled
def add_columns(a, b, out):
    """Of parts of wider matrices, the first transposed."""
    products.add_views(F(-0.5), a[:, 1:].T, b[:, 2:-1], out[:, 3:])


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_of_parts_of_matrices_are_those_of_numpy(size):
    rows, inner, columns = size
    random = np.random.default_rng(sum(size))
    a = random.normal(size=(inner, rows + 1)).astype(F)
    b = random.normal(size=(inner, columns + 3)).astype(F)
    out = random.normal(size=(rows, columns + 3)).astype(F)
    wanted = out.astype(float)
    wanted[:, 3:] -= 0.5 * a[:, 1:].T.astype(float) @ b[:, 2:-1].astype(float)
    add_columns(a, b, out)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


@compiled
def products_of_a_layer(rate, inputs, gradient, weights, outputs, to_inputs, room):
    """All three, without the zeros of the inputs."""
    sparse_products.add_sparse_outputs(inputs, weights, outputs)
    sparse_products.descend_sparse(rate, inputs, gradient, weights, to_inputs, room)


def room_of(rows, width, columns):
    return np.full(sparse_products.room_of_sparse(rows, width, columns), np.nan, dtype=F)


@pytest.mark.parametrize("zeros", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize(
    "size", [(1, 64, 64), (19, 128, 64), (32, 64, 192), (70, 256, 128)], ids=str
)
def test_products_without_zeros_are_those_of_numpy(size, zeros):
    rows, width, columns = size
    random = np.random.default_rng(sum(size))
    inputs = np.abs(random.normal(size=(rows, width))).astype(F)
    inputs[random.random((rows, width)) < zeros] = 0
    gradient = random.normal(size=(rows, columns)).astype(F)
    weights = random.normal(size=(width, columns)).astype(F)
    outputs = random.normal(size=(rows, columns)).astype(F)
    to_inputs = np.full((rows, width), np.nan, dtype=F)  # the previous content is arbitrary
    exact = [numbers.astype(float) for numbers in (inputs, gradient, weights, outputs)]
    room = room_of(*size)
    products_of_a_layer(F(0.25), inputs, gradient, weights, outputs, to_inputs, room)
    wanted = {
        "outputs": (outputs, exact[3] + exact[0] @ exact[2]),
        "inputs": (to_inputs, exact[1] @ exact[2].T * (exact[0] > 0)),
        "weights": (weights, exact[2] - 0.25 * exact[0].T @ exact[1]),
    }
    for name, (found, right) in wanted.items():
        most = max(1.0, float(np.abs(right).max()))
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5 * most, err_msg=name)


@pytest.mark.parametrize(
    ("zeros", "size", "room", "enough"),
    [
        (0.5, (32, 64, 64), 64 * 128, True),
        (0.3, (32, 64, 64), 64 * 128, False),
        (0.5, (32, 60, 64), 64 * 128, False),
        (0.5, (32, 64, 32), 64 * 128, False),
        (0.5, (33, 64, 64), 64 * 128, False),
    ],
    ids=["half", "few zeros", "inputs", "outputs", "memory"],
)
def test_when_zeros_are_left_out(zeros, size, room, enough):
    rows, width, columns = size
    inputs = np.ones((rows, width), dtype=F)
    inputs.reshape(-1)[: round(zeros * inputs.size)] = 0
    found = sparse_products.sparse_enough(inputs, columns, np.empty(room, dtype=F))
    assert found == enough


def test_a_weight_that_is_no_number_is_seen():
    """Where the inputs are not zero; and inputs that are no numbers are none that are left out."""
    inputs = np.ones((1, 64), dtype=F)
    inputs[0, 1::2] = 0
    gradient = np.ones((1, 64), dtype=F)
    weights = np.ones((64, 64), dtype=F)
    weights[0, 5] = np.nan
    outputs = np.zeros((1, 64), dtype=F)
    to_inputs = np.zeros((1, 64), dtype=F)
    room = room_of(1, 64, 64)
    products_of_a_layer(F(0.25), inputs, gradient, weights, outputs, to_inputs, room)
    assert np.flatnonzero(np.isnan(outputs)).tolist() == [5]
    assert np.flatnonzero(np.isnan(to_inputs)).tolist() == [0]
    inputs[0, 3] = np.nan
    products_of_a_layer(F(0.25), inputs, gradient, weights, outputs, to_inputs, room)
    assert np.isnan(outputs).all()
    assert np.isnan(weights[3]).all()


@pytest.mark.parametrize("columns", [64, 128])
def test_fixed_weights_stay_with_gradients_that_are_not_finite(columns):
    inputs = np.ones((1, 64), dtype=F)
    inputs[0, 1::2] = 0
    gradient = np.full((1, columns), np.inf, dtype=F)
    weights = np.ones((64, columns), dtype=F)
    to_inputs = np.zeros((1, 64), dtype=F)
    sparse_products.descend_sparse(
        F(0), inputs, gradient, weights, to_inputs, room_of(1, 64, columns)
    )
    assert (weights == 1).all()
    assert np.isinf(to_inputs[0, ::2]).all()


@compiled
def rows_of_weights(rows, factors, vector, shares, total, dots):
    weight_rows.row_dots(rows, vector, dots)
    weight_rows.move_and_sum(rows, factors, vector, shares, total)


@pytest.mark.parametrize("columns", [1, 16, 37, 80])
@pytest.mark.parametrize("count", [1, weight_rows.TOGETHER])
def test_steps_of_rows_of_weights_are_those_of_numpy(count, columns):
    random = np.random.default_rng(columns)
    sizes = (count, columns), columns, columns, count, count
    rows, vector, total, factors, shares = (random.normal(size=s).astype(F) for s in sizes)
    dots = np.full(count, np.nan, dtype=F)
    exact = [numbers.astype(float) for numbers in (rows, vector, total, factors, shares)]
    moved = exact[0] + exact[3][:, None] * exact[1]
    rows_of_weights(rows, factors, vector, shares, total, dots)
    for found, wanted in (
        (dots, exact[0] @ exact[1]),
        (rows, moved),
        (total, exact[2] + exact[4] @ moved),
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_tiles_have_names_of_their_own():
    """Functions of two processes' caches are one to the linker if the types of their arguments have
    the same names."""
    made = [tile(rows, width) for rows in (1, 4) for width in (1, 8)]
    made += [kind(32, width) for kind in (nonzero_row, descend_row) for width in (64, 128)]
    assert len({repr(one) for one in made}) == len(made)


@pytest.mark.parametrize("shape", [(1, 1), (8, 8), (24, 16), (5, 30), (33, 70)], ids=str)
def test_transposing_moves_every_number(shape):
    values = np.arange(np.prod(shape)).reshape(shape).astype(F)
    found = np.empty(shape[::-1], dtype=F)
    transpose(values, found)
    assert np.array_equal(found, values.T)


FUNCTIONS = {
    activations.IDENTITY: (lambda x: x, lambda y: np.ones_like(y)),
    activations.RELU: (lambda x: np.maximum(x, 0), lambda y: (y > 0).astype(float)),
    activations.SIGMOID: (lambda x: 1 / (1 + np.exp(-x)), lambda y: y * (1 - y)),
    activations.TANH: (np.tanh, lambda y: 1 - y**2),
}


@pytest.mark.parametrize("code", FUNCTIONS)
def test_activations_are_within_two_units_in_the_last_place(code):
    values = np.concatenate(
        [np.linspace(-20, 20, 9001), np.linspace(-1e-3, 1e-3, 1001), [-300.0, 300.0]]
    ).astype(F)
    found = values.copy().reshape(3, -1) if values.size % 3 == 0 else values.copy().reshape(1, -1)
    activations.activate(found, code)
    function, derivative = FUNCTIONS[code]
    with np.errstate(over="ignore"):
        wanted = function(values.astype(float))
    np.testing.assert_allclose(found.reshape(-1), wanted, rtol=2.5e-7, atol=1e-38)
    gradients = np.full_like(found, 2.0)
    activations.through_activation(gradients, found, code)
    np.testing.assert_allclose(
        gradients.reshape(-1), 2 * derivative(found.reshape(-1).astype(float)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("code", FUNCTIONS)
def test_no_number_stays_no_number(code):
    values = np.array([[np.nan, 1.0]], dtype=F)
    activations.activate(values, code)
    assert np.isnan(values[0, 0]) and np.isfinite(values[0, 1])


def test_memory_begins_a_cache_line():
    address = njit(lambda rows, columns: aligned(rows, columns).ctypes.data)
    assert all(address(rows, columns) % 64 == 0 for rows in (1, 3, 50) for columns in (1, 7, 64))


def test_dense_sums_leave_out_clients_of_share_zero():
    random = np.random.default_rng(0)
    start, room = random.normal(size=1500).astype(F), random.normal(size=(4, 1600)).astype(F)
    values = room[:, 70:1570]
    values[2] = np.nan
    totals, shares = random.normal(size=1500), np.array([1.0, -0.25, 0.0, 3.0])
    wanted = totals + sum(shares[c] * (values[c].astype(float) - start) for c in (0, 1, 3))
    add_dense(totals, start, room.reshape(-1)[70:-30], 1600, shares)
    np.testing.assert_allclose(totals, wanted, rtol=1e-12)


@pytest.mark.parametrize("order", [1, 2])
def test_powers_of_changes(order):
    random = np.random.default_rng(0)
    start = random.normal(size=700).astype(F)
    room = random.normal(size=(3, 2, 700)).astype(F)
    values = room[:, 1]
    np.testing.assert_allclose(
        powers(start, room.reshape(-1)[700:], 1400, 3, order),
        (np.abs(values - start).astype(float) ** order).sum(1),
        rtol=1e-12,
    )


def test_row_sums_give_each_item_a_slot():
    random = np.random.default_rng(0)
    start, values = random.normal(size=(9, 3)).astype(F), random.normal(size=(3, 2, 3)).astype(F)
    touched = np.array([[4, 7], [7, 0], [1, 2]])
    counts = np.array([2, 1, 2])
    shares = np.array([1.0, 2.0, 0.0])
    totals, slots, rows = np.zeros((5, 3)), np.full(9, -1), np.zeros(5, dtype=np.int64)
    used = add_rows(totals, slots, rows, 0, start, touched, counts, values, shares)
    assert (
        used == 2 and rows[:2].tolist() == [4, 7] and np.flatnonzero(slots >= 0).tolist() == [4, 7]
    )
    seventh = values[0, 1].astype(float) - start[7] + 2 * (values[1, 0].astype(float) - start[7])
    np.testing.assert_allclose(
        totals[:2], [values[0, 0].astype(float) - start[4], seventh], rtol=1e-12
    )
