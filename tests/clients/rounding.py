# SPDX-License-Identifier: Apache-2.0
"""Comparing sums of float32 updates: with the reference in float64, by the rounding that the
reference itself shows.

A fixed tolerance depends on the processor: sums are taken in other orders there, and where updates
of many clients nearly cancel, a relative difference says nothing. Errors are measured against the
same computation in float64, and may be a multiple of those of the reference in float32, which takes
as many steps.
"""

from __future__ import annotations

import numpy as np

from clients.training.round import train_clients
from fedrec.protocol.sparse_update import dense_change

_MULTIPLE = 32  # of the reference's own rounding: blocks add up in longer sums, of padded batches
# relative to the largest number of an array; by luck the reference may round hardly at all
_LEAST = 2e-7


def numbers(delta):
    """Tensors as float64 arrays."""
    return {name: value.double().numpy() for name, value in delta.items()}


def whole(reply, arrays):
    """A node's sums as whole arrays."""
    return {name: dense_change(change, arrays[name]) for name, change in reply.total.items()}


def exact_sums(node, arrays, order):
    """What a node on the path `reference` would send if it computed in float64."""
    wide = {name: value.astype(np.float64) for name, value in arrays.items()}
    return whole(train_clients(node, wide, order), wide)


def assert_within_rounding(got, reference, exact):
    """Fail where an array is further from the exact one than rounding explains."""
    assert set(got) == set(reference) == set(exact)
    for name, wanted in exact.items():
        rounding = np.abs(reference[name] - wanted).max()
        assert rounding <= 1e-4 * max(np.abs(wanted).max(), 1e-3), (
            "the reference itself is chaotic here"
        )
        allowed = _MULTIPLE * rounding + _LEAST * np.abs(wanted).max() + 1e-12
        error = np.abs(got[name] - wanted).max()
        assert error <= allowed, f"{name}: off by {error:.2e}, and rounding explains {allowed:.2e}"
