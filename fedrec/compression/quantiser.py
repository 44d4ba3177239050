# SPDX-License-Identifier: Apache-2.0
"""Numbers in a few bits, by stochastic rounding: unbiased, with one scale for each row (Alistarh,
Grubic, Li, Tomioka and Vojnovic 2017, "QSGD", with the largest value of a row in place of its
norm).

With b bits there are 2^(b - 1) - 1 steps on either side of zero, so that zero is exact. Instead of
a scale for each row, all rows may have one that is agreed and not sent; larger numbers are cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np

Bits = Literal[2, 4, 8, 32]
"""Bits of a number; 32: as it is."""


def steps_of(bits: Bits) -> int:
    """Number of steps on either side of zero, of 2, 4 or 8 bits."""
    return 2 ** (bits - 1) - 1


def quantised(
    values: np.ndarray, bits: Bits, random: np.random.Generator, scale: float | None = None
) -> dict[str, np.ndarray]:
    """Codes and scales of values `[rows, ...]`; of one dimension: of one row.

    Args:
        values: finite numbers.
        bits: of a number.
        random: what is rounded up.
        scale: of all rows, not for 32 bits; None: each has its own.

    Returns:
        `codes`, bytes of 8 / bits numbers each, and `scales`, `float32 [rows]`, unless they have
        one; with 32 bits `values`, `float32`.
    """
    if bits == 32:
        return {"values": values.astype(np.float32)}
    rows = np.asarray(values, dtype=np.float64).reshape(_rows_of(values.shape))
    steps = steps_of(bits)
    if scale is None:
        own = _scales_of(rows)
        units = np.divide(rows, own[:, None], out=np.zeros_like(rows), where=own[:, None] > 0)
    else:
        own = None
        units = np.clip(rows / scale, -1, 1)
    codes = np.floor(units * steps + random.random(rows.shape)).astype(np.int64) + steps
    sent = {"codes": _packed(codes.ravel().astype(np.uint8), bits)}
    return sent if own is None else {**sent, "scales": own}


def restored(
    sent: Mapping[str, np.ndarray], shape: tuple[int, ...], bits: Bits, scale: float | None = None
) -> np.ndarray:
    """The values `float64 [rows, ...]` of `quantised`."""
    if bits == 32:
        return sent["values"].astype(np.float64).reshape(shape)
    steps = steps_of(bits)
    codes = _unpacked(sent["codes"], bits)[: math.prod(shape)].astype(np.float64) - steps
    if scale is not None:
        return (codes * (scale / steps)).reshape(shape)
    rows = codes.reshape(_rows_of(shape))
    return (rows / steps * sent["scales"].astype(np.float64)[:, None]).reshape(shape)


def _scales_of(rows: np.ndarray) -> np.ndarray:
    """The largest value of each row, `float32 [rows]`, rounded up, so that none is above it."""
    largest = np.abs(rows).max(axis=1, initial=0.0)
    scales = largest.astype(np.float32)
    return np.where(scales < largest, np.nextafter(scales, np.float32(np.inf)), scales)


def _rows_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Shape of the values with one scale for each row."""
    return (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes `uint8 [n]` below 2^bits as bytes, `uint8 [n bits / 8]`, rounded up."""
    each = 8 // bits
    filled = np.zeros(-(-len(codes) // each) * each, dtype=np.uint8)
    filled[: len(codes)] = codes
    shifts = (bits * np.arange(each)).astype(np.uint8)
    return np.bitwise_or.reduce(filled.reshape(-1, each) << shifts, axis=1)


def _unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    shifts = (bits * np.arange(8 // bits)).astype(np.uint8)
    return ((packed[:, None] >> shifts) & np.uint8(2**bits - 1)).ravel()
