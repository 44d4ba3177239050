# SPDX-License-Identifier: Apache-2.0
"""Metrics of a user's whole history, in experiments with `evaluation.protocol = "reconstruction"`.

The catalogue is ranked with nothing masked. This does not measure recommendation, because most
relevant items are part of the model's input. It exists because it alone explains how Fang et al.
(DP-VAE, table 8) can print a Recall@20 above their Recall@50: with `hits / min(|Q|, R)` (their
equation 22) that needs most users to have more than 20 items in Q. The name differs, so that its
figures cannot be mistaken for those of held-out items.
"""

from __future__ import annotations

from torch import Tensor

from fedrec.metrics.base import UserMetric
from fedrec.metrics.block import RankedBlock


class ReconstructionRecall(UserMetric):
    """Relevant items among the first k, over the smaller of their number and k."""

    name = "reconstruction-recall"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`."""
        hits = block.hits[:, :k]
        return hits.sum(1) / block.number.clamp(min=1, max=hits.shape[1]) + block.nothing


class ReconstructionNdcg(UserMetric):
    """DCG of the first k places over that of the best possible list of that length."""

    name = "reconstruction-ndcg"

    def per_user(self, block: RankedBlock, k: int) -> Tensor:
        """`float64 [users]`."""
        hits = block.hits[:, :k]
        gains = block.gains(hits.shape[1])
        best = block.number.clamp(min=1, max=len(gains))
        return (hits * gains).cumsum(1)[:, -1] / gains.cumsum(0)[best - 1] + block.nothing
