# SPDX-License-Identifier: Apache-2.0
"""Compression of updates: the codec that clients and server share, and its codes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field

from fedrec.components.registry import COMPRESSION
from fedrec.components.sections import component_of
from fedrec.config import Config
from fedrec.experiment.schema import Experiment
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
    keeps_error: ClassVar[bool] = False
    """Whether a client saves what was not sent in its private state and adds it to its next update
    (error feedback)."""

    def __init__(self, config: Config) -> None:
        self.config = config

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


def _rows_and_values(change: Change) -> tuple[np.ndarray | None, np.ndarray]:
    """Changed rows `int64 [R]`, None for all rows, and values `float64 [R, ...]` of a change."""
    if isinstance(change, SparseUpdate):
        return change.rows, change.values.astype(np.float64)
    return None, np.asarray(change, dtype=np.float64)


def _placed(rows: np.ndarray | None, values: np.ndarray, shape: tuple[int, ...]) -> Change:
    """Make a change of a parameter from rows `int64 [R]`, None for all rows, and values `[R,
    ...]`."""
    if rows is None:
        return values.reshape(shape)
    return SparseUpdate(shape, rows.astype(np.int64), values.reshape(len(rows), *shape[1:]))


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
            name: self.compression.encode(change, random)
            for name, change in scaled(update, factor).items()
        }


def clip_factor(update: Mapping[str, Change], clip: Clip) -> float:
    """Factor that scales a whole update to the clip norm; 1 if it is within."""
    return clip.factor(
        {
            name: change.values if isinstance(change, SparseUpdate) else change
            for name, change in update.items()
        }
    )


# Numbers in a few bits, by stochastic rounding: unbiased, with one scale for each row (Alistarh,
# Grubic, Li, Tomioka and Vojnovic 2017, "QSGD", with the largest value of a row in place of its
# norm).
#
# With b bits there are 2^(b - 1) - 1 steps on either side of zero, so that zero is exact.

Bits = Literal[2, 4, 8, 32]
"""Bits per number; 32: uncompressed."""


def _steps_of(bits: Bits) -> int:
    """Number of steps on either side of zero, with 2, 4 or 8 bits."""
    return 2 ** (bits - 1) - 1


def _quantised(
    values: np.ndarray, bits: Bits, random: np.random.Generator
) -> dict[str, np.ndarray]:
    """Quantise values `[rows, ...]`; those of one dimension are one row.

    Args:
        values: finite numbers.
        bits: per number.
        random: decides which numbers are rounded up.

    Returns:
        `codes`, bytes of 8 / bits numbers each, and `scales`, `float32 [rows]`; with 32 bits
        `values`, `float32`.
    """
    if bits == 32:
        return {"values": values.astype(np.float32)}
    rows = np.asarray(values, dtype=np.float64).reshape(_rows_of(values.shape))
    steps = _steps_of(bits)
    scales = _scales_of(rows)
    units = np.divide(rows, scales[:, None], out=np.zeros_like(rows), where=scales[:, None] > 0)
    codes = np.floor(units * steps + random.random(rows.shape)).astype(np.int64) + steps
    return {"codes": _packed(codes.ravel().astype(np.uint8), bits), "scales": scales}


def _restored(sent: Mapping[str, np.ndarray], shape: tuple[int, ...], bits: Bits) -> np.ndarray:
    """Restore the values `float64 [rows, ...]` from `_quantised`."""
    if bits == 32:
        return sent["values"].astype(np.float64).reshape(shape)
    steps = _steps_of(bits)
    codes = _unpacked(sent["codes"], bits)[: math.prod(shape)].astype(np.float64) - steps
    rows = codes.reshape(_rows_of(shape))
    return (rows / steps * sent["scales"].astype(np.float64)[:, None]).reshape(shape)


def _scales_of(rows: np.ndarray) -> np.ndarray:
    """Largest absolute value of each row, `float32 [rows]`, rounded up."""
    largest = np.abs(rows).max(axis=1, initial=0.0)
    scales = largest.astype(np.float32)
    return np.where(scales < largest, np.nextafter(scales, np.float32(np.inf)), scales)


def _rows_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Shape `(rows, values per row)` of values with one scale per row."""
    return (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes `uint8 [n]` below 2^bits into bytes, `uint8 [n bits / 8]`, rounded up."""
    digits = np.unpackbits(codes[:, None], axis=1, count=bits, bitorder="little")
    return np.packbits(digits, bitorder="little")


def _unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    digits = np.unpackbits(packed, bitorder="little").reshape(-1, bits)
    return np.packbits(digits, axis=1, bitorder="little")[:, 0]


# Stochastic rounding of an update to a few bits a number (Alistarh et al. 2017, "QSGD"; with 8
# bits, int8). With 32 bits nothing is lost, and the bytes of an uncompressed update are counted.


class RoundingConfig(Config):
    """Settings of stochastic rounding."""

    bits: Bits = Field(default=8)
    """Bits per number: 2, 4 or 8, plus four bytes per row; 32: no rounding."""


class Rounding(Compression):
    """Unbiased stochastic rounding."""

    name = "rounding"
    Config = RoundingConfig
    paper = "QSGD: Communication-Efficient SGD via Gradient Quantization (Alistarh et al. 2017)"
    config: RoundingConfig

    def encode(self, change: Change, random: np.random.Generator) -> Payload:
        """Encode as codes and scales, with row numbers if only some rows changed."""
        rows, values = _rows_and_values(change)
        sent = _quantised(values, self.config.bits, random)
        return sent if rows is None else {"rows": row_numbers(rows, change.shape[0]), **sent}

    def decode(self, payload: Payload, shape: tuple[int, ...]) -> Change:
        """Decode to the rounded values."""
        rows = payload.get("rows")
        sent = shape if rows is None else (len(rows), *shape[1:])
        return _placed(rows, _restored(payload, sent, self.config.bits), shape)


# The largest rows of an update; the rest is added to the client's next update (Stich,
# Cordonnier and Jaggi 2018, "Sparsified SGD with Memory").
#
# Where this differs from the paper: it chooses numbers; here whole rows are chosen (numbers of a
# vector), by their norm, because the updates of item tables have few rows and one row number is
# then for d numbers. What was left out waits until the client takes part again.


class TopKConfig(Config):
    """Settings of the largest rows."""

    share: float = Field(default=0.25, gt=0, le=1)
    """Share of the changed rows that is sent, in (0, 1], rounded up."""
    bits: Bits = Field(default=8)
    """Bits per number, by stochastic rounding: 2, 4 or 8; 32: no rounding."""


class TopK(Compression):
    """Top-k compression: the largest rows, with error feedback."""

    name = "top-k"
    Config = TopKConfig
    paper = "Sparsified SGD with Memory (Stich et al. 2018)"
    keeps_error = True
    config: TopKConfig

    def encode(self, change: Change, random: np.random.Generator) -> Payload:
        """Encode the largest rows as row numbers, codes and scales."""
        rows, values = _rows_and_values(change)
        flat = values.reshape(values.shape[0] if values.ndim else 1, math.prod(values.shape[1:]))
        norms = np.linalg.norm(flat, axis=1)
        moved = np.flatnonzero(norms)
        count = math.ceil(self.config.share * len(moved))
        largest = np.sort(moved[np.argsort(-norms[moved], kind="stable")[:count]])
        numbers = largest if rows is None else rows[largest]
        length = change.shape[0] if change.shape else 1
        # numbers of a vector share one scale
        chosen = flat[largest] if values.ndim > 1 else flat[largest, 0]
        return {
            "rows": row_numbers(numbers, length),
            **_quantised(chosen, self.config.bits, random),
        }

    def decode(self, payload: Payload, shape: tuple[int, ...]) -> Change:
        """Decode the rows that were sent; all others do not change."""
        rows = payload["rows"]
        values = _restored(payload, (len(rows), *shape[1:]), self.config.bits)
        if len(shape) > 1:
            return _placed(rows, values, shape)
        whole = np.zeros(max(1, math.prod(shape)))
        whole[rows.astype(np.int64)] = values
        return whole.reshape(shape)
