# SPDX-License-Identifier: Apache-2.0
"""Rows of users, in blocks, and their clipping factors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedrec.baselines.base import Histories
from fedrec.privacy.clipping import Clip


def binary_rows(liked: Histories, users_at_once: int, device: torch.device) -> Iterator[Tensor]:
    """1 for each liked item, `float64 [users, items]` on a device; users in their order.

    Args:
        liked: distinct items of each user.
        users_at_once: users per block; the last block may have fewer.
        device: device of the rows.
    """
    for start in range(0, liked.num_users, users_at_once):
        stop = min(start + users_at_once, liked.num_users)
        yield liked.block(start, stop).matrix().to(device).double()


def clip_factors(clip: Clip, norms: Tensor) -> Tensor:
    """Clipping factors of contributions with the given norms `[users]`, `float64 [users]` on their
    device."""
    return torch.from_numpy(clip.factors(norms.cpu().numpy())).to(norms.device)
