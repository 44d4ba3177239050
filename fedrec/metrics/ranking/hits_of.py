# SPDX-License-Identifier: Apache-2.0
"""Hit rate among sampled items (NCF), in expectation over the sample."""

from __future__ import annotations

from torch import Tensor

from fedrec.metrics.block import RankedBlock
from fedrec.metrics.ranking._sampled import SampledMetric


class HitsOf(SampledMetric):
    """Share of a user's held-out positives that are among the first k of sampled lists."""

    name = "hits-of"

    def gain(self, block: RankedBlock, chances: Tensor) -> Tensor:
        """One for each of the first k ranks."""
        return chances.sum(1)
