# SPDX-License-Identifier: Apache-2.0
"""The largest rows of an update; what is left out is added to the client's next update (Stich,
Cordonnier and Jaggi 2018, "Sparsified SGD with Memory").

Where this differs from the paper: it chooses numbers; here whole rows are chosen (numbers of a
vector), by their norm, because the updates of item tables have few rows and one row number is then
for d numbers. What was left out waits until the client takes part again.
"""

from __future__ import annotations

import math

import numpy as np
from pydantic import Field

from fedrec.compression.base import Compression, Payload, placed, row_numbers, rows_and_values
from fedrec.compression.quantiser import Bits, quantised, restored
from fedrec.config import Config
from fedrec.protocol.sparse_update import Change


class TopKConfig(Config):
    """Settings of the largest rows."""

    share: float = Field(default=0.25, gt=0, le=1)
    """Share of the rows that changed which is sent, in (0, 1], rounded up."""
    bits: Bits = Field(default=8)
    """Bits of a number, by stochastic rounding: 2, 4 or 8; 32: none."""
    error_feedback: bool = True
    """Whether the client adds what was left out to its next update."""


class TopK(Compression):
    """The largest rows, with error feedback."""

    name = "top-k"
    Config = TopKConfig
    paper = "Sparsified SGD with Memory (Stich et al. 2018)"
    config: TopKConfig

    @property
    def keeps_error(self) -> bool:
        """The setting."""
        return self.config.error_feedback

    def encode(
        self, change: Change, random: np.random.Generator, common: np.random.Generator
    ) -> Payload:
        """Row numbers, codes and scales of the largest rows."""
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

    def decode(
        self, payload: Payload, shape: tuple[int, ...], common: np.random.Generator
    ) -> Change:
        """The rows that were sent; all others do not change."""
        rows = payload["rows"]
        values = restored(payload, (len(rows), *shape[1:]), self.config.bits)
        if len(shape) > 1:
            return placed(rows, values, shape)
        whole = np.zeros(max(1, math.prod(shape)))
        whole[rows.astype(np.int64)] = values
        return whole.reshape(shape)
