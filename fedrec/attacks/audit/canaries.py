# SPDX-License-Identifier: Apache-2.0
"""Canaries: their ids, their secret signs, and what the clients around them send."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from fedrec.config import Config
from fedrec.rng import stream

Kind = Literal["signed", "rows", "products"]
"""What clients of a phase send: updates of any sign; vectors without a negative number that have
one entry per item; or such a vector's outer product with itself."""


class CanaryPlan(Config):
    """Ids and uploads of the canaries of an audit."""

    first: int = Field(ge=0)
    """Client id of the first canary; the others follow."""
    count: int = Field(ge=4)
    """Number of canaries, k."""
    magnitude: float = Field(gt=0)
    """L2 norm of a canary's upload; above the clip norm S, so that clipping is tested, too."""
    examples: int = Field(default=1000, ge=1)
    """Number of examples that a canary reports; tests that no weight depends on it."""
    seed: int = Field(default=0, ge=0)
    """Seed of the secret signs, stream `"canary-signs"`."""
    parameters: tuple[str, ...] = ("*",)
    """Patterns of the parameters that are trained."""
    kind: Kind = "signed"
    """What the other clients send."""

    def signs(self) -> np.ndarray:
        """`int64 [k]`: secret signs b_j, independent and fair; drawn again in the rare case that
        all are equal."""
        for attempt in range(64):
            signs = 2 * stream(self.seed, "canary-signs", attempt).integers(0, 2, self.count) - 1
            if min((signs > 0).sum(), (signs < 0).sum()) >= 2:
                return signs
        raise ValueError("Expected a random generator that gives both signs.")

    def is_canary(self, clients: np.ndarray) -> np.ndarray:
        """`bool [n]`: which of some clients are canaries."""
        return (clients >= self.first) & (clients < self.first + self.count)
