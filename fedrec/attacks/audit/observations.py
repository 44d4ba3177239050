# SPDX-License-Identifier: Apache-2.0
"""The observations of an audit: released means along the canaries' directions, participation, and
the secret signs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Observations:
    """One audited run with T rounds and k canaries.

    Attributes:
        released: `float64 [T, k]`, the released noisy mean update of a round along each canary's
            direction.
        taking_part: `bool [T, k]`, whether the canary was in the cohort.
        signs: `int64 [k]`, +1 or -1.

    Raises:
        ValueError: shapes do not match, there is no canary of either sign, or a number is not
            finite.
    """

    released: np.ndarray
    taking_part: np.ndarray
    signs: np.ndarray

    def __post_init__(self) -> None:
        if (
            self.released.shape != self.taking_part.shape
            or self.released.shape[1:] != self.signs.shape
        ):
            raise ValueError("Expected [rounds, canaries] twice and [canaries].")
        if not np.isfinite(self.released).all() or set(self.signs.tolist()) != {-1, 1}:
            raise ValueError("Expected finite releases and canaries of both signs.")

    @property
    def rounds(self) -> int:
        """T."""
        return self.released.shape[0]

    @property
    def canaries(self) -> int:
        """k."""
        return self.released.shape[1]
