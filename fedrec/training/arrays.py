# SPDX-License-Identifier: Apache-2.0
"""A block of clients and a declared model as arrays of compiled code, and its records: a declared
model as numbers, one client, its batch, and working memory.

All dense parameters of a client are stored in one vector, so that one compiled function serves all
models.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from fedrec.kernel.compiled import FAST, INNER
from fedrec.kernel.products import CODES
from fedrec.kernel.rows import aligned, whole_lines
from fedrec.nn.layers import KernelModel
from fedrec.training.block import Block
from fedrec.training.results import rows_at
from fedrec.training.sgd import SgdSettings

# The records of compiled code.


class Network(NamedTuple):
    """A declared model as numbers. A parameter is named by its place in the vector of dense
    parameters.

    Attributes:
        users: `int64 [U, 5]`, per row of the user's own and feature of the users: place of the
            table, width, first row in the first weight, first and last column in the users' codes.
        features: `int64 [F, 7]`, per feature of the items: the same, with columns of `item_codes`,
            the number of categories, and the column of `item_shares`.
        item_codes: `int64 [items, width]`, codes of all features side by side, the real ones first,
            -1 for none.
        item_shares: `float32 [items, F]`, one over the number of codes.
        item_start: first row of the first weight that meets the items' rows.
        layers: `int64 [L, 4]`: place of the weight, inputs, outputs, place of the bias or -1.
        offsets: `int64 [O]`, places of the offsets.
        product: `int64 [3]`: place of the user's row, its width and place of the weight; a width of
            0 without a product.
        activation: see `fedrec.kernel.products`.
        logistic: whether the loss is logistic; else it is squared.
    """

    users: np.ndarray
    features: np.ndarray
    item_codes: np.ndarray
    item_shares: np.ndarray
    item_start: int
    layers: np.ndarray
    offsets: np.ndarray
    product: np.ndarray
    activation: int
    logistic: bool


class Rates(NamedTuple):
    """Step sizes `float32`, by kind of parameter; 0 for parameters that are fixed.

    Attributes:
        users: `[U]`.
        features: `[F]`.
        weights: `[L]`.
        biases: `[L]`.
        offsets: `[O]`.
        item: of the item table.
        item_bias: of the items' biases.
        product_user: of the user's row in the product.
        product_item: of the items' rows in the product.
    """

    users: np.ndarray
    features: np.ndarray
    weights: np.ndarray
    biases: np.ndarray
    offsets: np.ndarray
    item: np.float32
    item_bias: np.float32
    product_user: np.float32
    product_item: np.float32


class Client(NamedTuple):
    """The parameters that one client trains.

    Attributes:
        dense: `float32 [P]`.
        rows: `float32 [R, d]`, the rows of the item table that it touches; `[R, 0]` without an item
            table.
        biases: `float32 [R, 1]`, their biases; `[R, 0]` without.
        factors: `float32 [R, k]`, their rows in the product; `[R, 0]` without.
        codes: `int64 [W]`, the codes of the user's features side by side.
        first_row: offset to subtract from a place to get the row.
    """

    dense: np.ndarray
    rows: np.ndarray
    biases: np.ndarray
    factors: np.ndarray
    codes: np.ndarray
    first_row: int


class _Batch(NamedTuple):
    """The examples of a step.

    Attributes:
        items: `int64 [n]`.
        rows: `int64 [n]`, rows of the items, see `Client.first_row`.
        labels: `float32 [n]`.
    """

    items: np.ndarray
    rows: np.ndarray
    labels: np.ndarray


class _Scratch(NamedTuple):
    """Working memory of a step, reused in every step.

    Attributes:
        user: `[sum of widths]`, means of the rows of the users' tables.
        base: `[out]`, the part of bias and user in the outputs of the first layer.
        base_gradient: `[out]`, its gradient.
        gathered: `[B, d]`, rows of the item table.
        to_rows: `[B, d]`, their gradients.
        projected: `[most categories * out]`.
        of_categories: `[F, most categories * width]`, rows of the categories that occur in a batch.
        to_categories: `[most categories * width]`, their gradients.
        categories: `int64 [F, most categories]`, those that occur.
        numbers: `int64 [F, most categories]`, their places among these; -1 for others.
        category_counts: `int64 [F]`, how many occur.
        hidden: `[sum of outputs, times B]`, outputs of the layers, one after the other.
        gradients: two of the largest of these.
        product: `[k]`, what the items' rows in the product are multiplied by.
        summed: `[k]`, sums of these rows, weighted by the outputs' gradients.
        room: for transposed factors of products, as large as the largest weight.
    """

    user: np.ndarray
    base: np.ndarray
    base_gradient: np.ndarray
    gathered: np.ndarray
    to_rows: np.ndarray
    projected: np.ndarray
    of_categories: np.ndarray
    to_categories: np.ndarray
    categories: np.ndarray
    numbers: np.ndarray
    category_counts: np.ndarray
    hidden: np.ndarray
    gradients: np.ndarray
    product: np.ndarray
    summed: np.ndarray
    room: np.ndarray


@njit(**INNER)
def batch_of(examples, step, client):
    """The batch of a client's step, of items, places and labels `[S, C, B]` each, and numbers of
    examples `[S, C]`."""
    items, rows, labels, counts = examples
    n = counts[step, client]
    return _Batch(items[step, client, :n], rows[step, client, :n], labels[step, client, :n])


@njit(**FAST)
def scratch_for(network, examples, width):
    """Working memory for steps with batches and rows of the given sizes."""
    inputs = 0
    categories = 0
    table = 0
    outputs = 0
    widest = 0
    for user in network.users:
        inputs = max(inputs, user[2] + user[1])
    for feature in network.features:
        categories = max(categories, feature[5])
        table = max(table, feature[5] * feature[1])
    room = 0
    for layer in network.layers:
        outputs = outputs + layer[2]
        widest = max(widest, layer[2])
        room = max(room, layer[1] * layer[2])
    return _Scratch(
        aligned(1, inputs)[0],
        aligned(1, network.layers[0, 2])[0],
        aligned(1, network.layers[0, 2])[0],
        aligned(examples, width),
        aligned(examples, width),
        aligned(1, categories * network.layers[0, 2] + 1)[0],
        aligned(len(network.features), whole_lines(table)),
        aligned(1, table)[0],
        np.empty((len(network.features), categories), np.int64),
        np.empty((len(network.features), categories + 1), np.int64),
        np.empty(len(network.features), np.int64),
        aligned(1, outputs * examples)[0],
        aligned(2, whole_lines(widest * examples)),
        aligned(1, network.product[1])[0],
        aligned(1, network.product[1])[0],
        aligned(1, room)[0],
    )


# Memory layout of the parameters of a declared model, and its description for compiled code.


class ParameterLayout:
    """Places of the dense parameters in one vector per client.

    Args:
        model: the declaration.
        shapes: shape of every parameter of the model.
        user_widths: number of codes of each row of the user's own (1) and feature of the users.

    Attributes:
        starts: place of each dense parameter in the vector.
        size: length of the vector.
    """

    def __init__(
        self,
        model: KernelModel,
        shapes: Mapping[str, tuple[int, ...]],
        user_widths: tuple[int, ...],
    ) -> None:
        self.model = model
        self.shapes = shapes
        self.user_widths = user_widths
        self._check_shapes()
        lines = whole_lines.py_func  # compiled for one call, it would take 0.1 s in each process
        sizes = [lines(int(np.prod(shapes[name]))) for name in model.dense]
        *starts, self.size = np.cumsum([0, *sizes]).tolist()
        self.starts: dict[str, int] = dict(zip(model.dense, starts, strict=True))

    @property
    def width(self) -> int:
        """Width of the rows of the item table; 0 without one."""
        return self.shapes[self.model.item_table][1] if self.model.item_table is not None else 0

    @cached_property
    def network(self) -> Network:
        """The model as a record of numbers."""
        start = 0
        users = []
        features = []
        ends = np.cumsum([0, *self.user_widths]).tolist()
        for number, name in enumerate((*self.model.user_rows, *self.model.user_tables)):
            width = self.shapes[name][-1]
            users.append([self.starts[name], width, start, ends[number], ends[number + 1]])
            start += width
        item_start = start
        start = start + self.width
        column = 0
        for number, feature in enumerate(self.model.item_features):
            categories, width = self.shapes[feature.table]
            columns = column, column + feature.codes.shape[1]
            features.append(
                [self.starts[feature.table], width, start, *columns, categories, number]
            )
            start = start + width
            column = columns[1]
        return Network(
            _table(users, 5),
            _table(features, 7),
            *self.model.item_codes,
            item_start,
            _table(self._layers(), 4),
            np.array([self.starts[name] for name in self.model.offsets], dtype=np.int64),
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

    def _check_shapes(self) -> None:
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
        _check(inputs == 1, "a last layer of one output")
        users = len(self.model.user_rows) + len(self.model.user_tables)
        _check(users == len(self.user_widths), "a table for each feature of the users")
        for name, shape in expected.items():
            _check(tuple(self.shapes[name]) == shape, f"parameter {name!r} of shape {shape}")
        for feature in self.model.item_features:
            rows = self.shapes[feature.table][0]
            _check(feature.categories <= rows, f"codes of {feature.table!r} below {rows}")

    def _layers(self) -> list[list[int]]:
        layers = []
        for layer in self.model.layers:
            inputs, *outputs = self.shapes[layer.weight]
            bias = -1 if layer.bias is None else self.starts[layer.bias]
            layers.append([self.starts[layer.weight], inputs, *(outputs or [1]), bias])
        if self.model.product is not None:  # the first rows of the last weight are the product's
            width = self._product()[1]
            layers[-1][0] += width
            layers[-1][1] -= width
        return layers

    def _product(self) -> list[int]:
        """Place of the user's row in the product, its width, and place of the weight."""
        if self.model.product is None:
            return [0, 0, 0]
        user = self.model.product.user
        weight = self.model.layers[-1].weight
        return [self.starts[user], self.shapes[user][0], self.starts[weight]]


