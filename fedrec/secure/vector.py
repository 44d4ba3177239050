# SPDX-License-Identifier: Apache-2.0
"""A node's complete reply, sums of updates and counts, as one vector of integers for masking.

Tables are whole, because the rows touched by a node's clients must stay hidden. Counts and the loss
are included, so that the whole answer is masked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from fedrec.privacy.protection import Protection
from fedrec.protocol.orders import TrainSum
from fedrec.protocol.sparse_update import dense_change
from fedrec.secure import fixed_point

_COUNTED = ("clients", "weight", "examples", "loss", "losses", "unclipped")
_COUNT_BITS = 20  # binary digits of counts and losses
_FAR = 64.0  # standard deviations that noise practically never exceeds

Shapes = Mapping[str, tuple[int, ...]]


def shapes_of(
    theta: Mapping[str, np.ndarray], protection: Protection | None
) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that are sent, by name."""
    names = theta if protection is None else protection.names
    return {name: tuple(theta[name].shape) for name in sorted(names)}


def length(shapes: Shapes) -> int:
    """Number of integers in the vector."""
    return sum(math.prod(shape) for shape in shapes.values()) + len(_COUNTED)


def vector_bytes(shapes: Shapes) -> int:
    """Bytes of the vector, the longest form in which an answer leaves a device."""
    return 8 * length(shapes)


def bound_of(protection: Protection | None, clients: int, largest: float) -> float:
    """Largest absolute value in a node's sum of updates if all clients of a round are on one node.

    Args:
        protection: clipping and noise of each client's update; the clip norm bounds every
            coordinate.
        clients: number of clients of the round.
        largest: the bound where updates are not clipped.
    """
    if protection is None:
        return largest
    return clients * protection.clip_norm + _FAR * (math.sqrt(clients) + 1) * protection.noise_scale


def encoded(
    reply: TrainSum, arrays: Mapping[str, np.ndarray], shapes: Shapes, bits: int, nodes: int
) -> np.ndarray:
    """A reply as `uint64 [length]`, see `fixed_point.encoded`.

    Args:
        reply: the answer.
        arrays: the initial parameters of its clients.
        shapes: see `shapes_of`.
        bits: binary digits of the updates after the point.
        nodes: number of nodes whose answers are added.

    Raises:
        ClientError: a number is too large or not finite.
    """
    whole = [dense_change(reply.total[name], arrays[name]).ravel() for name in shapes]
    updates = fixed_point.encoded(np.concatenate([*whole, np.empty(0)]), bits, nodes)
    counts = np.array([getattr(reply, name) for name in _COUNTED], dtype=np.float64)
    return np.concatenate([updates, fixed_point.encoded(counts, _COUNT_BITS, nodes)])


def decoded(vector: np.ndarray, shapes: Shapes, bits: int) -> TrainSum:
    """The reply of all nodes together, from the sum of their vectors, `uint64 [numbers]`; updates
    are float64."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    updates = fixed_point.decoded(vector[: len(vector) - len(_COUNTED)], bits)
    parts = np.split(updates, np.cumsum(sizes))
    counts = fixed_point.decoded(vector[len(vector) - len(_COUNTED) :], _COUNT_BITS)
    found = dict(zip(_COUNTED, counts.tolist(), strict=True))
    return TrainSum(
        total={
            name: part.reshape(shape)
            for (name, shape), part in zip(shapes.items(), parts, strict=False)
        },
        clients=round(found["clients"]),
        weight=found["weight"],
        examples=round(found["examples"]),
        loss=found["loss"],
        losses=round(found["losses"]),
        unclipped=round(found["unclipped"]),
        sent=round(found["clients"]) * vector_bytes(shapes),
    )
