# SPDX-License-Identifier: Apache-2.0
"""A block of clients as the arrays that compiled code trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedrec.cohort.block import Block
from fedrec.cohort.kernel.layout import ParameterLayout, dense_vectors
from fedrec.cohort.results import Trained
from fedrec.nn.declaration import KernelModel


@dataclass(frozen=True, eq=False)
class BlockArrays:
    """The parameters of C clients and what compiled code needs to know of their block.

    Attributes:
        model: the model, as it declares itself.
        start: the parameters that are trained, without cohort dimension; unchanged.
        block: the clients.
        layout: places of the dense parameters.
        dense: `float32 [C, P]`.
        tables: the items' rows `float32 [C, R, d]`, biases `[C, R, 1]` or `[C, R, 0]`, and rows in
            the product `[C, R, k]`, likewise.
        codes: `int64 [C, W]`, of all features of the users side by side.
        first_rows: `int64 [C]`, the place of each client's first row.
    """

    model: KernelModel
    start: Mapping[str, Tensor]
    block: Block
    layout: ParameterLayout
    dense: np.ndarray
    tables: tuple[np.ndarray, np.ndarray, np.ndarray]
    codes: np.ndarray
    first_rows: np.ndarray

    @classmethod
    def of(
        cls,
        model: KernelModel,
        start: Mapping[str, Tensor],
        block: Block,
        own: Mapping[str, Tensor] | None = None,
    ) -> BlockArrays:
        """What the clients start from, copied.

        Args:
            model: the model, as it declares itself.
            start: the parameters that are trained, without cohort dimension.
            block: the clients.
            own: initial values that differ between clients, `[C, ...]` each; of an item table the
                block's touched rows.

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
        rows, biases, factors = (_rows(start, given, name, block) for name in _tables(model))
        first_rows = np.arange(len(block), dtype=np.int64) * block.touched.shape[1]
        codes = _codes(users, len(block))
        tables = rows, biases, factors
        return cls(model, start, block, layout, dense, tables, codes, first_rows)

    @property
    def examples(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Items, places and labels, `[S, C, B]` each, and the number of examples `int64 [S, C]`."""
        block = self.block
        return block.items.numpy(), block.places.numpy(), block.labels.numpy(), block.sizes.numpy()

    @property
    def steps(self) -> np.ndarray:
        """Number of steps of each client, `int64 [C]`."""
        return np.array(self.block.steps, dtype=np.int64)

    def trained(self, losses: np.ndarray) -> Trained:
        """The block with the present values, in the same memory, and `losses` `float64 [C]`."""
        values = {
            name: torch.from_numpy(_view(self.dense, place, self.start[name]))
            for name, place in self.layout.places.items()
        }
        values |= {
            name: torch.from_numpy(table)
            for name, table in zip(_tables(self.model), self.tables, strict=True)
            if name is not None
        }
        still = torch.ones(len(self.block))
        return Trained(self.start, self.block, values, self.model.item_tables, still, losses)


def _tables(model: KernelModel) -> tuple[str | None, str | None, str | None]:
    return model.item_table, model.item_bias, model.product_table


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
