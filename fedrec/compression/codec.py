# SPDX-License-Identifier: Apache-2.0
"""The compression of a round, and the contract of the compressions that it applies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np

from fedrec.components.registry import COMPRESSION
from fedrec.config import Config
from fedrec.experiment.schema import Experiment
from fedrec.experiment.sections import component_of
from fedrec.privacy.clipping import Clip
from fedrec.protocol.updates import Change, SparseUpdate, scaled
from fedrec.rng import stream

# The contract of a compression: what a client sends of its update, and what is made of it.
#
# Compression comes after the clip and before the sum. An update whose decoded form has a larger
# norm than the clip is scaled down before it is encoded (`Codec`), so that one client moves the sum
# by no more than without compression, and the privacy of a run is the same: decoding is a function
# of one client's data and of chance. Noise of the server comes later.

Payload = Mapping[str, np.ndarray]
"""The arrays that are sent of one parameter; their bytes are what is counted."""


class Grid(NamedTuple):
    """Numbers to which all clients round alike: whole multiples of a step."""

    step: float
    """Distance of neighbouring numbers."""
    most: int
    """Largest multiple, on either side of zero."""


class Compression(ABC):
    """What is sent of a client's update.

    A built-in has a `name` and lives in `fedrec/compression/`, its configuration class
    above it.

    Args:
        config: its settings.
    """

    Config: ClassVar[type[Config]] = Config
    paper: ClassVar[str] = ""

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def keeps_error(self) -> bool:
        """Whether a client adds what was left out to its next update (error feedback), which it
        keeps with its private state; default: no."""
        return False

    @property
    def grid(self) -> Grid | None:
        """The grid that every decoded number is on, which depends on nothing but the settings, so
        that sums of updates are sums of small integers; default: there is none."""
        return None

    @abstractmethod
    def encode(
        self, change: Change, random: np.random.Generator, common: np.random.Generator
    ) -> Payload:
        """What is sent of a client's change of one parameter.

        Args:
            change: an array `[...]`, or of a table `[items, d]` the rows that changed; it is not
                changed in place.
            random: of this client and round.
            common: of this parameter and round, the same for all clients and for `decode`.
        """

    @abstractmethod
    def decode(
        self, payload: Payload, shape: tuple[int, ...], common: np.random.Generator
    ) -> Change:
        """The change that the server makes of it, of the parameter's shape.

        Args:
            payload: what `encode` returned.
            shape: of the parameter.
            common: as in `encode`, from its beginning.
        """


def rows_and_values(change: Change) -> tuple[np.ndarray | None, np.ndarray]:
    """Rows `int64 [R]`, None for all of them, and values `float64 [R, ...]` of a change."""
    if isinstance(change, SparseUpdate):
        if change.drift:
            raise ValueError("a client's update of a table names the rows that changed")
        return change.rows, change.values.astype(np.float64)
    return None, np.asarray(change, dtype=np.float64)


def placed(rows: np.ndarray | None, values: np.ndarray, shape: tuple[int, ...]) -> Change:
    """Rows `int64 [R]`, or None for all, and values `[R, ...]` as a change of a parameter of that
    shape."""
    if rows is None:
        return values.reshape(shape)
    return SparseUpdate(shape, rows.astype(np.int64), values.reshape(len(rows), *shape[1:]))


def with_rows(rows: np.ndarray | None, sent: Payload, shape: tuple[int, ...]) -> Payload:
    """What is sent of the values of rows `int64 [R]` of a parameter of that shape, with the numbers
    of the rows unless these are all."""
    return sent if rows is None else {"rows": row_numbers(rows, shape[0]), **sent}


def values_shape(payload: Payload, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the values of which `with_rows` told, `(R, ...)`."""
    return (len(payload["rows"]), *shape[1:]) if "rows" in payload else shape


def row_numbers(rows: np.ndarray, length: int) -> np.ndarray:
    """Row numbers `[R]` in the smallest unsigned type for a table of that length."""
    return rows.astype(np.min_scalar_type(max(0, length - 1)))


# A round's compression: what a client sends, and what the server makes of it.
#
# Both ends draw what they have in common from the experiment's seed and the round.

Payloads = Mapping[str, Payload]
"""What is sent of an update, by parameter."""
_ATTEMPTS = 60


@dataclass(frozen=True, eq=False)
class Codec:
    """Encodes and decodes the updates of a round.

    Attributes:
        compression: how.
        seed: of the experiment.
        round: the round.
    """

    compression: Compression
    seed: int
    round: int

    @classmethod
    def of(cls, experiment: Experiment, round_: int) -> Self | None:
        """That of an experiment; None: it has no compression."""
        if experiment.compression is None:
            return None
        return cls(component_of(COMPRESSION, experiment.compression), experiment.seed, round_)

    def encoded(
        self,
        client: int,
        update: Mapping[str, Change],
        shapes: Mapping[str, tuple[int, ...]],
        clip: Clip | None,
    ) -> tuple[Payloads, dict[str, Change]]:
        """What a client sends, and what is decoded of it.

        Rounding makes some updates longer. An update whose decoded form exceeds the clip is scaled
        down and encoded again, with the same random numbers, until it does not. On a grid the
        excess falls more slowly than the factor, hence the attempts.
        """
        factor = 1.0
        for _ in range(_ATTEMPTS):
            payloads = self._payloads(client, update, factor)
            decoded = self.decoded(payloads, shapes)
            further = 1.0 if clip is None else clip_factor(decoded, clip)
            if further == 1:
                return payloads, decoded
            factor *= further
        payloads = self._payloads(client, update, 0.0)
        return payloads, self.decoded(payloads, shapes)

    def decoded(
        self, payloads: Payloads, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Change]:
        """The changes that the server makes of what a client sent."""
        return {
            name: self.compression.decode(payload, shapes[name], self._common(name))
            for name, payload in payloads.items()
        }

    def _payloads(self, client: int, update: Mapping[str, Change], factor: float) -> Payloads:
        random = stream(self.seed, "compression", client, self.round)
        return {
            name: self.compression.encode(
                change if factor == 1 else scaled(change, factor), random, self._common(name)
            )
            for name, change in update.items()
        }

    def _common(self, name: str) -> np.random.Generator:
        return stream(self.seed, f"compression/{name}", self.round)


def clip_factor(update: Mapping[str, Change], clip: Clip) -> float:
    """Factor that brings a whole update within a clip; 1: it is."""
    parts = {
        name: change.values if isinstance(change, SparseUpdate) else change
        for name, change in update.items()
    }
    return float(clip.factors(np.array([clip.measure(parts)]))[0])
