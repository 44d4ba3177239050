# SPDX-License-Identifier: Apache-2.0
"""Which data sets count as neighbours, and what that makes of a clip norm and a noise scale.

`replace-one`: all data of one client are exchanged for another client's; the number of clients stays. One client's
update moves by up to 2S, the diameter of the ball that updates are clipped to (PrivRec definition 1, theorem 1).
`add-remove`: one client more or less; the sum moves by up to S.

The papers write z for both noise/2S and noise/S. The factor of two is a factor of four in Rényi divergence, so both are
derived in one place, `Multipliers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Adjacency = Literal["replace-one", "add-remove"]


def sensitivity(clip_norm: float, adjacency: Adjacency) -> float:
    """Largest change of the sum of clipped updates between neighbours, in the norm that the clip uses."""
    return 2.0 * clip_norm if adjacency == "replace-one" else clip_norm


@dataclass(frozen=True)
class Multipliers:
    """One noise, told in both conventions.

    Attributes:
        replace_one: noise scale of the sum / 2S.
        add_remove: noise scale of the sum / S.
    """

    replace_one: float
    add_remove: float

    @classmethod
    def of(cls, noise_scale: float, clip_norm: float) -> Multipliers:
        """Both multipliers of a noise scale (standard deviation, or Laplace scale) of the sum of clipped updates."""
        return cls(
            replace_one=noise_scale / sensitivity(clip_norm, "replace-one"),
            add_remove=noise_scale / sensitivity(clip_norm, "add-remove"),
        )

    def under(self, adjacency: Adjacency) -> float:
        """The multiplier that counts under an adjacency."""
        return self.replace_one if adjacency == "replace-one" else self.add_remove
