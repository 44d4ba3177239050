# SPDX-License-Identifier: Apache-2.0
"""Updates of item tables in a subspace of the embedding.

The `common` one is random, another in each round, the same for all clients and not sent (Nguyen et
al. 2024, "Towards Efficient Communication and Secure Federated Recommendation System via Low-rank
Training", CoLR). A client's `own` one is spanned by the first right singular vectors of its update,
which are sent: no other of that rank is nearer to the update (Eckart and Young 1936; Vogels,
Karimireddy and Jaggi 2019, "PowerSGD", approximate it by power iteration). In matrix factorisation
an item's factors move along the factors of the user, so that one dimension has nearly all.

Where this differs from CoLR: its clients train in the subspace; here any step trains as usual, and
the update is projected, which is the same for one gradient step. Parameters that are no tables, or
not wider than the rank, are sent as they are, in as many bits.
"""

from __future__ import annotations

from typing import Literal

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
    subspace: Literal["common", "own"] = "common"
    """`common`: a random one of the round, of all clients; `own`: the best one for each client's
    update, for which 2 d r bytes are sent."""


class LowRank(Compression):
    """Projections on a subspace; on a common one, sums of them are the projections of sums."""

    name = "low-rank"
    Config = LowRankConfig
    paper = "CoLR: communication and secure federated recommendation by low rank (Nguyen 2024)"
    config: LowRankConfig

    def encode(
        self, change: Change, random: np.random.Generator, common: np.random.Generator
    ) -> Payload:
        """Row numbers where rows are named, the coordinates in the subspace, and its basis if it is
        the client's own."""
        rows, values = rows_and_values(change)
        basis = {}
        if not self._narrow(change.shape):
            basis = {} if self._common else {"basis": self._best(values)}
            values = values @ self._basis_of(basis, change.shape[1], common)
        sent = quantised(self._lines(values), self.config.bits, random)
        return with_rows(rows, {**sent, **basis}, change.shape)

    def decode(
        self, payload: Payload, shape: tuple[int, ...], common: np.random.Generator
    ) -> Change:
        """The projected update."""
        own = values_shape(payload, shape)
        narrow = self._narrow(shape)
        inside = own if narrow else (own[0], self.config.rank)
        lines = inside if self._common else inside[::-1]
        values = self._lines(restored(payload, lines, self.config.bits))
        if not narrow:
            values = values @ self._basis_of(payload, shape[1], common).T
        return placed(payload.get("rows"), values, shape)

    @property
    def _common(self) -> bool:
        return self.config.subspace == "common"

    def _narrow(self, shape: tuple[int, ...]) -> bool:
        return len(shape) != 2 or shape[1] <= self.config.rank

    def _lines(self, values: np.ndarray) -> np.ndarray:
        """The values by what has one scale: a row, or a coordinate of all rows in a subspace of the
        client's own, whose coordinates differ in size."""
        return values if self._common else values.T

    def _basis_of(self, payload: Payload, width: int, common: np.random.Generator) -> np.ndarray:
        """The common basis, or that of the payload, `float64 [width, rank]`."""
        if self._common:
            return self._basis(width, common)
        return payload["basis"].astype(np.float64).reshape(width, self.config.rank)

    def _basis(self, width: int, common: np.random.Generator) -> np.ndarray:
        """Orthonormal columns, `float64 [width, rank]`, uniformly distributed."""
        return np.linalg.qr(common.standard_normal((width, self.config.rank)))[0]

    def _best(self, values: np.ndarray) -> np.ndarray:
        """The first right singular vectors of values `[R, width]`, `float16 [width, rank]`."""
        vectors = np.linalg.eigh(values.T @ values)[1]
        return vectors[:, : -self.config.rank - 1 : -1].astype(np.float16)
