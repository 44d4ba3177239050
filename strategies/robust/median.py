# SPDX-License-Identifier: Apache-2.0
"""Coordinate-wise median of the clients' updates (Yin et al. 2018, option I).

Where this differs from the paper: `over = "touching"` takes the median of a row of an item table
over the clients that changed it.
"""

from __future__ import annotations

import numpy as np

from strategies.robust._coordinates import CoordinateRule


class Median(CoordinateRule):
    """Moves each coordinate by the median of the clients' updates."""

    name = "median"
    paper = "Yin, Chen, Ramchandran and Bartlett 2018, option I"

    def of_sorted(self, values: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """The middle values, `[R, ...]`, of `values [clients, R, ...]`."""
        places = np.stack([(counts - 1) // 2, counts // 2])
        return np.take_along_axis(values, places, axis=0).mean(axis=0)
