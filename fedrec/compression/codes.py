# SPDX-License-Identifier: Apache-2.0
"""Compressions of updates: stochastic rounding, and the largest rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
from pydantic import Field

from fedrec.compression.codec import (
    Compression,
    Payload,
    placed,
    row_numbers,
    rows_and_values,
    values_shape,
    with_rows,
)
from fedrec.config import Config
from fedrec.protocol.updates import Change

# Numbers in a few bits, by stochastic rounding: unbiased, with one scale for each row (Alistarh,
# Grubic, Li, Tomioka and Vojnovic 2017, "QSGD", with the largest value of a row in place of its
# norm).
#
# With b bits there are 2^(b - 1) - 1 steps on either side of zero, so that zero is exact.

Bits = Literal[2, 4, 8, 32]
"""Bits per number; 32: uncompressed."""


def steps_of(bits: Bits) -> int:
    """Number of steps on either side of zero, with 2, 4 or 8 bits."""
    return 2 ** (bits - 1) - 1


def quantised(values: np.ndarray, bits: Bits, random: np.random.Generator) -> dict[str, np.ndarray]:
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
    steps = steps_of(bits)
    scales = _scales_of(rows)
    units = np.divide(rows, scales[:, None], out=np.zeros_like(rows), where=scales[:, None] > 0)
    codes = np.floor(units * steps + random.random(rows.shape)).astype(np.int64) + steps
    return {"codes": _packed(codes.ravel().astype(np.uint8), bits), "scales": scales}


def restored(sent: Mapping[str, np.ndarray], shape: tuple[int, ...], bits: Bits) -> np.ndarray:
    """Restore the values `float64 [rows, ...]` from `quantised`."""
    if bits == 32:
        return sent["values"].astype(np.float64).reshape(shape)
    steps = steps_of(bits)
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
    each = 8 // bits
    filled = np.zeros(-(-len(codes) // each) * each, dtype=np.uint8)
    filled[: len(codes)] = codes
    shifts = (bits * np.arange(each)).astype(np.uint8)
    return np.bitwise_or.reduce(filled.reshape(-1, each) << shifts, axis=1)


def _unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    shifts = (bits * np.arange(8 // bits)).astype(np.uint8)
    return ((packed[:, None] >> shifts) & np.uint8(2**bits - 1)).ravel()


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
        rows, values = rows_and_values(change)
        return with_rows(rows, quantised(values, self.config.bits, random), change.shape)

    def decode(self, payload: Payload, shape: tuple[int, ...]) -> Change:
        """Decode to the rounded values."""
        values = restored(payload, values_shape(payload, shape), self.config.bits)
        return placed(payload.get("rows"), values, shape)


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
    error_feedback: bool = True
    """Add the rows that were left out to the client's next update."""


class TopK(Compression):
    """Top-k compression: the largest rows, with error feedback."""

    name = "top-k"
    Config = TopKConfig
    paper = "Sparsified SGD with Memory (Stich et al. 2018)"
    config: TopKConfig

    def encode(self, change: Change, random: np.random.Generator) -> Payload:
        """Encode the largest rows as row numbers, codes and scales."""
        rows, values = rows_and_values(change)
        flat = values.reshape(values.shape[0] if values.ndim else 1, math.prod(values.shape[1:]))
        norms = np.linalg.norm(flat, axis=1)
        moved = np.flatnonzero(norms)
        count = math.ceil(self.config.share * len(moved))
        largest = np.sort(moved[np.argsort(-norms[moved], kind="stable")[:count]])
        numbers = largest if rows is None else rows[largest]
        length = change.shape[0] if change.shape else 1
        # numbers of a vector share one scale
        chosen = flat[largest] if values.ndim > 1 else flat[largest, 0]
        return {"rows": row_numbers(numbers, length), **quantised(chosen, self.config.bits, random)}

    def decode(self, payload: Payload, shape: tuple[int, ...]) -> Change:
        """Decode the rows that were sent; all others do not change."""
        rows = payload["rows"]
        values = restored(payload, (len(rows), *shape[1:]), self.config.bits)
        if len(shape) > 1:
            return placed(rows, values, shape)
        whole = np.zeros(max(1, math.prod(shape)))
        whole[rows.astype(np.int64)] = values
        return whole.reshape(shape)