def dense_vectors(
    layout: ParameterLayout,
    start: Mapping[str, Tensor],
    client_params: Mapping[str, Tensor],
    n: int,
) -> np.ndarray:
    """The dense parameters of n clients, `float32 [n, P]`, aligned to cache lines as PyTorch's
    memory is; those that differ between clients, `[n, ...]`, and for the others the start."""
    vectors = torch.empty(n, layout.size).numpy()
    for name, begin in layout.starts.items():
        values = client_params.get(name, start[name].unsqueeze(0))
        vectors[:, begin : begin + start[name].numel()] = values.reshape(len(values), -1).numpy()
    return vectors


def table_rows(
    start: Mapping[str, Tensor], client_params: Mapping[str, Tensor], name: str | None, block: Block
) -> np.ndarray:
    """The touched rows of an item table, `[C, R, d]`, a copy; without a table `[C, R, 0]`."""
    if name is None:
        return np.empty((*block.touched.shape, 0), dtype=np.float32)
    if name in client_params:
        return client_params[name].clone(memory_format=torch.contiguous_format).numpy()
    return rows_at(start[name], block.touched).numpy()


def check_block(
    model: KernelModel,
    start: Mapping[str, Tensor],
    client_params: Mapping[str, Tensor],
    block: Block,
) -> None:
    """Raise ValueError if native code would read beyond the end of an array."""
    names = {*model.dense, *model.item_tables}
    fits = names == set(start) and all(value.dtype == torch.float32 for value in start.values())
    _check(fits, f"the float32 parameters {sorted(names)}")
    for name, codes in zip(model.user_tables, block.users, strict=False):
        below = len(start[name])
        _check(int(codes.numpy().max(initial=-1)) < below, f"codes of {name!r} below {below}")
    rows = [len(feature.codes) for feature in model.item_features]
    for name in model.item_tables:
        if name in client_params:
            shape = (*block.touched.shape, start[name].shape[1])
            _check(client_params[name].shape == shape, f"rows of {name!r} of shape {shape}")
        else:
            rows.append(len(start[name]))
    if block.touched.numel() and rows:
        low, high = (int(item) for item in block.touched.aminmax())
        _check(low >= 0 and high < min(rows), f"items below {min(rows)}")


def _check(fits: bool, expected: str) -> None:
    if not fits:
        raise ValueError(f"Expected {expected}.")


def _table(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, width)


def _rates(values: Iterable[float]) -> np.ndarray:
    return np.array(list(values), dtype=np.float32)
