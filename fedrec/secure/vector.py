# SPDX-License-Identifier: Apache-2.0
"""A node's complete reply, sums of updates and counts, as one vector of integers for masking, and
the digest of the order that all nodes must share.

Tables are whole, because the rows touched by a node's clients must stay hidden; of parameters that
every client changes by a symmetric matrix, the triangle. Counts and the loss are included, so that
the whole answer is masked.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from cryptography.hazmat.primitives.hashes import SHA256, Hash

from fedrec.errors import ExperimentError, RefusalError
from fedrec.privacy.clipping import Protection
from fedrec.protocol.messages import TrainOrder, TrainSum
from fedrec.protocol.updates import dense_change, mirrored, numbers_of, upper
from fedrec.secure import keys

# Real numbers as integers modulo 2^64, so that masks cancel exactly and sums of masked numbers are
# sums.
#
# A number x is round(x * 2^bits), negative ones as two's complement. Each of n nodes may contribute
# at most (2^63 - 1) / n in absolute value, so that sums do not overflow. A node with larger numbers
# refuses, because an overflow could not be detected.

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
            "invalid bound on the numbers of secure aggregation",
            expected=f"a bound above 0 and at most {float(limit(nodes)):.3g}, with {nodes} nodes",
            got=f"{bound:.6g}",
            fix="lower secure-aggregation.largest, or privacy.clip-norm",
        )
    return min(room.bit_length() - 1, MOST_BITS)


def to_fixed_point(values: np.ndarray, bits: int, nodes: int) -> np.ndarray:
    """Encode numbers as integers modulo 2^64.

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
    most = float(limit(nodes))
    if int(most) > limit(nodes):
        most = math.nextafter(most, 0.0)
    if not (np.abs(scaled) <= most).all():  # NaN fails too
        raise RefusalError(
            "a sum of updates is too large for secure aggregation",
            expected=f"finite numbers up to {math.ldexp(limit(nodes), -bits):.6g}",
            got="a larger value, or NaN",
            fix="raise secure-aggregation.largest (under [privacy]: privacy.clip-norm), or lower"
            " step.learning-rate",
        )
    return scaled.astype(np.int64).view(np.uint64)


def from_fixed_point(integers: np.ndarray, bits: int) -> np.ndarray:
    """Decode sums of `to_fixed_point` numbers, `uint64 [n]`, to `float64 [n]`; exact up to
    float64's 53 digits."""
    return np.ldexp(integers.view(np.int64).astype(np.float64), -bits)


# A reply as one vector.

_COUNTED = ("clients", "weight", "examples", "loss", "losses")
_COUNT_BITS = 20  # binary digits of counts and losses
_FAR = 64.0  # standard deviations that noise practically never exceeds


@dataclass(frozen=True)
class _SentShape:
    """Shape of a parameter, and of the numbers that are sent for it.

    Attributes:
        shape: its shape.
        symmetric: whether every client's change is a symmetric matrix.
    """

    shape: tuple[int, ...]
    symmetric: bool = False

    @property
    def numbers(self) -> int:
        """Number of numbers that are sent."""
        return numbers_of(self.shape[0]) if self.symmetric else math.prod(self.shape)

    def flat(self, change: np.ndarray) -> np.ndarray:
        """Numbers `[numbers]` that are sent for a whole change `[...]`."""
        return upper(change) if self.symmetric else change.ravel()

    def whole(self, flat: np.ndarray) -> np.ndarray:
        """Restore the change `[...]` from the numbers that were sent, `[numbers]`."""
        return mirrored(flat, self.shape[0]) if self.symmetric else flat.reshape(self.shape)


Shapes = Mapping[str, _SentShape]


def shapes_of(
    theta: Mapping[str, np.ndarray], protection: Protection | None, symmetric: Collection[str] = ()
) -> dict[str, _SentShape]:
    """Sent shape of each parameter, by name, in order.

    Args:
        theta: the parameters.
        protection: names those that may be sent; None: all.
        symmetric: names of those that every client changes by a symmetric matrix.
    """
    names = theta if protection is None else protection.names
    return {name: _SentShape(tuple(theta[name].shape), name in symmetric) for name in sorted(names)}


