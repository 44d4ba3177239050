# SPDX-License-Identifier: Apache-2.0
"""BPR-MF embeddings of the training rows, by which items are alike (UPC-SDG, experiments)."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.baselines.base import Histories
from fedrec.baselines.factorisation.bprmf import Bprmf, BprmfConfig
from fedrec.data.interactions import Interactions


def trained_embeddings(settings: BprmfConfig, rows: Interactions) -> tuple[Tensor, Tensor]:
    """Embeddings of users and of items, `float32 [users, d]` and `[items, d]`, from all rows.

    Raises:
        DataError: no user has a positive and a negative item.
    """
    trained = Bprmf(settings)
    trained.fit(Histories(rows.num_items, rows.user_offsets, rows.items[rows.user_order]))
    return torch.from_numpy(trained.own), torch.from_numpy(trained.items)
