# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding of an update to a few bits a number (Alistarh et al. 2017, "QSGD"; with 8
bits, int8). With 32 bits nothing is lost, and the bytes of an uncompressed update are counted.

With `largest`, all clients round to one grid. Sums of their updates are then sums of small
integers, which is what secure aggregation can add.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from pydantic import Field, model_validator

from fedrec.compression.base import (
    Compression,
    Grid,
    Payload,
    placed,
    rows_and_values,
    values_shape,
    with_rows,
)
from fedrec.compression.quantiser import Bits, quantised, restored, steps_of
from fedrec.config import Config
from fedrec.protocol.sparse_update import Change


class RoundingConfig(Config):
    """Settings of stochastic rounding."""

    bits: Bits = Field(default=8)
    """Bits of a number: 2, 4 or 8, beside four bytes for each row; 32: no rounding."""
    largest: float | None = Field(default=None, gt=0)
    """Largest absolute value of a number: all rows of all clients are rounded to the same multiples
    of `largest` / (2^(bits - 1) - 1), and larger numbers are cut; no scales are sent. Default: each
    row has its own scale."""

    @model_validator(mode="after")
    def _has_few_bits(self) -> Self:
        if self.largest is not None and self.bits == 32:
            raise ValueError("bits = 2, 4 or 8 with largest, as 32 bits are not rounded")
        return self


class Rounding(Compression):
    """Stochastic rounding; the mean over chance is the update itself."""

    name = "rounding"
    Config = RoundingConfig
    paper = "QSGD: Communication-Efficient SGD via Gradient Quantization (Alistarh et al. 2017)"
    config: RoundingConfig

    @property
    def grid(self) -> Grid | None:
        """Multiples of a step, with `largest`."""
        largest = self.config.largest
        if largest is None:
            return None
        most = steps_of(self.config.bits)
        return Grid(largest / most, most)

    def encode(
        self, change: Change, random: np.random.Generator, common: np.random.Generator
    ) -> Payload:
        """Row numbers where rows are named, codes and scales."""
        rows, values = rows_and_values(change)
        sent = quantised(values, self.config.bits, random, self.config.largest)
        return with_rows(rows, sent, change.shape)

    def decode(
        self, payload: Payload, shape: tuple[int, ...], common: np.random.Generator
    ) -> Change:
        """The rounded values."""
        values = restored(
            payload, values_shape(payload, shape), self.config.bits, self.config.largest
        )
        return placed(payload.get("rows"), values, shape)
