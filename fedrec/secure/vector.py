# SPDX-License-Identifier: Apache-2.0
"""A node's complete reply, sums of updates and counts, as one vector of integers for masking.

Tables are whole, because the rows touched by a node's clients must stay hidden; of parameters that
every client changes by a symmetric matrix, the triangle. Counts and the loss are included, so that
the whole answer is masked.

Clients that round to a common grid send small integers. Their sum over all clients of a round fits
a smaller type than 64 bits; masked numbers are then sent modulo 2^16, for example, and masks cancel
modulo 2^16 as they do modulo 2^64.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedrec.errors import ExperimentError
from fedrec.experiment.schema import Experiment, common_grid
from fedrec.experiment.tables import SecureAggregationConfig
from fedrec.privacy.protection import Protection
from fedrec.protocol.orders import TrainOrder, TrainSum
from fedrec.protocol.updates import dense_change, mirrored, numbers_of, upper
from fedrec.secure import fixed_point

_COUNTED = ("clients", "weight", "examples", "loss", "losses", "unclipped")
_COUNT_BITS = 20  # binary digits of counts and losses
_LONGEST = np.dtype(np.uint64)  # of integers, and of masks
_KINDS = ("u1", "u2", "u4", "u8")
_EXACT = 2**22  # multiples of a step that survive the rounding of a sum to float32
_FAR = 64.0  # standard deviations that noise practically never exceeds


@dataclass(frozen=True)
class SentShape:
    """What is sent of a parameter.

    Attributes:
        shape: its shape.
        symmetric: whether every client changes it by a symmetric matrix.
    """

    shape: tuple[int, ...]
    symmetric: bool = False

    @property
    def numbers(self) -> int:
        """How many numbers are sent."""
        return numbers_of(self.shape[0]) if self.symmetric else math.prod(self.shape)

    def flat(self, change: np.ndarray) -> np.ndarray:
        """What is sent of a whole change `[...]`, `[numbers]`."""
        return upper(change) if self.symmetric else change.ravel()

    def whole(self, flat: np.ndarray) -> np.ndarray:
        """The change `[...]` from what was sent, `[numbers]`."""
        return mirrored(flat, self.shape[0]) if self.symmetric else flat.reshape(self.shape)


Shapes = Mapping[str, SentShape]


@dataclass(frozen=True)
class Form:
    """How the numbers of an update become integers.

    Attributes:
        bits: binary digits after the point, of multiples of the step.
        step: of a grid on which all numbers are; 1 without one.
        kind: unsigned type of the integers that are sent; sums are modulo its size.
    """

    bits: int
    step: float = 1.0
    kind: np.dtype = _LONGEST

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        settings: SecureAggregationConfig,
        order: TrainOrder,
        counts: Sequence[int],
    ) -> Form:
        """The form of a session, which the server and every node compute from the same numbers.

        Args:
            experiment: the experiment.
            settings: of secure aggregation.
            order: the training order.
            counts: number of clients that each node is asked for.

        Raises:
            ExperimentError: the numbers do not fit.
        """
        clients = max(1, sum(counts))
        if experiment.compression is None:
            bound = bound_of(order.protection, clients, settings.largest)
            return cls(fixed_point.bits_for(bound, max(len(counts), 1)))
        step, most = common_grid(experiment.compression)
        if order.weighting != "uniform" and order.protection is None:
            raise ExperimentError(
                "[compression] with secure-aggregation adds up integers of the same size for every"
                " client",
                expected="strategy.weighting = 'uniform'",
                got=repr(order.weighting),
                fix="set strategy.weighting = 'uniform', or leave out [compression]",
            )
        if most * clients > _EXACT:
            raise ExperimentError(
                "too many clients for compressed updates in one secure sum",
                expected=f"at most {_EXACT // most} clients with so many bits",
                got=str(clients),
                fix="set fewer compression.bits, or a smaller sampler.cohort",
            )
        return cls(0, step, _smallest_kind(most * clients))


def _smallest_kind(most: int) -> np.dtype:
    """The smallest unsigned type with room for integers up to `most` on either side of zero."""
    return next(np.dtype(one) for one in _KINDS if 2 * most < 2 ** (8 * np.dtype(one).itemsize))


def shapes_of(
    theta: Mapping[str, np.ndarray],
    protection: Protection | None,
    symmetric: Collection[str] = (),
) -> dict[str, SentShape]:
    """What is sent of each parameter, by name, in order.

    Args:
        theta: the parameters.
        protection: names those that may be sent; None: all.
        symmetric: names of those that every client changes by a symmetric matrix.
    """
    names = theta if protection is None else protection.names
    return {name: SentShape(tuple(theta[name].shape), name in symmetric) for name in sorted(names)}


def length(shapes: Shapes) -> int:
    """Number of integers in the vector."""
    return sum(one.numbers for one in shapes.values()) + len(_COUNTED)


def vector_bytes(shapes: Shapes, kind: np.dtype = _LONGEST) -> int:
    """Bytes of the vector whose updates are of a type; by default the longest form in which an
    answer leaves a device."""
    numbers = length(shapes) - len(_COUNTED)
    return kind.itemsize * numbers + _LONGEST.itemsize * len(_COUNTED)


def sent_parts(vector: np.ndarray, kind: np.dtype) -> dict[str, np.ndarray]:
    """A masked vector, `uint64 [length]`, as the arrays that are sent: its numbers in a type, and
    its counts."""
    numbers, counts = np.split(vector, [len(vector) - len(_COUNTED)])
    return {"masked": numbers.astype(kind), "counts": counts}


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
    reply: TrainSum, arrays: Mapping[str, np.ndarray], shapes: Shapes, form: Form, nodes: int
) -> np.ndarray:
    """A reply as `uint64 [length]`, see `fixed_point.encoded`.

    Args:
        reply: the answer.
        arrays: the initial parameters of its clients.
        shapes: see `shapes_of`.
        form: of the updates.
        nodes: number of nodes whose answers are added.

    Raises:
        ClientError: a number is too large or not finite.
    """
    sent = [one.flat(dense_change(reply.total[name], arrays[name])) for name, one in shapes.items()]
    numbers = np.concatenate([*sent, np.empty(0)]) / form.step
    updates = fixed_point.encoded(numbers, form.bits, nodes)
    counts = np.array([getattr(reply, name) for name in _COUNTED], dtype=np.float64)
    return np.concatenate([updates, fixed_point.encoded(counts, _COUNT_BITS, nodes)])


def decoded(vector: np.ndarray, shapes: Shapes, form: Form) -> TrainSum:
    """The reply of all nodes together, from the sum of their vectors, `uint64 [numbers]`; updates
    are float64."""
    sizes = [one.numbers for one in shapes.values()]
    signed = vector[: len(vector) - len(_COUNTED)].astype(form.kind).view(f"i{form.kind.itemsize}")
    updates = fixed_point.decoded(signed.astype(np.int64).view(np.uint64), form.bits) * form.step
    parts = np.split(updates, np.cumsum(sizes))
    counts = fixed_point.decoded(vector[len(vector) - len(_COUNTED) :], _COUNT_BITS)
    found = dict(zip(_COUNTED, counts.tolist(), strict=True))
    return TrainSum(
        total={
            name: one.whole(part) for (name, one), part in zip(shapes.items(), parts, strict=False)
        },
        clients=round(found["clients"]),
        weight=found["weight"],
        examples=round(found["examples"]),
        loss=found["loss"],
        losses=round(found["losses"]),
        unclipped=round(found["unclipped"]),
        sent=round(found["clients"]) * vector_bytes(shapes, form.kind),
    )
