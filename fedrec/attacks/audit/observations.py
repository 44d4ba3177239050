# SPDX-License-Identifier: Apache-2.0
"""The observations of an audit: released means along the canaries' directions, participation, and
the secret signs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg import toeplitz

from fedrec.privacy.factorisation.coefficients import inverse

_ROUNDING = 1e-12  # coefficients below this are 0


@dataclass(frozen=True, eq=False)
class Observations:
    """One audited run with T rounds and k canaries.

    Attributes:
        released: `float64 [T, k]`, the released noisy mean update of a round along each canary's
            direction.
        taking_part: `bool [T, k]`, whether the canary was in the cohort; or `float64`, by how many
            times S/M it moves what is observed.
        signs: `int64 [k]`, +1 or -1.
        quiet: `float64 [T, n]`, the released mean along further orthonormal directions in which no
            client moves it; None: only canaries that are absent show the noise.
        shared: whether other clients move the mean along the canaries' directions, too.
        groups: `[k]`, the parameter in which each canary is; None: all in the same.

    Raises:
        ValueError: shapes do not match, there is no canary of either sign, or a number is not
            finite.
    """

    released: np.ndarray
    taking_part: np.ndarray
    signs: np.ndarray
    quiet: np.ndarray | None = None
    shared: bool = False
    groups: np.ndarray | None = None

    def __post_init__(self) -> None:
        if (
            self.released.shape != self.taking_part.shape
            or self.released.shape[1:] != self.signs.shape
        ):
            raise ValueError("Expected [rounds, canaries] twice and [canaries].")
        quiet = self.released[:, :0] if self.quiet is None else self.quiet
        if len(quiet) != len(self.released) or not np.isfinite(quiet).all():
            raise ValueError("Expected finite noise of as many rounds.")
        if not np.isfinite(self.released).all() or set(self.signs.tolist()) != {-1, 1}:
            raise ValueError("Expected finite releases and canaries of both signs.")

    @property
    def rounds(self) -> int:
        """T."""
        return self.released.shape[0]

    @property
    def parameters(self) -> list[str]:
        """The parameters in which canaries are, if there are several."""
        found = [] if self.groups is None else np.unique(self.groups).tolist()
        return found if len(found) > 1 else []

    @property
    def canaries(self) -> int:
        """k."""
        return self.released.shape[1]

    def whitened(self, mixing: Sequence[float]) -> Observations:
        """The same releases with independent noise, if the noise of a round is what `mixing [T]`
        states: earlier rounds are taken back from later ones, and so is what canaries moved."""
        column = inverse(np.array(mixing), self.rounds)
        undo = toeplitz(np.where(np.abs(column) < _ROUNDING, 0.0, column), np.zeros(self.rounds))
        return replace(
            self,
            released=undo @ self.released,
            taking_part=undo @ self.taking_part,
            quiet=None if self.quiet is None else undo @ self.quiet,
        )
