# SPDX-License-Identifier: Apache-2.0
"""Comparison of sums of float32 updates with a float64 reference, relative to the rounding of the
float32 reference.

A fixed tolerance would depend on the processor, which determines the order of sums, and if the
updates of many clients nearly cancel, a relative difference is meaningless. Errors are measured
against the same computation in float64, and may be a multiple of those of the reference in float32,
which takes the same number of steps.
"""

import numpy as np

from fedrec.protocol.updates import dense_change

_MULTIPLE = 32  # times the reference's own rounding: blocks have longer sums, over padded batches
# relative to the largest number of an array, because the reference's rounding may be near zero by
# chance
_LEAST = 2e-7


def numbers(delta):
    """Tensors as float64 arrays."""
    return {name: value.double().numpy() for name, value in delta.items()}


def whole(reply, arrays):
    """A node's sums as whole arrays."""
    return {name: dense_change(change) for name, change in reply.total.items()}


def assert_within_rounding(got, reference, exact):
    """Fail if an array differs from the exact one by more than rounding explains."""
    assert set(got) == set(reference) == set(exact)
    for name, wanted in exact.items():
        rounding = np.abs(reference[name] - wanted).max()
        assert rounding <= 1e-4 * max(np.abs(wanted).max(), 1e-3), (
            "the reference itself is chaotic here"
        )
        allowed = _MULTIPLE * rounding + _LEAST * np.abs(wanted).max() + 1e-12
        error = np.abs(got[name] - wanted).max()
        assert error <= allowed, f"{name}: off by {error:.2e}, and rounding explains {allowed:.2e}"
