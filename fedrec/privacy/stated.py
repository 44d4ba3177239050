# SPDX-License-Identifier: Apache-2.0
"""Systems whose paper states an epsilon: the stated epsilon, and the exact cost of the noise
schedule.

Pure differential privacy of subsampled releases: a release that is e0-DP on a sample of rate g is
ln(1 + g (exp(e0) - 1))-DP on the whole (Balle, Barthe and Gaboardi 2018). That is g e0 only where
e0 is far below 1, and the costs of several releases add up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Stated:
    """Stated and exact privacy of a system.

    Attributes:
        nominal: epsilon as the paper states it.
        exact: epsilon that the schedule costs if everything else that the paper assumes were true;
            infinite if a release or the initialisation is without noise.
        unit: the protected unit, such as `one rating's value`.
        caveats: limits of both numbers, as sentences.
    """

    nominal: float
    exact: float
    unit: str
    caveats: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """A description in sentences."""
        return [
            (
                f"epsilon {self.nominal:.4g} as stated, for {self.unit}; the exact total of the"
                f" schedule is {self.exact:.4g}."
            ),
            *self.caveats,
        ]


def amplified(epsilon: float, rate: float) -> float:
    """Epsilon on the whole of an epsilon-DP release of a sample.

    Args:
        epsilon: on the sample, >= 0.
        rate: share of the rows that are sampled, in (0, 1].
    """
    if rate == 1:
        return epsilon
    return float(np.logaddexp(math.log1p(-rate), math.log(rate) + epsilon))


def schedule_total(nominal: float, steps: int, rate: float) -> float:
    """Pure epsilon of `steps` releases, each `nominal / (steps * rate)`-DP on a sample (PNBM,
    theorem 1)."""
    return steps * amplified(nominal / (steps * rate), rate)
