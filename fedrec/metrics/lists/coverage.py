# SPDX-License-Identifier: Apache-2.0
"""Coverage of the catalogue by the lists of all users."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedrec.metrics.lists._counts import CountMetric


class Coverage(CountMetric):
    """Share of the catalogue that is in at least one list."""

    name = "coverage"

    def value(self, sums: Mapping[str, np.ndarray]) -> float:
        """In [0, 1]."""
        return float((sums["lists"] > 0).mean())
