# SPDX-License-Identifier: Apache-2.0
"""Comparison of sums of float32 updates with a float64 reference, relative to the rounding of the
float32 reference.

A fixed tolerance would depend on the processor, which determines the order of sums, and if the
updates of many clients nearly cancel, a relative difference is meaningless. Errors are measured
against the same computation in float64, and may be a multiple of those of the reference in float32,
which takes the same number of steps.
"""

import math

import numpy as np
import pytest

from clients.blocks import train_in_blocks, update_of
from fedrec.protocol.updates import dense_change
from fedrec.rng import stream

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


def assert_members_alike(node, reference, parameters, data, same):
    """Fail if a client in a block differs from the same one trained alone by another step.

    Args:
        node: with the clients `range(len(data))`.
        reference: the step that trains each alone.
        parameters: the global ones.
        data: of each client.
        same: compares two updates.
    """
    step, seen = node.step(node.experiment.step), []
    given = parameters, np.arange(len(data)), "client", 1
    for places, trained in train_in_blocks(node, step, node.path(step), *given):
        norms, losses = trained.norms(), trained.losses()
        for member, place in enumerate(places):
            update = update_of(reference, parameters, data[place], stream(0, "client", place, 1))
            moved = trained.parameters_of(member).items()
            same({name: value[0] - parameters[name] for name, value in moved}, update.delta)
            squares = (float(delta.double().square().sum()) for delta in update.delta.values())
            norm = math.sqrt(sum(squares))
            assert float(norms[member]) == pytest.approx(norm, rel=1e-4, abs=1e-7)
            assert trained.block.examples[member] == update.examples
            assert losses[member] == pytest.approx(update.loss, rel=1e-4, nan_ok=True)
            seen.append(place)
    assert sorted(seen) == list(range(len(data)))
