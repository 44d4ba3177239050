# SPDX-License-Identifier: Apache-2.0
"""The products that are timed beside each other give the same numbers."""

import numpy as np
import pytest

from benchmarks import sparse_products as timing

SIZES = (32, 128, 64)


@pytest.mark.slow
@pytest.mark.parametrize("kind", timing.WHOLE)
def test_products_without_zeros_give_what_whole_ones_give(kind):
    found = []
    for table in (timing.WHOLE, timing.SPARSE):
        inputs, gradients, weights, outputs, to_inputs, room = timing.numbers(0.5, *SIZES)
        assert 0.45 < (inputs == 0).mean() < 0.55
        outputs[:] = 0
        to_inputs[:] = 0
        if kind == "of weights":
            weights[:] = 0  # so that their step is all of them
        given = inputs[0], gradients[0], weights, outputs, to_inputs, room
        table[kind](*given)
        if kind == "of inputs":  # ReLU's own gradient is part of it
            to_inputs[inputs[0] == 0] = 0
        found.append([numbers.copy() for numbers in (weights, outputs, to_inputs)])
    for whole, sparse in zip(*found, strict=True):
        np.testing.assert_allclose(sparse, whole, rtol=1e-4, atol=1e-5 * np.abs(whole).max())
    result = dict(zip(timing.WHOLE, (found[0][1], found[0][2], found[0][0]), strict=True))[kind]
    assert np.abs(result).max() > 0


@pytest.mark.slow
def test_it_prints_a_speed_for_each_kind_and_share(capsys):
    timing.main([*map(str, SIZES)])
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[1:] == " ".join(timing.WHOLE).split()
    assert len(rows) == 1 + len(timing.SHARES)
    assert all(float(speed) > 0 for row in rows for speed in row.split()[-3:])


@pytest.mark.parametrize("given", [["32", "100", "64"], ["32", "128", "32"], ["0"], ["many"]])
def test_sizes_that_are_multiplied_whole_are_refused(capsys, given):
    with pytest.raises(SystemExit) as error:
        timing.main(given)
    assert error.value.code == 2
    said = capsys.readouterr().err
    assert "multiples of 64" in said or "invalid int value: 'many'" in said
