# SPDX-License-Identifier: Apache-2.0
"""Training a block of clients in native code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedrec.cohort.block import Block
from fedrec.cohort.kernel.block_arrays import BlockArrays
from fedrec.cohort.kernel.steps import train_clients
from fedrec.cohort.results import Trained
from fedrec.cohort.sgd import SgdSettings
from fedrec.nn.declaration import KernelModel


@dataclass(frozen=True, eq=False)
class Guidance:
    """What each step moves the rows of an item table towards, beside its gradient (GPFedRec).

    Attributes:
        share: of the way, in [0, 1); all touched rows go it in every step.
        rows: where to, `[C, R, d]`.
    """

    share: float
    rows: Tensor


def train_block(
    model: KernelModel,
    start: Mapping[str, Tensor],
    block: Block,
    sgd: SgdSettings,
    own: Mapping[str, Tensor] | None = None,
    guidance: Guidance | None = None,
) -> Trained:
    """Train every client of a block on its batches.

    Args:
        model: the model, as it declares itself.
        start: the parameters that are trained, without cohort dimension; unchanged.
        block: the clients.
        sgd: settings of the gradient steps, plain ones.
        own: initial values that differ between clients, `[C, ...]` each, unchanged; of an item
            table the block's touched rows.
        guidance: what the rows of the item table are moved towards in each step.

    Raises:
        ValueError: parameters, codes and items do not match.
    """
    arrays = BlockArrays.of(model, start, block, own)
    layout = arrays.layout
    losses = np.full(len(block), np.nan)
    train_clients(
        layout.network(),
        (layout.rates(sgd, late=False), layout.rates(sgd, late=True)),
        arrays.examples,
        arrays.steps,
        block.last_epoch_begins.numpy(),
        np.array(block.last_epoch, dtype=np.int64),
        arrays.first_rows,
        arrays.dense,
        arrays.tables,
        arrays.codes,
        _numbers(guidance, arrays.tables[0]),
        losses,
    )
    return arrays.trained(losses)


def _numbers(guidance: Guidance | None, rows: np.ndarray) -> tuple[np.float32, np.ndarray]:
    """The guidance for compiled code, of rows `[C, R, d]`."""
    if guidance is None:
        return np.float32(0), rows[:, :0]
    if guidance.rows.shape != rows.shape:
        raise ValueError(f"Expected guidance {rows.shape}, got {tuple(guidance.rows.shape)}.")
    return np.float32(guidance.share), guidance.rows.contiguous().numpy()
