# SPDX-License-Identifier: Apache-2.0
"""Operations on ragged histories: restriction to a part of the catalogue, sums over a user's
items."""

from __future__ import annotations

import numpy as np
import torch

from fedrec.baselines.base import Histories


def among(histories: Histories, items: np.ndarray) -> Histories:
    """The users' items that are among `items`, numbered by their place there.

    Args:
        histories: of any users.
        items: `int64 [items]`, distinct.
    """
    place = np.full(histories.num_items, -1)
    place[items] = np.arange(len(items))
    new = place[histories.items]
    kept = new >= 0
    counts = np.bincount(histories.rows()[kept], minlength=histories.num_users)
    return Histories(
        len(items), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), new[kept]
    )


def sums(histories: Histories, rows: torch.Tensor) -> torch.Tensor:
    """Sum of the rows of each user's items, `[users, width]`; an item that a user has twice counts
    twice.

    Args:
        histories: of any users.
        rows: `float [items, width]`, one row per item.
    """
    items, offsets = (
        torch.from_numpy(part).to(rows.device) for part in (histories.items, histories.offsets[:-1])
    )
    return torch.nn.functional.embedding_bag(items, rows, offsets, mode="sum")
