# SPDX-License-Identifier: Apache-2.0
"""The products that are timed beside each other give the same numbers."""

import numpy as np
import pytest

from benchmarks import sparse_products as timing

SIZES = (32, 128, 64)


@pytest.mark.slow
def test_forward_products_without_zeros_give_what_whole_ones_give():
    results = {}
    for name, table in (("whole", timing.WHOLE), ("sparse", timing.SPARSE)):
        inputs, gradients, weights, outputs, to_inputs, room = timing.numbers(0.5, *SIZES)
        assert 0.45 < (inputs == 0).mean() < 0.55
        outputs[:] = 0
        table["forward"](inputs[0], gradients[0], weights, outputs, to_inputs, room)
        results[name] = outputs.copy()
    _assert_equal(results["sparse"], results["whole"])
    _assert_equal(results["whole"], inputs[0] @ weights)


@pytest.mark.slow
def test_backward_products_without_zeros_give_what_whole_ones_give():
    results = {}
    for name, table in (("whole", timing.WHOLE), ("sparse", timing.SPARSE)):
        inputs, gradients, weights, outputs, to_inputs, room = timing.numbers(0.5, *SIZES)
        before = weights.copy()
        gradients[0] /= timing.RATE  # so that a step changes the weights
        table["both backward"](inputs[0], gradients[0], weights, outputs, to_inputs, room)
        # Without zeros the gradient of ReLU is part of that of the inputs.
        results[name] = before - weights, np.where(inputs[0] != 0, to_inputs, 0)
        if name == "sparse":
            assert not to_inputs[inputs[0] == 0].any()
    expected = (
        timing.RATE * inputs[0].T @ gradients[0],
        np.where(inputs[0] != 0, gradients[0] @ before.T, 0),
    )
    for whole, sparse, exact in zip(*results.values(), expected, strict=True):
        _assert_equal(sparse, whole)
        _assert_equal(whole, exact)


def _assert_equal(found, expected):
    assert np.abs(expected).max() > 0
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
def test_it_prints_a_speed_for_each_kind_and_share(capsys):
    timing.main([*map(str, SIZES)])
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[1:] == " ".join(timing.WHOLE).split()
    assert len(rows) == 1 + len(timing.SHARES)
    columns = len(timing.PRODUCTS)
    assert all(float(speed) > 0 for row in rows for speed in row.split()[-columns:])


@pytest.mark.parametrize("given", [["32", "100", "64"], ["32", "128", "32"], ["0"], ["many"]])
def test_sizes_that_are_multiplied_whole_are_refused(capsys, given):
    with pytest.raises(SystemExit) as error:
        timing.main(given)
    assert error.value.code == 2
    said = capsys.readouterr().err
    assert "multiples of 64" in said or "invalid int value: 'many'" in said
