# SPDX-License-Identifier: Apache-2.0
"""Item-based nearest neighbours: an item is scored by its cosine similarity to the items that a
user likes."""

from __future__ import annotations

import torch
from pydantic import Field

from fedrec.baselines.base import Baseline, Histories
from fedrec.config import Config


class ExampleConfig(Config):
    """Settings; unknown keys are refused, and every field says what it means."""

    neighbours: int = Field(default=50, ge=1)
    """Similar items that are kept for each item."""


class Example(Baseline):
    """Sees the data of all training users; stands beside the federated model in every table."""

    Config = ExampleConfig
    config: ExampleConfig

    def fit(self, histories: Histories) -> None:
        """Similarities `[items, items]`, all but the largest of each row set to zero."""
        liked = histories.matrix()
        both = liked.T @ liked
        lengths = both.diagonal().sqrt().clamp(min=1e-9)
        similar = both / lengths[:, None] / lengths[None, :]
        similar.fill_diagonal_(0.0)
        kept = torch.topk(similar, min(self.config.neighbours, len(similar))).indices
        self._similar = torch.zeros_like(similar).scatter_(1, kept, similar.gather(1, kept))

    def scores(self, histories: Histories) -> torch.Tensor:
        """`float32 [users, items]` for users given by what they like; known items are left out by
        the protocol."""
        return histories.matrix() @ self._similar
