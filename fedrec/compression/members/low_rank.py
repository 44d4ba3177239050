# SPDX-License-Identifier: Apache-2.0
"""Updates of item tables in a random subspace of the embedding, another one in each round, which is
the same for all clients and not sent (Nguyen et al. 2024, "Towards Efficient Communication and
Secure Federated Recommendation System via Low-rank Training", CoLR).

Where this differs from the paper: its clients train in the subspace; here any step trains as usual,
and the update is projected, which is the same for one gradient step. Parameters that are no tables,
or narrower than the rank, are sent as they are, in as many bits.
"""

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


class LowRankConfig(Config):
    """Settings of low-rank updates."""

    rank: int = Field(default=4, ge=1)
    """Dimension of the subspace: r of d numbers of a row are sent."""
    bits: Bits = Field(default=32)
    """Bits of a number, by stochastic rounding: 2, 4 or 8; 32: none."""


class LowRank(Compression):
    """Projections on a common random subspace; of sums, they are the sums of projections."""

    Config = LowRankConfig
    paper = "CoLR: communication and secure federated recommendation by low rank (Nguyen 2024)"
    config: LowRankConfig

    def encode(
        self, change: Change, random: np.random.Generator, common: np.random.Generator
    ) -> Payload:
        """Row numbers where rows are named, and the coordinates in the subspace."""
        rows, values = rows_and_values(change)
        if not self._narrow(change.shape):
            values = values @ self._basis(change.shape[1], common)
        return with_rows(rows, quantised(values, self.config.bits, random), change.shape)

    def decode(
        self, payload: Payload, shape: tuple[int, ...], common: np.random.Generator
    ) -> Change:
        """The projected update."""
        own = values_shape(payload, shape)
        if self._narrow(shape):
            values = restored(payload, own, self.config.bits)
        else:
            inside = restored(payload, (own[0], self.config.rank), self.config.bits)
            values = inside @ self._basis(shape[1], common).T
        return placed(payload.get("rows"), values, shape)

    def _narrow(self, shape: tuple[int, ...]) -> bool:
        return len(shape) != 2 or shape[1] <= self.config.rank

    def _basis(self, width: int, common: np.random.Generator) -> np.ndarray:
        """Orthonormal columns, `float64 [width, rank]`, uniformly distributed."""
        return np.linalg.qr(common.standard_normal((width, self.config.rank)))[0]
