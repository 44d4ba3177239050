# SPDX-License-Identifier: Apache-2.0
"""Base class of compressions, and the codec that applies one to the updates of a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from fedrec.components.registry import COMPRESSION
from fedrec.config import Config
from fedrec.experiment.schema import Experiment
from fedrec.experiment.sections import component_of
from fedrec.privacy.clipping import Clip
from fedrec.protocol.updates import Change, SparseUpdate, scaled
from fedrec.rng import stream

# The contract of a compression: how a client encodes its update and how the server decodes it.
#
# Compression comes after the clip and before the sum. An update whose decoded form has a larger
# norm than the clip is scaled down before it is encoded (`Codec`), so that one client moves the sum
# by no more than without compression, and the privacy of a run is the same: decoding is a function
# of one client's data and of chance. Noise of the server comes later.

Payload = Mapping[str, np.ndarray]
"""Arrays sent for one parameter; their bytes are counted."""


class Compression(ABC):
    """Encoding of a client's update.

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
        """True if a client saves what was not sent in its private state and adds it to its next
        update (error feedback): the setting `error-feedback`, if any."""
        return bool(getattr(self.config, "error_feedback", False))

    @abstractmethod
    def encode(self, change: Change, random: np.random.Generator) -> Payload:
        """Encode a client's change of one parameter.

        Args:
            change: an array `[...]`, or the changed rows of a table `[items, d]`; it is not changed
                in place.
            random: of this client and round.
        """

    @abstractmethod
    def decode(self, payload: Payload, shape: tuple[int, ...]) -> Change:
        """Decode a payload to a change of the parameter's shape.

        Args:
            payload: the result of `encode`.
            shape: of the parameter.
        """


def rows_and_values(change: Change) -> tuple[np.ndarray | None, np.ndarray]:
    """Changed rows `int64 [R]`, None for all rows, and values `float64 [R, ...]` of a change."""
    if isinstance(change, SparseUpdate):
        if change.drift:
            raise ValueError("cannot compress a client's update with a drift of all rows")
        return change.rows, change.values.astype(np.float64)
    return None, np.asarray(change, dtype=np.float64)


def placed(rows: np.ndarray | None, values: np.ndarray, shape: tuple[int, ...]) -> Change:
    """Make a change of a parameter from rows `int64 [R]`, None for all rows, and values `[R,
    ...]`."""
    if rows is None:
        return values.reshape(shape)
    return SparseUpdate(shape, rows.astype(np.int64), values.reshape(len(rows), *shape[1:]))


def with_rows(rows: np.ndarray | None, sent: Payload, shape: tuple[int, ...]) -> Payload:
    """Add row numbers `int64 [R]` to the payload of a parameter of that shape, unless they are all
    rows."""
    return sent if rows is None else {"rows": row_numbers(rows, shape[0]), **sent}


def values_shape(payload: Payload, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape `(R, ...)` of the values in a payload of `with_rows`."""
    return (len(payload["rows"]), *shape[1:]) if "rows" in payload else shape


def row_numbers(rows: np.ndarray, length: int) -> np.ndarray:
    """Row numbers `[R]` in the smallest unsigned type for a table of that length."""
    return rows.astype(np.min_scalar_type(max(0, length - 1)))


# The compression of a round, applied to whole updates.

Payloads = Mapping[str, Payload]
"""Arrays sent for an update, by parameter."""
_ATTEMPTS = 60


@dataclass(frozen=True, eq=False)
class Codec:
    """Encodes and decodes the updates of a round.

    Attributes:
        compression: the compression.
        seed: of the experiment.
        round: the round.
    """

    compression: Compression
    seed: int
    round: int

    @classmethod
    def of(cls, experiment: Experiment, round_: int) -> Self | None:
        """Make the codec of an experiment; None without compression."""
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
        """Encode a client's update; returns the payloads and the changes that they decode to.

        Rounding makes some updates longer. An update whose decoded form exceeds the clip is scaled
        down and encoded again, with the same random numbers, until it does not.
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
        """Decode a client's payloads to changes."""
        return {
            name: self.compression.decode(payload, shapes[name])
            for name, payload in payloads.items()
        }

    def _payloads(self, client: int, update: Mapping[str, Change], factor: float) -> Payloads:
        random = stream(self.seed, "compression", client, self.round)
        return {
            name: self.compression.encode(change if factor == 1 else scaled(change, factor), random)
            for name, change in update.items()
        }


def clip_factor(update: Mapping[str, Change], clip: Clip) -> float:
    """Factor that scales a whole update to the clip norm; 1 if it is within."""
    parts = {
        name: change.values if isinstance(change, SparseUpdate) else change
        for name, change in update.items()
    }
    return float(clip.factors(np.array([clip.measure(parts)]))[0])
