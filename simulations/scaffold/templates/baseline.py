# SPDX-License-Identifier: Apache-2.0
"""Item-based nearest neighbours by cosine similarity."""

from __future__ import annotations

import torch
from pydantic import Field

from fedrec.baselines.base import Baseline, Histories
from fedrec.config import Config


class ExampleConfig(Config):
    """Settings; unknown keys are rejected, and every field has a description."""

    neighbours: int = Field(default=50, ge=1)
    """Number of neighbours of each item."""


class Example(Baseline):
    """Scores items by their similarity to the items that a user likes."""

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
        """`float32 [users, items]` for users given by their liked items; the protocol excludes
        known items."""
        return histories.matrix() @ self._similar
