# SPDX-License-Identifier: Apache-2.0
"""Training a block of clients in native code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedrec.cohort.block import Block
from fedrec.cohort.kernel.layout import ParameterLayout, dense_vectors
from fedrec.cohort.kernel.steps import train_clients
from fedrec.cohort.results import Trained
from fedrec.cohort.sgd import SgdSettings
from fedrec.nn.declaration import KernelModel


def train_block(
    model: KernelModel,
    start: Mapping[str, Tensor],
    block: Block,
    sgd: SgdSettings,
    own: Mapping[str, Tensor] | None = None,
) -> Trained:
    """Train every client of a block on its batches.

    Args:
        model: the model, as it declares itself.
        start: the parameters that are trained, without cohort dimension; unchanged.
        block: the clients.
        sgd: settings of the gradient steps, plain ones.
        own: initial values that differ between clients, `[C, ...]` each, unchanged; no item tables.

    Raises:
        ValueError: parameters, codes and items do not match.
    """
    users = block.users if model.user_tables else ()
    _refuse_misfits(model, start, block, users)
    shapes = {name: tuple(value.shape) for name, value in start.items()}
    layout = ParameterLayout(model, shapes, tuple(codes.shape[1] for codes in users))
    dense = dense_vectors(layout, start, own or {}, len(block))
    rows, biases = (_rows(start, name, block) for name in (model.item_table, model.item_bias))
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
        rows,
        biases,
        _codes(users, len(block)),
        losses,
    )
    values = {
        n: torch.from_numpy(_view(dense, place, start[n])) for n, place in layout.places.items()
    }
    tables = {model.item_table: rows, model.item_bias: biases}
    values |= {name: torch.from_numpy(tables[name]) for name in model.item_tables}
    return Trained(start, block, values, model.item_tables, torch.ones(len(block)), losses)


def _view(dense: np.ndarray, place: int, value: Tensor) -> np.ndarray:
    """One parameter of all clients, `[C, ...]`, in the memory of their vectors."""
    return dense[:, place : place + value.numel()].reshape(len(dense), *value.shape)


def _rows(start: Mapping[str, Tensor], name: str | None, block: Block) -> np.ndarray:
    """The touched rows of an item table, `[C, R, d]`; without a table `[C, R, 0]`."""
    if name is None:
        return np.empty((*block.touched.shape, 0), dtype=np.float32)
    return start[name][block.touched].numpy()


def _codes(users: Sequence[Tensor], clients: int) -> np.ndarray:
    """Codes of all features of the users side by side, `int64 [C, W]`."""
    return torch.cat([*users, torch.empty(clients, 0, dtype=torch.int64)], 1).numpy()


def _refuse_misfits(
    model: KernelModel, start: Mapping[str, Tensor], block: Block, users: Sequence[Tensor]
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
    rows = [len(start[name]) for name in model.item_tables] + [
        len(f.codes) for f in model.item_features
    ]
    if (
        block.touched.numel()
        and rows
        and not 0 <= int(block.touched.min()) <= int(block.touched.max()) < min(rows)
    ):
        raise ValueError(f"Expected items below {min(rows)}, got up to {int(block.touched.max())}.")
