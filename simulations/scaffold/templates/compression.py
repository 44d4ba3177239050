# SPDX-License-Identifier: Apache-2.0
"""Signs of an update, and the mean size of its numbers."""

from __future__ import annotations

import math

import numpy as np

from fedrec.compression.base import (
    Compression,
    Payload,
    placed,
    rows_and_values,
    values_shape,
    with_rows,
)
from fedrec.config import Config
from fedrec.protocol.sparse_update import Change


class ExampleConfig(Config):
    """Settings; unknown keys are rejected, and every field has a description."""

    error_feedback: bool = True
    """Whether the client adds what was left out to its next update."""


class Example(Compression):
    """One bit for each number, and one scale for each parameter."""

    Config = ExampleConfig
    config: ExampleConfig

    @property
    def keeps_error(self) -> bool:
        """The setting; the client's private state then has what was left out."""
        return self.config.error_feedback

    def encode(
        self, change: Change, random: np.random.Generator, common: np.random.Generator
    ) -> Payload:
        """Arrays that are sent of one parameter; their bytes are counted."""
        rows, values = rows_and_values(change)
        size = np.array(np.abs(values).mean() if values.size else 0.0, dtype=np.float32)
        return with_rows(rows, {"signs": np.packbits(values > 0), "size": size}, change.shape)

    def decode(
        self, payload: Payload, shape: tuple[int, ...], common: np.random.Generator
    ) -> Change:
        """What the server makes of them."""
        own = values_shape(payload, shape)
        signs = np.unpackbits(payload["signs"], count=math.prod(own)).reshape(own)
        return placed(payload.get("rows"), float(payload["size"]) * (2.0 * signs - 1), shape)