def length(shapes: Shapes) -> int:
    """Number of integers in the vector."""
    return sum(shape.numbers for shape in shapes.values()) + len(_COUNTED)


def vector_bytes(shapes: Shapes) -> int:
    """Bytes of the vector, the longest form of a reply."""
    return 8 * length(shapes)


def session_bits(protection: Protection | None, clients: int, nodes: int, largest: float) -> int:
    """Binary digits after the point in a session, computed alike by server and nodes. The bound is
    that of all clients of a round on one node.

    Args:
        protection: clipping and noise of each client's update; the clip norm bounds every
            coordinate.
        clients: number of clients of the round.
        nodes: number of nodes.
        largest: the bound where updates are not clipped.

    Raises:
        ExperimentError: the numbers do not fit.
    """
    if protection is not None:
        clients = max(1, clients)
        noise = _FAR * (math.sqrt(clients) + 1) * protection.noise_scale
        largest = clients * protection.clip_norm + noise
    return bits_for(largest, max(nodes, 1))


def encoded(
    reply: TrainSum, arrays: Mapping[str, np.ndarray], shapes: Shapes, bits: int, nodes: int
) -> np.ndarray:
    """Encode a reply as `uint64 [length]`, see `to_fixed_point`.

    Args:
        reply: the answer.
        arrays: the initial parameters of its clients.
        shapes: see `shapes_of`.
        bits: binary digits after the point of the updates.
        nodes: number of nodes whose answers are added.

    Raises:
        ClientError: a number is too large or not finite.
    """
    sent = [shape.flat(dense_change(reply.total[name])) for name, shape in shapes.items()]
    updates = to_fixed_point(np.concatenate([*sent, np.empty(0)]), bits, nodes)
    counts = np.array([getattr(reply, name) for name in _COUNTED], dtype=np.float64)
    return np.concatenate([updates, to_fixed_point(counts, _COUNT_BITS, nodes)])


def decoded(vector: np.ndarray, shapes: Shapes, bits: int) -> TrainSum:
    """Decode the sum of all nodes' vectors, `uint64 [numbers]`, to their joint reply, with updates
    in float64."""
    numbers, counts = np.split(vector, [len(vector) - len(_COUNTED)])
    sizes = [shape.numbers for shape in shapes.values()]
    updates = np.split(from_fixed_point(numbers, bits), np.cumsum(sizes))
    count = dict(zip(_COUNTED, from_fixed_point(counts, _COUNT_BITS).tolist(), strict=True))
    return TrainSum(
        total={
            name: shape.whole(flat)
            for (name, shape), flat in zip(shapes.items(), updates, strict=False)
        },
        clients=round(count["clients"]),
        weight=count["weight"],
        examples=round(count["examples"]),
        loss=count["loss"],
        losses=round(count["losses"]),
        sent=round(count["clients"]) * vector_bytes(shapes),
    )


# Digest of a training order that must be the same for all nodes of a session.
#
# Masks cancel whatever the nodes compute. A server that sends parameters or settings under which
# the updates of all nodes but one are zero would learn that node's update from the sum (Pasquini,
# Francati and Ateniese 2022, "Eluding secure aggregation in federated learning via model
# inconsistency"). So the nodes agree on the order before they mask a sum.


def digest_of(order: TrainOrder, arrays: Mapping[str, np.ndarray]) -> bytes:
    """Digest of an order and the parameters that came with it, without the clients and the masking,
    which differ between nodes.

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
        values = Hash(SHA256())
        values.update(np.asarray(value, order="C").reshape(-1).view(np.uint8).data)
        parts += [name.encode(), kind.encode(), values.finalize()]
    return keys.digest(b"training order", *parts)
