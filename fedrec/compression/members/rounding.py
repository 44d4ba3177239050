# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding of an update to a few bits a number (Alistarh et al. 2017, "QSGD"; with 8
bits, int8). With 32 bits nothing is lost, and the bytes of an uncompressed update are counted."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedrec.compression.base import (
    Compression,
    Payload,
    placed,
    rows_and_values,
    values_shape,
    with_rows,
)
from fedrec.compression.quantiser import Bits, quantised, restored
from fedrec.config import Config
from fedrec.protocol.sparse_update import Change


class RoundingConfig(Config):
    """Settings of stochastic rounding."""

    bits: Bits = Field(default=8)
    """Bits of a number: 2, 4 or 8, beside four bytes for each row; 32: no rounding."""


class Rounding(Compression):
    """Stochastic rounding; the mean over chance is the update itself."""

    Config = RoundingConfig
    paper = "QSGD: Communication-Efficient SGD via Gradient Quantization (Alistarh et al. 2017)"
    config: RoundingConfig

    def encode(
        self, change: Change, random: np.random.Generator, common: np.random.Generator
    ) -> Payload:
        """Row numbers where rows are named, codes and scales."""
        rows, values = rows_and_values(change)
        return with_rows(rows, quantised(values, self.config.bits, random), change.shape)

    def decode(
        self, payload: Payload, shape: tuple[int, ...], common: np.random.Generator
    ) -> Change:
        """The rounded values."""
        values = restored(payload, values_shape(payload, shape), self.config.bits)
        return placed(payload.get("rows"), values, shape)
