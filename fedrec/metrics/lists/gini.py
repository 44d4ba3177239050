# SPDX-License-Identifier: Apache-2.0
"""Concentration of the lists of all users on few items."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedrec.metrics.lists._counts import CountMetric


class Gini(CountMetric):
    """Gini coefficient of how often each item is in a list: 0 if all are equally often,
    1 - 1/items if all lists hold the same single item."""

    name = "gini"
    lower_is_better = True

    def value(self, sums: Mapping[str, np.ndarray]) -> float:
        """In [0, 1]."""
        return gini(sums["lists"])


def gini(counts: np.ndarray) -> float:
    """Gini coefficient of amounts >= 0, `[n]`; NaN where all are zero.

    The mean difference of two of them, over twice their mean.
    """
    ascending = np.sort(counts.astype(np.float64))
    number = len(ascending)
    total = ascending.sum()
    places = np.arange(1, number + 1)
    if not total:
        return float("nan")
    return float((2 * places - number - 1) @ ascending / (number * total))
