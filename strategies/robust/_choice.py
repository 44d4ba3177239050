# SPDX-License-Identifier: Apache-2.0
"""How Krum, Multi-Krum and Bulyan choose clients: by the distances to their neighbours."""

from __future__ import annotations

import math

import numpy as np
from pydantic import Field

from strategies._server_rate import ServerRate


class ChoiceConfig(ServerRate):
    """Settings of rules that choose clients."""

    malicious: float = Field(default=0.1, ge=0, lt=0.5)
    """Share of malicious clients in a cohort that the rule is to withstand."""

    def expected(self, clients: int) -> int:
        """Number of malicious clients among so many, rounded up."""
        return math.ceil(self.malicious * clients - 1e-9)


def nearest(distances: np.ndarray, malicious: int, count: int) -> np.ndarray:
    """The clients that are closest to their neighbours (Blanchard et al. 2017).

    Args:
        distances: squared distances of the updates, `float64 [n, n]`.
        malicious: number f of malicious clients; a client's score is the sum over its n - f - 2
            nearest neighbours, at least one.
        count: number of clients to choose.

    Returns:
        `int64 [count]`, the one with the smallest score first; equal scores in the order of the
        clients.
    """
    neighbours = max(1, len(distances) - malicious - 2)
    others = np.where(np.eye(len(distances), dtype=bool), np.inf, distances)
    scores = np.sort(others, axis=1)[:, :neighbours].sum(axis=1)
    return np.argsort(scores, kind="stable")[:count]
