# SPDX-License-Identifier: Apache-2.0
"""Real numbers modulo 2^64, and the digest of an order that all nodes must share.

Real numbers as integers modulo 2^64, so that masks cancel exactly and sums of masked numbers are
sums.

A number x is round(x * 2^bits), negative ones as two's complement. Each of n nodes may contribute
at most (2^63 - 1) / n in absolute value, so that sums do not overflow. A node with larger numbers
refuses, because an overflow could not be detected.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from fractions import Fraction

import numpy as np
from cryptography.hazmat.primitives.hashes import SHA256, Hash

from fedrec.errors import ExperimentError, RefusalError
from fedrec.protocol.orders import TrainOrder
from fedrec.secure import keys

_LARGEST = 2**63 - 1
MOST_BITS = 100


def limit(nodes: int) -> int:
    """Largest absolute value, as an integer, that each of the given number of nodes may
    contribute."""
    return _LARGEST // nodes


def bits_for(bound: float, nodes: int) -> int:
    """Largest number of binary digits after the point with which each of `nodes` can contribute
    numbers up to `bound`.

    Args:
        bound: largest absolute value of a number of one node, > 0.
        nodes: number of nodes, at least 1.

    Returns:
        Between 0 and 100; the step of the fixed point is 2^-bits.

    Raises:
        ExperimentError: even whole numbers would overflow.
    """
    # exact: a float would round it up
    room = int(limit(nodes) / Fraction(bound)) if 0 < bound < math.inf else 0
    if room < 1:
        raise ExperimentError(
            "secure aggregation has no room for numbers that large",
            expected=f"a bound above 0 and at most {float(limit(nodes)):.3g}, with {nodes} nodes",
            got=f"{bound:.6g}",
            fix="lower secure-aggregation.largest, or privacy.clip-norm",
        )
    return min(room.bit_length() - 1, MOST_BITS)


def encoded(values: np.ndarray, bits: int, nodes: int) -> np.ndarray:
    """Numbers as integers modulo 2^64.

    Args:
        values: `float64 [n]`.
        bits: binary digits after the point.
        nodes: number of nodes whose numbers are added.

    Returns:
        `uint64 [n]`, each within half a step of its value.

    Raises:
        RefusalError: a value is not finite or too large. The text does not name the value, as the
            server reads the error.
    """
    scaled = np.rint(np.ldexp(np.asarray(values, dtype=np.float64), bits))
    if not (np.abs(scaled) <= _representable(limit(nodes))).all():  # NaN fails too
        raise RefusalError(
            "a sum of updates is too large for secure aggregation",
            expected=(
                f"finite numbers up to {math.ldexp(limit(nodes), -bits):.6g} in absolute value"
            ),
            got="a larger one, or none",
            fix=(
                "raise secure-aggregation.largest (under [privacy]: privacy.clip-norm), or lower"
                " step.learning-rate"
            ),
        )
    return scaled.astype(np.int64).view(np.uint64)


def decoded(integers: np.ndarray, bits: int) -> np.ndarray:
    """`float64 [n]` of sums of `encoded` numbers, `uint64 [n]`; exact up to float64's own 53
    digits."""
    return np.ldexp(integers.view(np.int64).astype(np.float64), -bits)


def _representable(most: int) -> float:
    """The largest float64 that is not above an integer."""
    found = float(most)
    return found if int(found) <= most else math.nextafter(found, 0.0)


# Digest of a training order that must be the same for all nodes of a session.
#
# Masks cancel whatever the nodes compute. A server that sends parameters or settings under which
# the updates of all nodes but one are zero would learn that node's update from the sum (Pasquini,
# Francati and Ateniese 2022, "Eluding secure aggregation in federated learning via model
# inconsistency"). So the nodes agree on the order before they mask a sum.


def digest_of(order: TrainOrder, arrays: Mapping[str, np.ndarray]) -> bytes:
    """Digest of an order and the parameters that came with it, without what differs between nodes:
    the clients and the masking.

    Args:
        order: the order.
        arrays: the parameters by name, of any shapes.

    Returns:
        32 bytes (SHA-256).
    """
    settings = {
        "round": order.round,
        "weighting": order.weighting,
        "step": order.step,
        "overrides": dict(order.overrides or {}),
        "protection": None if order.protection is None else order.protection.text(),
        "each": order.each,
    }
    parts = [json.dumps(settings, sort_keys=True).encode()]
    for name, value in sorted(arrays.items()):
        kind = f"{value.dtype.str} {list(value.shape)}"
        parts += [name.encode(), kind.encode(), _digest_of_values(value)]
    return keys.digest(b"training order", *parts)


def _digest_of_values(value: np.ndarray) -> bytes:
    found = Hash(SHA256())
    found.update(np.asarray(value, order="C").reshape(-1).view(np.uint8).data)
    return found.finalize()
