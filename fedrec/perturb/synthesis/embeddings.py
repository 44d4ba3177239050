# SPDX-License-Identifier: Apache-2.0
"""BPR-MF embeddings of the training rows, by which items are alike (UPC-SDG, experiments)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedrec.baselines.base import Histories
from fedrec.baselines.factorisation.bprmf import Bprmf, BprmfConfig
from fedrec.data.interactions import Interactions
from fedrec.runs.kept import kept_arrays


def trained_embeddings(settings: BprmfConfig, rows: Interactions) -> tuple[Tensor, Tensor]:
    """Embeddings of users and of items, `float32 [users, d]` and `[items, d]`, from all rows; kept
    for later runs.

    Raises:
        DataError: no user has a positive and a negative item.
    """

    def train() -> dict[str, np.ndarray]:
        trained = Bprmf(settings)
        trained.fit(Histories(rows.num_items, rows.user_offsets, rows.items[rows.user_order]))
        return {"users": trained.own, "items": trained.items}

    found = kept_arrays(train, "bprmf embeddings", settings, rows)
    return torch.from_numpy(found["users"]), torch.from_numpy(found["items"])
