# SPDX-License-Identifier: Apache-2.0
"""Rows of tables by their places: taken, and added to.

PyTorch has slower operations for the same: on a processor `table[places]` takes five times as long
as `index_select`, and `index_add_` with a factor ten times as long as a loop in compiled code.
"""

import numpy as np
import torch
from torch import Tensor


def rows_at(table: Tensor, places: Tensor) -> Tensor:
    """Rows of a table `[R, ...]` at places `int64 [...]`, `[..., ...]`, a copy."""
    return table.index_select(0, places.flatten()).view(*places.shape, *table.shape[1:])


def add_to_rows(table: Tensor, places: Tensor, moves: Tensor, factor: float) -> None:
    """Add factor times moves to the rows of a table, in place and in their order; without autograd.

    Args:
        table: `[R, d]`, contiguous.
        places: `int64 [N]`, in `[0, R)`; may repeat.
        moves: `[N, d]`.
        factor: of all moves.
    """
    if not table.is_cpu or table.dtype != torch.float32 or moves.dtype != torch.float32:
        table.index_add_(0, places, moves, alpha=factor)
        return
    from fedrec.nn.update_sums import (
        add_to_rows as compiled,  # imports Numba, which is slow and not always needed
    )

    given = (places.contiguous(), moves.detach().contiguous())
    compiled(table.numpy(), *(part.numpy() for part in given), np.float32(factor))
