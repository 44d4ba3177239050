# SPDX-License-Identifier: Apache-2.0
"""Training a block of clients in native code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedrec.cohort.block import Block
from fedrec.cohort.kernel.layout import ParameterLayout, dense_vectors
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
    given = own or {}
    features = block.users if model.user_tables else ()
    _refuse_misfits(model, start, given, block, features)
    shapes = {name: tuple(value.shape) for name, value in start.items()}
    first = torch.zeros(len(block), 1, dtype=torch.int64)  # a table of one row
    users = [*(first for _ in model.user_rows), *features]
    layout = ParameterLayout(model, shapes, tuple(codes.shape[1] for codes in users))
    dense = dense_vectors(layout, start, given, len(block))
    names = (model.item_table, model.item_bias, model.product_table)
    tables = [_rows(start, given, name, block) for name in names]
    losses = np.full(len(block), np.nan)
    train_clients(
        layout.network(),
        (layout.rates(sgd, late=False), layout.rates(sgd, late=True)),
        (block.items.numpy(), block.places.numpy(), block.labels.numpy(), block.sizes.numpy()),
        np.array(block.steps, dtype=np.int64),
        block.last_epoch_begins.numpy(),
        np.array(block.last_epoch, dtype=np.int64),
        np.arange(len(block), dtype=np.int64) * block.touched.shape[1],
        dense,
        tuple(tables),
        _codes(users, len(block)),
        _numbers(guidance, tables[0]),
        losses,
    )
    values = {
        n: torch.from_numpy(_view(dense, place, start[n])) for n, place in layout.places.items()
    }
    values |= {
        name: torch.from_numpy(table)
        for name, table in zip(names, tables, strict=True)
        if name is not None
    }
    return Trained(start, block, values, model.item_tables, torch.ones(len(block)), losses)


def _view(dense: np.ndarray, place: int, value: Tensor) -> np.ndarray:
    """One parameter of all clients, `[C, ...]`, in the memory of their vectors."""
    return dense[:, place : place + value.numel()].reshape(len(dense), *value.shape)


def _rows(
    start: Mapping[str, Tensor], own: Mapping[str, Tensor], name: str | None, block: Block
) -> np.ndarray:
    """The touched rows of an item table, `[C, R, d]`, a copy; without a table `[C, R, 0]`."""
    if name is None:
        return np.empty((*block.touched.shape, 0), dtype=np.float32)
    if name in own:
        return own[name].clone(memory_format=torch.contiguous_format).numpy()
    return start[name][block.touched].numpy()


def _numbers(guidance: Guidance | None, rows: np.ndarray) -> tuple[np.float32, np.ndarray]:
    """The guidance for compiled code, of rows `[C, R, d]`."""
    if guidance is None:
        return np.float32(0), rows[:, :0]
    if guidance.rows.shape != rows.shape:
        raise ValueError(f"Expected guidance {rows.shape}, got {tuple(guidance.rows.shape)}.")
    return np.float32(guidance.share), guidance.rows.contiguous().numpy()


def _codes(users: Sequence[Tensor], clients: int) -> np.ndarray:
    """Codes of all features of the users side by side, `int64 [C, W]`."""
    return torch.cat([*users, torch.empty(clients, 0, dtype=torch.int64)], 1).numpy()


def _refuse_misfits(
    model: KernelModel,
    start: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    block: Block,
    users: Sequence[Tensor],
) -> None:
    """Raise ValueError if native code would read beyond the end of an array."""
    named = {*model.dense, *model.item_tables}
    if named != set(start) or any(value.dtype != torch.float32 for value in start.values()):
        raise ValueError(f"Expected the float32 parameters {sorted(named)}, got {sorted(start)}.")
    for name, codes in zip(model.user_tables, users, strict=True):
        if codes.numel() and int(codes.max()) >= len(start[name]):
            raise ValueError(
                f"Expected codes of {name!r} below {len(start[name])}, got {int(codes.max())}."
            )
    rows = [len(start[name]) for name in model.item_tables if name not in own] + [
        len(f.codes) for f in model.item_features
    ]
    for name in set(model.item_tables) & set(own):
        wanted = (*block.touched.shape, start[name].shape[1])
        if own[name].shape != wanted:
            raise ValueError(
                f"Expected rows of {name!r} of shape {wanted}, got {tuple(own[name].shape)}."
            )
    if (
        block.touched.numel()
        and rows
        and not 0 <= int(block.touched.min()) <= int(block.touched.max()) < min(rows)
    ):
        raise ValueError(f"Expected items below {min(rows)}, got up to {int(block.touched.max())}.")
