# SPDX-License-Identifier: Apache-2.0
"""Mean of the clients' updates, each scaled down to a bound on its norm (Sun et al. 2019).

The server bounds them here, so that clients which ignore a clip are bounded, too. Where clients
clip, as honest and malicious ones of a simulation do, `[privacy]` with `clip-norm` bounds them as
well, and needs their sum alone.

Where this differs from the paper: without `norm`, the bound is the median norm of the round's
updates; there it is a fixed number.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from pydantic import Field

from strategies._server_rate import ServerRate
from strategies.robust._rule import ClientChanges, RobustRule


class NormBoundConfig(ServerRate):
    """Settings of the bound on norms."""

    norm: float | None = Field(default=None, gt=0)
    """Bound on the L2 norm of a whole update; default: the median norm of the round's updates."""


class NormBound(RobustRule):
    """Moves the shared parameters by the mean of bounded updates."""

    name = "norm-bound"
    Config = NormBoundConfig
    paper = "Sun, Kairouz, Suresh and McMahan 2019"
    config: NormBoundConfig

    def combined(
        self, changes: Mapping[str, ClientChanges], round_number: int
    ) -> dict[str, np.ndarray]:
        """The mean of the bounded updates, `float64 [R, ...]` by parameter."""
        squares = sum(np.square(own.flat).sum(axis=1) for own in changes.values())
        norms = np.sqrt(squares)
        bound = float(np.median(norms)) if self.config.norm is None else self.config.norm
        factors = np.minimum(1.0, bound / np.maximum(norms, 1e-300)) / len(norms)
        return {name: np.tensordot(factors, own.values, axes=1) for name, own in changes.items()}
