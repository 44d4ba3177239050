# SPDX-License-Identifier: Apache-2.0
"""A block of clients and a declared model as arrays of compiled code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedrec.kernel.products import CODES
from fedrec.kernel.rows import whole_lines
from fedrec.nn.layers import KernelModel
from fedrec.training.block import Block
from fedrec.training.network import Network, Rates
from fedrec.training.results import Trained
from fedrec.training.sgd import SgdSettings

# Memory layout of the parameters of a declared model, and its description for compiled code.


@dataclass(frozen=True, eq=False)
class ParameterLayout:
    """Places of the dense parameters in one vector per client.

    Attributes:
        model: the declaration.
        shapes: shape of every parameter of the model.
        user_widths: number of codes of each row of the user's own (1) and feature of the users.
        places: place of each dense parameter in the vector.
        size: length of the vector.
    """

    model: KernelModel
    shapes: Mapping[str, tuple[int, ...]]
    user_widths: tuple[int, ...]
    places: dict[str, int] = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self._refuse_misfits()
        lines = whole_lines.py_func  # compiled for one call, it would take 0.1 s in each process
        sizes = [lines(int(np.prod(self.shapes[name]))) for name in self.model.dense]
        ends = np.cumsum([0, *sizes]).tolist()
        object.__setattr__(self, "places", dict(zip(self.model.dense, ends, strict=False)))
        object.__setattr__(self, "size", ends[-1])

    @property
    def width(self) -> int:
        """Width of the rows of the item table; 0 without one."""
        return self.shapes[self.model.item_table][1] if self.model.item_table is not None else 0

    def network(self) -> Network:
        """The model as a record of numbers."""
        start = 0
        users = []
        features = []
        ends = np.cumsum([0, *self.user_widths]).tolist()
        for place, name in enumerate((*self.model.user_rows, *self.model.user_tables)):
            width = self.shapes[name][-1]
            users.append([self.places[name], width, start, ends[place], ends[place + 1]])
            start += width
        item_start = start
        start = start + self.width
        column = 0
        for number, feature in enumerate(self.model.item_features):
            categories, width = self.shapes[feature.table]
            columns = column, column + feature.codes.shape[1]
            features.append(
                [self.places[feature.table], width, start, *columns, categories, number]
            )
            start = start + width
            column = columns[1]
        return Network(
            _table(users, 5),
            _table(features, 7),
            *self.model.item_codes,
            item_start,
            _table(self._layers(), 4),
            np.array([self.places[name] for name in self.model.offsets], dtype=np.int64),
            np.array(self._product(), dtype=np.int64),
            CODES[self.model.activation],
            self.model.loss == "logistic",
        )

    def rates(self, sgd: SgdSettings, late: bool) -> Rates:
        """Step sizes, before late parameters move or from then on."""

        def rate(name: str | None) -> float:
            return 0.0 if name is None or (name in sgd.late and not late) else sgd.rate(name)

        layers = self.model.layers
        features = self.model.item_features
        product = self.model.product
        return Rates(
            _rates(rate(name) for name in (*self.model.user_rows, *self.model.user_tables)),
            _rates(rate(feature.table) for feature in features),
            _rates(rate(layer.weight) for layer in layers),
            _rates(rate(layer.bias) for layer in layers),
            _rates(rate(name) for name in self.model.offsets),
            np.float32(rate(self.model.item_table)),
            np.float32(rate(self.model.item_bias)),
            np.float32(rate(product and product.user)),
            np.float32(rate(product and product.item_table)),
        )

    def _refuse_misfits(self) -> None:
        """Raise ValueError if shapes do not match, because native code checks nothing."""
        tables = [*self.model.user_tables, *(feature.table for feature in self.model.item_features)]
        inputs = sum(self.shapes[name][1] for name in tables) + self.width
        inputs += sum(self.shapes[name][0] for name in self.model.user_rows)
        expected: dict[str, tuple[int, ...]] = {name: (1,) for name in self.model.offsets}
        product = self.model.product
        if product is not None:
            expected[product.user] = self.shapes[product.item_table][1:]
        for layer in self.model.layers:
            if product is not None and layer is self.model.layers[-1]:
                inputs += self.shapes[product.item_table][1]
            outputs = self.shapes[layer.weight][1:] or (1,)
            expected[layer.weight] = (inputs, *self.shapes[layer.weight][1:])
            if layer.bias is not None:
                expected[layer.bias] = outputs
            inputs = outputs[0]
        if inputs != 1:
            raise ValueError(f"Expected a last layer of one output, got {inputs}.")
        own = len(self.model.user_rows)
        if own + len(self.model.user_tables) != len(self.user_widths):
            raise ValueError(
                f"Expected a table for each of {len(self.user_widths) - own} features of the users."
            )
        for name, shape in expected.items():
            if tuple(self.shapes[name]) != shape:
                raise ValueError(
                    f"Expected parameter {name!r} of shape {shape}, got {tuple(self.shapes[name])}."
                )
        for feature in self.model.item_features:
            if feature.categories > self.shapes[feature.table][0]:
                raise ValueError(
                    f"Expected codes of {feature.table!r} below {self.shapes[feature.table][0]}."
                )

    def _layers(self) -> list[list[int]]:
        found = []
        for layer in self.model.layers:
            inputs, *outputs = self.shapes[layer.weight]
            bias = -1 if layer.bias is None else self.places[layer.bias]
            found.append([self.places[layer.weight], inputs, *(outputs or [1]), bias])
        if self.model.product is not None:  # the first rows of the last weight are the product's
            width = self._product()[1]
            found[-1][0] += width
            found[-1][1] -= width
        return found

    def _product(self) -> list[int]:
        """Place of the user's row in the product, its width, and place of the weight."""
        if self.model.product is None:
            return [0, 0, 0]
        user = self.model.product.user
        weight = self.model.layers[-1].weight
        return [self.places[user], self.shapes[user][0], self.places[weight]]


def dense_vectors(
    layout: ParameterLayout, start: Mapping[str, Tensor], own: Mapping[str, Tensor], clients: int
) -> np.ndarray:
    """The dense parameters of every client, `float32 [C, P]`; initial values are from `own`, `[C,
    ...]`, if given there, else from the start."""
    found = torch.empty(clients, layout.size).numpy()  # PyTorch's memory is aligned to cache lines
    for name, place in layout.places.items():
        values = own[name].reshape(clients, -1) if name in own else start[name].reshape(1, -1)
        found[:, place : place + values.shape[1]] = values.numpy()
    return found


def _table(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, width)


def _rates(values: object) -> np.ndarray:
    return np.array(list(values), dtype=np.float32)  # type: ignore[call-overload]


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
