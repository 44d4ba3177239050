# SPDX-License-Identifier: Apache-2.0
"""NDCG among sampled items (NCF), in expectation over the sample."""

from __future__ import annotations

from torch import Tensor

from fedrec.metrics.block import RankedBlock
from fedrec.metrics.ranking._sampled import SampledMetric


class NdcgOf(SampledMetric):
    """Mean of 1 / log2(rank + 1) in sampled lists, 0 beyond k."""

    name = "ndcg-of"

    def gain(self, block: RankedBlock, chances: Tensor) -> Tensor:
        """1 / log2(rank + 1) for each of the first k ranks."""
        return chances @ block.gains(chances.shape[1])
